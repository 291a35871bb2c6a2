"""An exception inside a step fails the requests that cause it, once; every other result is as in a quiet run."""

import random

import pytest
import torch
from helpers import tiny_models

from choreograph import SamplingParams
from choreograph.engine import model_runner, sampler
from choreograph.errors import InvalidRequestError, RequestFailedError

POISON = tiny_models.VOCABULARY - 1  # computing this token raises
SAMPLING = SamplingParams(max_tokens=6, seed=3, logit_bias={POISON: -100}, ignore_eos=True)


def break_forward(engine, monkeypatch, kind: str) -> list[int]:
    """Break the model for batches that contain POISON; return a list that grows with every such call."""
    forward, calls = engine.core.hf_model.forward, []

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

    monkeypatch.setattr(engine.core.hf_model, "forward", broken)
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
        runner, computed = engine.core.model_runner, []

        def guarded(function, tokens_of, *, computed=computed):
            def call(*arguments, **options):
                computed[:] = tokens_of(*arguments) or computed
                if POISON in computed:
                    raise ValueError("poison")
                return function(*arguments, **options)

            return call

        forward, overlap = engine.core.hf_model.forward, runner._overlap_scheduler
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

            monkeypatch.setattr(engine.core.hf_model, "forward", record)
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
