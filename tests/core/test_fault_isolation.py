"""An exception inside a step fails the requests that cause it, once; every other result is as in a quiet run."""

import random

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph import SamplingParams
from choreograph.core import admission, scheduler
from choreograph.errors import InvalidRequestError, RequestFailedError
from choreograph.execution import model_runner, sampler

POISON = tiny_models.VOCABULARY - 1  # computing this token raises
SAMPLING = SamplingParams(max_tokens=6, seed=3, logit_bias={POISON: -100}, ignore_eos=True)


def break_forward(engine, monkeypatch, kind: str) -> list[int]:
    """Break the model for batches that contain POISON; return a list that grows with every such call."""
    forward, calls = inspect(engine).hf_model.forward, []

    def broken(tokens, positions, context, rows, models=()):
        if POISON not in tokens:
            return forward(tokens, positions, context, rows, models)
        calls.append(len(tokens))
        if kind == "exception":
            raise ValueError("poison")
        if kind == "out of memory":
            raise torch.OutOfMemoryError("poison")
        if kind == "rows missing":
            return forward(tokens, positions, context, rows, models)[:-1]
        return forward(tokens, positions, context, rows, models)[:, None]  # one dimension too many

    monkeypatch.setattr(inspect(engine).hf_model, "forward", broken)
    return calls


def random_program(seed: int) -> list[tuple[bool, list[int], list[int]]]:
    """Return (is a decode, own tokens, parents) of each message; some contain POISON."""
    chance, program = random.Random(seed), []
    for index in range(chance.randrange(3, 12)):
        parents = chance.sample(range(index), min(index, chance.randrange(3)))
        tokens = [chance.randrange(POISON) for _ in range(chance.randrange(1, 8))]
        if chance.random() < 0.25:
            tokens[chance.randrange(len(tokens))] = POISON
        program.append((chance.random() < 0.6, tokens, parents))
    return program


def run(engine, program, mode: str, skipped: set[int] = frozenset()) -> list[list[int] | Exception | None]:
    """Return the tokens, or the error, of every message; None for the skipped ones."""
    results = []
    with engine.session(mode=mode, seed=1) as session:
        messages = []
        for index, (is_decode, tokens, parents) in enumerate(program):
            if index in skipped:
                messages.append(None)
                continue
            context = [messages[parent] for parent in parents if parent not in skipped]
            messages.append(
                session.decode(tokens, context, sampling=SAMPLING) if is_decode else session.prefill(tokens, context)
            )
        engine.run_until_idle()
        for message in messages:
            try:
                results.append(None if message is None else message.result().tokens)
            except RequestFailedError as exc:
                results.append(exc)
        engine.check()
    engine.check()
    return results


def guilty(program, mode: str) -> set[int]:
    """Messages that compute POISON or need a message that does."""
    failed: set[int] = set()
    for index, (is_decode, tokens, parents) in enumerate(program):
        if mode == "choreographed":
            if POISON in tokens or failed & set(parents):
                failed.add(index)
        elif is_decode and (failed & set(parents) or any(POISON in program[i][1] for i in (index, *parents))):
            failed.add(index)  # prefills are text alone: their tokens are computed by the decodes that include them
    return failed


@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
@pytest.mark.parametrize("kind", ["exception", "out of memory", "rows missing", "wrong shape"])
def test_only_the_requests_that_cause_an_exception_fail(mode, kind, monkeypatch):
    for seed in range(12):
        program = random_program(seed)
        engine = tiny_models.engine()
        break_forward(engine, monkeypatch, kind)
        results = run(engine, program, mode)
        failed = {index for index, result in enumerate(results) if isinstance(result, Exception)}
        if kind in ("exception", "out of memory"):
            assert failed == guilty(program, mode)
        expected = run(tiny_models.engine(), program, mode, failed)
        assert [result for i, result in enumerate(results) if i not in failed] == [
            result for i, result in enumerate(expected) if i not in failed
        ]
        with engine.session(seed=1) as session:  # the engine is as good as new
            assert len(session.decode([1, 2], sampling=SAMPLING).output_token_ids) == 6


def test_a_failure_is_raised_once_with_its_cause(monkeypatch):
    engine = tiny_models.engine()
    calls = break_forward(engine, monkeypatch, "exception")
    with engine.session(seed=1) as session:
        others = [session.decode([i], sampling=SAMPLING) for i in range(5)]
        bad = session.decode([POISON], sampling=SAMPLING)
        assert all(len(message.output_token_ids) == 6 for message in others)
        with pytest.raises(RequestFailedError, match="poison") as failed:
            bad.result()
        assert isinstance(failed.value.__cause__, ValueError)
        num_calls = len(calls)
        session.decode([7], sampling=SAMPLING).result()
        assert len(calls) == num_calls, "the failed request is not computed again"
        with pytest.raises(InvalidRequestError, match="failed"):
            session.decode([8], [bad], sampling=SAMPLING).result()


@pytest.mark.parametrize("name", ["sample", "read"])
def test_a_sampler_that_raises_for_one_request_fails_that_one(name, monkeypatch):
    with tiny_models.engine().session(seed=1) as session:
        tokens = [session.decode([i], sampling=SAMPLING).output_token_ids for i in range(3)]
    bad_seed = 13

    def broken(original, states_of):
        def call(*arguments):
            if any(state.sampling.seed == bad_seed for state in states_of(*arguments)):
                raise RuntimeError("no sample")
            return original(*arguments)

        return call

    if name == "sample":
        monkeypatch.setattr(model_runner, "sample", broken(model_runner.sample, lambda logits, states: states))
    else:
        read = broken(sampler.SampleOutput.read, lambda output: output._decode_states)
        monkeypatch.setattr(sampler.SampleOutput, "read", read)
    engine = tiny_models.engine()
    with engine.session(seed=1) as session:
        messages = [session.decode([i], sampling=SAMPLING) for i in range(3)]
        bad = session.decode([9], sampling=SamplingParams(max_tokens=6, seed=bad_seed, ignore_eos=True))
        assert [message.output_token_ids for message in messages] == tokens
        with pytest.raises(RequestFailedError, match="no sample"):
            bad.result()
    engine.check()


@pytest.mark.parametrize("site", ["metadata", "attention", "plan of the next step", "sampler"])
def test_an_exception_anywhere_in_a_step_fails_only_its_cause(site, monkeypatch):
    for seed in range(8):
        program = random_program(seed)
        engine = tiny_models.engine()
        runner, computed = inspect(engine).runner, []

        def guarded(function, tokens_of, *, computed=computed):
            def call(*arguments, **options):
                computed[:] = tokens_of(*arguments) or computed
                if POISON in computed:
                    raise ValueError("poison")
                return function(*arguments, **options)

            return call

        forward, overlap = inspect(engine).hf_model.forward, inspect(engine).overlap_scheduler
        if site == "metadata":
            make = guarded(runner._make_forward_context, lambda batch: batch.tokens)
            monkeypatch.setattr(runner, "_make_forward_context", make)
            monkeypatch.setattr(overlap, "plan_next", lambda batch: None)  # every batch builds its own
        elif site == "plan of the next step":
            monkeypatch.setattr(overlap, "plan_next", guarded(overlap.plan_next, lambda batch: batch.tokens))
        else:

            def record(tokens, *arguments, computed=computed, forward=forward):
                computed[:] = tokens
                return forward(tokens, *arguments)

            monkeypatch.setattr(inspect(engine).hf_model, "forward", record)
            if site == "attention":
                monkeypatch.setattr(runner, "backend", guarded(runner.backend, lambda call: None))
            else:
                monkeypatch.setattr(runner, "sample", guarded(runner.sample, lambda logits, requests: None))
        results = run(engine, program, "choreographed")
        failed = {index for index, result in enumerate(results) if isinstance(result, Exception)}
        assert failed <= guilty(program, "choreographed")
        if site != "sampler":  # a prefill samples nothing
            assert failed == guilty(program, "choreographed")
        expected = run(tiny_models.engine(), program, "choreographed", failed)
        assert [r for i, r in enumerate(results) if i not in failed] == [
            r for i, r in enumerate(expected) if i not in failed
        ]


# -- before a batch exists ---------------------------------------------------------------------------------------------


def prompts(queues) -> list[int]:
    """All tokens of the requests of both queues."""
    return [token for request in (*queues.waiting, *queues.running) for token in request.prompt]


SCHEDULING_SITES = {  # call site: the tokens that a call handles, of its arguments
    "placement": lambda request, *_: request.prompt,
    "residency": None,
    "allocation": lambda tokens, *_: tokens,
    "registration": lambda entry, _: entry.tokens,
    "reuse of a header": lambda _, request: request.entry.tokens,
    "admission": lambda request: request.prompt,
    "readiness": lambda request, _: request.entry.tokens,
    "chunk": lambda _, request, *__: request.entry.tokens,
    "pack": lambda requests, *_: [token for request in requests for token in request.entry.tokens],
    "order": None,
    "group": lambda requests: [token for request in requests for token in request.entry.tokens],
    "schedule": None,
}


def break_scheduling(engine, monkeypatch, site: str, mode: str, *, after: bool = False) -> list[int]:
    """Make a call site raise for requests with POISON; return a list that grows with every such call.

    after: the call does its work before it raises.
    """
    internals, calls = inspect(engine), []
    queues, manager = internals.scheduler, internals.cache_manager
    tokens_of = SCHEDULING_SITES[site] or (lambda *_: prompts(queues))
    if site == "residency":

        def tokens_of(request_id, *_):
            return next(request.prompt for request in queues.waiting if request.id == request_id)

    def guard(owner, name):
        function = owner[name] if isinstance(owner, dict) else getattr(owner, name)

        def guarded(*arguments, **options):
            if POISON not in tokens_of(*arguments):
                return function(*arguments, **options)
            calls.append(1)
            if after:
                function(*arguments, **options)
            raise ValueError("poison")

        if isinstance(owner, dict):
            monkeypatch.setitem(owner, name, guarded)
        else:
            monkeypatch.setattr(owner, name, guarded)

    owners = {
        "placement": (admission.PLACERS, mode),
        "residency": (internals.context_loader, "ensure_resident"),
        "allocation": (manager, "allocate_entry"),
        "registration": (manager, "register"),
        "reuse of a header": (admission, "reuse_header"),
        "admission": (queues.admission, "_admit"),
        "readiness": (scheduler, "_is_ready"),
        "chunk": (scheduler.Batch, "add_chunk"),
        "pack": (queues, "pack"),
        "order": (queues, "_priority_order"),
        "group": (queues, "_group_by_model"),
        "schedule": (queues, "schedule"),
    }
    guard(*owners[site])
    return calls


def assert_others_are_undisturbed(program, mode, results, failed):
    expected = run(tiny_models.engine(), program, mode, failed)
    assert [r for i, r in enumerate(results) if i not in failed] == [
        r for i, r in enumerate(expected) if i not in failed
    ]


@pytest.mark.parametrize(
    ("site", "after"),
    # pages that are allocated and not returned would belong to nothing
    [(site, after) for site in SCHEDULING_SITES for after in (False, True) if (site, after) != ("allocation", True)],
)
def test_an_exception_of_the_scheduler_fails_only_its_cause(site, after, monkeypatch):
    mode = "prefix" if site == "placement" else "choreographed"
    for seed in range(4):
        program = random_program(seed)
        engine = tiny_models.engine()
        with monkeypatch.context() as patch:
            calls = break_scheduling(engine, patch, site, mode, after=after)
            results = run(engine, program, mode)
        failed = {index for index, result in enumerate(results) if isinstance(result, Exception)}
        if site in ("reuse of a header", "placement"):  # of decodes alone
            assert failed <= guilty(program, mode) and bool(failed) == bool(calls)
        else:
            assert failed == guilty(program, mode)
        assert_others_are_undisturbed(program, mode, results, failed)
        with engine.session(seed=1) as session:
            assert len(session.decode([1, 2], sampling=SAMPLING).output_token_ids) == 6


TRANSIENT_SITES = {
    "acquire": lambda internals: (internals.cache_manager, "acquire"),
    "pages": lambda internals: (internals.pool, "allocate"),
    "load": lambda internals: (internals.cache_manager, "load"),
    "copy": lambda internals: (internals.offload_manager.executor, "start"),
    "recomputation": lambda internals: (internals.context_loader, "_start_recompute"),
    "frame": lambda internals: (internals.context_loader, "_finish"),
    "readiness": lambda internals: (scheduler, "_is_ready"),
    "schedule": lambda internals: (internals.scheduler, "schedule"),
}


@pytest.mark.parametrize(
    ("site", "host"),
    [(site, None if site in ("recomputation", "frame", "schedule") else 24) for site in TRANSIENT_SITES],
)
def test_a_single_exception_under_memory_pressure_fails_one_request_at_most(site, host, monkeypatch):
    """And those that need it. Contexts are evicted, loaded and recomputed all the time."""
    for seed in range(4):
        chance = random.Random(seed)
        program = [
            (
                index > 2,
                [chance.randrange(POISON) for _ in range(6)],
                chance.sample(range(min(3, index)), min(2, index)),
            )
            for index in range(12)
        ]
        engine = tiny_models.engine(tokens=40, host_capacity=host)
        calls, raising_call = [], chance.randrange(8)
        owner, name = TRANSIENT_SITES[site](inspect(engine))
        original = getattr(owner, name)

        def guarded(*arguments, function=original, calls=calls, raising_call=raising_call, **options):
            calls.append(1)
            if len(calls) == raising_call + 1:
                raise ValueError("once")
            return function(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, guarded)
            results = run(engine, program, "choreographed")
        failed = {index for index, result in enumerate(results) if isinstance(result, Exception)}
        causes = [index for index in failed if not failed & set(program[index][2])]
        assert len(causes) <= (len(calls) > raising_call)
        assert_others_are_undisturbed(program, "choreographed", results, failed)
