"""What goes wrong in long lives: broken steps, threads, listeners that act, growth of memory, unfair loads."""

import threading

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect
from helpers.recursion_limit import limit_recursion

from choreograph import Engine, SamplingParams
from choreograph.api.call import Call
from choreograph.attention import cpp_backend as native
from choreograph.attention.metadata import AttentionCall, AttentionSpec, build_metadata
from choreograph.errors import CacheFullError, MessageReleasedError, RequestFailedError, SessionClosedError
from choreograph.layer_reuse.context_store import ContextStore
from choreograph.prompt_cache import PromptCache

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def answer(engine: Engine, prompt=(1, 2, 3), **place) -> list[int]:
    with engine.session() as session:
        return session.decode(list(prompt), sampling=GREEDY, **place).output_token_ids


# -- identity ------------------------------------------------------------------------------------------------


def test_a_client_name_never_runs_into_the_tokens():
    engine = tiny_models.engine()
    with engine.session(client_id="user") as a, engine.session(client_id="user1") as b:
        a.prefill([12, 3]).result()
        other = b.prefill([2, 3]).result()
        assert other.usage.cached_tokens == 0
        assert inspect(other).entry.tokens == [2, 3]


def test_a_parent_released_after_validation_is_still_refused():
    engine = tiny_models.engine()
    with engine.session() as session:
        parent = session.prefill([1, 2])
        late = session.build(Call("prefill", [3], (parent,)))
        parent.release()
        with pytest.raises(MessageReleasedError):
            session.submit([late])
        engine.check()


# -- broken steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["sample", "build_metadata", "Batch.add_chunk", "forward"])
def test_a_step_that_breaks_anywhere_is_as_if_it_had_not_been(where, monkeypatch):
    engine, expected = tiny_models.engine(), answer(tiny_models.engine())

    def broken(*_):
        raise KeyboardInterrupt

    with engine.session(seed=0) as session:
        message = session.decode([1, 2, 3], sampling=GREEDY)
        sampled = session.decode([4], sampling=SamplingParams(max_tokens=5, seed=9, logprobs=1))
        for _ in range(3):
            with monkeypatch.context() as patch:
                inspect(engine).runner.reset()  # else the metadata was built by the step before
                if where == "forward":
                    patch.setattr(inspect(engine).hf_model, "forward", broken)
                else:
                    module = "core.scheduler" if where == "Batch.add_chunk" else "execution.model_runner"
                    patch.setattr(f"choreograph.{module}.{where}", broken)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            engine.check()
            engine.step()
        assert message.output_token_ids == expected
        tokens = sampled.output_token_ids
        assert len(sampled.logprobs) == 5
    with tiny_models.engine().session() as session:
        assert session.decode([4], sampling=SamplingParams(max_tokens=5, seed=9)).output_token_ids == tokens


@pytest.mark.parametrize(
    ("mode", "where"),
    [("prefix", "prefix_tree.PrefixTree.insert"), ("choreographed", "manager.KVCacheManager.register")],
)
def test_a_call_whose_admission_is_interrupted_holds_nothing(mode, where, monkeypatch):
    engine = tiny_models.engine()

    def interrupted(*_):
        raise KeyboardInterrupt

    with engine.session(mode=mode) as session:
        parent = session.decode([1, 2, 3], sampling=GREEDY).wait_encoded()
        held = engine.stats().num_referenced_pages
        late = [session.prefill([4, 5], [parent])]
        late.append(session.decode([6], [parent, late[0]], sampling=GREEDY))
        with monkeypatch.context() as patch:
            patch.setattr(f"choreograph.kv_cache.{where}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        engine.check()
        assert engine.stats().num_referenced_pages == held
        assert late[1].output_token_ids
        engine.check()
    engine.clear_cache()
    counts = inspect(engine).cache_manager.stats
    assert counts["num_referenced_entries"] == 0 and counts["num_free_pages"] == counts["num_pages"]


@pytest.mark.parametrize(
    ("mode", "where"),
    [("prefix", "prefix_tree.PrefixTree.insert"), ("choreographed", "manager.KVCacheManager.register")],
)
def test_a_call_whose_admission_breaks_fails_and_holds_nothing(mode, where, monkeypatch):
    engine = tiny_models.engine()
    with engine.session(mode=mode) as session:
        parent = session.decode([1, 2, 3], sampling=GREEDY).wait_encoded()
        held = engine.stats().num_referenced_pages
        late = session.prefill([4, 5], [parent]) if mode == "choreographed" else session.decode([6], [parent])
        with monkeypatch.context() as patch:
            patch.setattr(f"choreograph.kv_cache.{where}", lambda *_: 1 // 0)
            with pytest.raises(RequestFailedError, match="admitting it raised") as failed:
                late.result()
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        engine.check()
        assert engine.stats().num_referenced_pages == held
        assert session.decode([7], [parent], sampling=GREEDY).output_token_ids


def test_one_call_without_numbers_fails_alone():
    engine = tiny_models.engine()
    healthy = inspect(engine).hf_model.forward

    def poisoned(*arguments):
        logits = healthy(*arguments)
        logits[0] = float("nan")
        return logits

    with engine.session() as session:
        sick = session.decode([1, 2, 3], sampling=SamplingParams(top_p=0.5))
        well = session.decode([4, 5], sampling=GREEDY)
        inspect(engine).hf_model.forward = poisoned
        engine.step()
        inspect(engine).hf_model.forward = healthy
        with pytest.raises(RequestFailedError, match="NaN"):
            sick.result()
        assert well.output_token_ids == answer(tiny_models.engine(), [4, 5])
        engine.check()


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_hearer_that_raises_fails_its_message_alone(mode, at):
    engine, expected = tiny_models.engine(), answer(tiny_models.engine(), [4, 5])
    with engine.session(mode=mode) as session:
        watched = session.decode([1, 2, 3], sampling=GREEDY)
        other = session.decode([4, 5], sampling=GREEDY)
        child = session.decode([6], [watched], sampling=GREEDY)
        heard, rows = [], []

        def hear(row):
            heard.append(row)
            if len(heard) == at:
                raise ValueError("mine")

        watched.on_logprobs(hear)
        other.on_logprobs(rows.append)
        assert other.output_token_ids == [int(row.argmax()) for row in rows] == expected
        with pytest.raises(RequestFailedError, match="its log-probability callback raised ValueError: mine") as failed:
            watched.result()
        assert isinstance(failed.value.__cause__, ValueError) and len(heard) == at
        with pytest.raises(RequestFailedError, match=f"parent {watched.id} failed"):
            child.result()
        engine.check()
    engine.run_until_idle()
    engine.clear_cache()
    counts = inspect(engine).cache_manager.stats
    assert counts["num_referenced_entries"] == 0 and counts["num_free_pages"] == counts["num_pages"]


def test_a_hearer_hears_of_steps_that_are_published():
    engine = tiny_models.engine()
    with engine.session() as session:
        watched, other = (session.decode([1, 2, number], sampling=GREEDY) for number in (3, 4))
        seen = []
        watched.on_logprobs(lambda _: (seen.append(len(inspect(other).generated)), engine.check()))
        watched.result()
        assert seen == [1, 2, 3, 4, 5, 6]


def test_one_call_that_cannot_take_its_token_fails_alone(monkeypatch):
    engine = tiny_models.engine()
    with engine.session() as session:
        sick, well = session.decode([1, 2, 3], sampling=GREEDY), session.decode([4, 5], sampling=GREEDY)
        engine.step()
        monkeypatch.setattr(inspect(sick).decode_state, "append", lambda token: 1 // 0)
        assert well.output_token_ids == answer(tiny_models.engine(), [4, 5])
        with pytest.raises(RequestFailedError, match="ZeroDivisionError"):
            sick.result()
        engine.check()
    assert engine.stats().num_referenced_entries == 0


def test_listeners_act_between_steps():
    """Stop the others when one finishes: nothing that is released comes back."""
    engine = tiny_models.engine()
    with engine.session(seed=0) as session:
        racers = [session.decode([i], sampling=SamplingParams(max_tokens=4 + i, temperature=0)) for i in range(5)]

        def stop_others(event):
            if event.kind == "token" and racers[0].done:
                for other in racers[1:]:
                    other.release()

        forget = engine.events.subscribe(stop_others)
        racers[0].result()
        engine.run_until_idle()
        forget()
        engine.check()
        for other in racers[1:]:
            with pytest.raises(MessageReleasedError):
                other.result()
    assert engine.stats().num_referenced_entries == 0


@pytest.mark.parametrize("kind", ["submitted", "admitted", "token", "finished", "released"])
def test_a_listener_that_raises_orphans_nothing(kind):
    engine, heard, raised = tiny_models.engine(), [], 0

    def broken(event):
        if event.kind == kind:
            raise ValueError("mine")

    forget = engine.events.subscribe(broken)
    engine.events.subscribe(lambda event: heard.append(event.kind))
    session = engine.session()
    before = session.prefill([1, 2]) if kind != "submitted" else None
    for use in (
        lambda: session.decode([{"header": [3]}, {"header": [4]}]),
        engine.run_until_idle,
        lambda: session.import_message(before or session.messages[0]),
        session.close,
    ):
        try:
            use()
        except ValueError:
            raised += 1
    assert raised and not session.messages
    assert heard == [event.kind for event in engine.events.recent]
    forget()
    engine.run_until_idle()
    engine.check()
    assert engine.stats().num_referenced_entries == 0


def test_a_listener_is_taken_off_once_however_often_that_is_asked():
    engine, heard = tiny_models.engine(), []
    forget, _ = (engine.events.subscribe(heard.append) for _ in range(2))
    forget()
    forget()
    engine.session().prefill([1])
    assert [event.kind for event in heard] == ["submitted"], "who listens twice and stops once hears once"


def test_a_session_releases_everything_whatever_goes_wrong_and_raises_the_first_problem(monkeypatch):
    engine = tiny_models.engine()
    session = engine.session()
    messages = [session.prefill([i] * 4).pin() for i in range(3)]
    release = inspect(engine).lifecycle.release

    def broken(call):
        release(call)
        raise ValueError(f"message {call.id}")

    def told(event):
        raise ValueError("later")

    monkeypatch.setattr(inspect(engine).lifecycle, "release", broken)
    engine.events.subscribe(told)
    with pytest.raises(ValueError, match=f"message {messages[-1].id}"):
        session.close()
    assert engine.stats().num_referenced_entries == 0 and not inspect(engine).pins
    engine.check()


def kept_in_a_store(engine, session):
    with ContextStore(engine) as store:
        yield store.store_kv(session.prefill([1, 2]))


def kept_in_a_cache(engine, session):
    with PromptCache(engine, '<schema name="s"><module name="m">1 2</module></schema>') as cache:
        yield cache.warmup()


@pytest.mark.parametrize("keep", [kept_in_a_store, kept_in_a_cache])
def test_what_closing_a_store_raises_does_not_take_the_place_of_a_problem_inside(keep, embedded):
    engine = embedded if keep is kept_in_a_cache else tiny_models.engine()

    def broken(event):
        raise ValueError("the listener's")

    mine = KeyError("mine")
    with engine.session() as session:
        block = keep(engine, session)
        next(block)
        forget = engine.events.subscribe(broken)
        with pytest.raises(KeyError, match="mine"):
            block.throw(mine)
        forget()
    assert "the listener's" in mine.__notes__[0]


def test_what_closing_a_session_raises_does_not_take_the_place_of_a_problem_inside():
    engine = tiny_models.engine()

    def broken(event):
        if event.kind == "released":
            raise ValueError("the listener's")

    def block(problem):
        with engine.session() as session:
            session.prefill([1, 2]).result()
            engine.events.subscribe(broken)
            if problem:
                raise problem

    mine = KeyError("mine")
    with pytest.raises(KeyError, match="mine"):
        block(mine)
    assert "the listener's" in mine.__notes__[0]
    with pytest.raises(ValueError, match="the listener's"):
        block(None)
    assert engine.stats().num_referenced_entries == 0


def test_the_first_problem_of_listeners_is_raised_when_all_have_heard():
    engine, heard = tiny_models.engine(), []
    for name in ("first", "second"):

        def broken(event, name=name):
            heard.append((name, event.kind))
            raise ValueError(name)

        engine.events.subscribe(broken)
    with pytest.raises(ValueError, match="first"):
        engine.session().prefill([{"tokens": [1]}, {"tokens": [2]}])
    assert heard == [("first", "submitted"), ("second", "submitted")] * 2


def test_what_a_listener_makes_happen_is_heard_after_what_it_heard():
    engine, heard = tiny_models.engine(), []

    def reads(event):
        if event.kind == "submitted":
            session.messages[0].result()

    engine.events.subscribe(reads)
    engine.events.subscribe(lambda event: heard.append(event))
    with engine.session() as session:
        session.decode([1, 2], sampling=GREEDY)
    assert heard == list(engine.events.recent)


# -- threads -------------------------------------------------------------------------------------------------


def in_another_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_what_is_submitted_while_another_thread_closes_the_session_is_released():
    engine = tiny_models.engine()
    session, submit = engine.session(), inspect(engine).core.add_requests

    def closing(*calls, **given):
        submit(*calls, **given)
        in_another_thread(session.close)

    inspect(engine).core.add_requests = closing
    with pytest.raises(SessionClosedError):
        session.prefill([{"tokens": [1, 2]}, {"tokens": [3]}])
    engine.run_until_idle()
    assert not session.messages and engine.stats().num_referenced_entries == 0


def test_what_is_pinned_while_another_thread_closes_the_session_is_not_kept():
    engine = tiny_models.engine()
    session = engine.session()
    first, second = (session.prefill([i, 2]).result() for i in range(2))
    release = inspect(engine).lifecycle.release

    def pinning(call):
        if call is inspect(second).request:
            in_another_thread(first.pin)
        release(call)

    inspect(engine).lifecycle.release = pinning
    session.close()
    assert not inspect(engine).pins and engine.stats().num_referenced_entries == 0


def test_threads_share_an_engine_and_engines_share_a_model():
    expected = {i: answer(tiny_models.engine(), [i, 7]) for i in range(12)}
    engines, wrong = [tiny_models.engine(), tiny_models.engine()], []

    def work(i: int) -> None:
        for _ in range(3):
            if answer(engines[i % 2], [i, 7]) != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tiny_models.model().config._attn_implementation == "sdpa"
    for engine in engines:
        engine.check()
        assert engine.stats().num_referenced_entries == 0


# -- types ---------------------------------------------------------------------------------------------------


def test_autocast_of_the_caller_changes_nothing():
    expected = answer(tiny_models.engine())
    with torch.autocast("cpu", torch.bfloat16):
        assert answer(tiny_models.engine()) == expected


def test_the_kernel_refuses_tensors_that_it_was_not_built_for():
    kernel = native.load_kernel(16, torch.float32, torch.device("cpu"))
    wrong = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="built for"):
        kernel(AttentionCall(build_metadata([0], [], [0]), wrong, wrong, wrong, wrong, wrong, 1.0, AttentionSpec()))


def test_a_cache_folder_that_cannot_be_written_falls_back(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(native, "user_cache_path", lambda _: blocked)
    native.load_kernel.cache_clear()
    try:
        engine = tiny_models.engine()
        assert inspect(engine).backend.name == "sdpa"
        assert inspect(engine).backend_fallback_reason
        assert answer(engine) == answer(tiny_models.engine(backend="reference"))
    finally:
        native.load_kernel.cache_clear()


# -- growth and fairness -------------------------------------------------------------------------------------


def test_timing_of_long_and_dense_graphs_is_immediate():
    engine = tiny_models.engine(tokens=8192)
    with engine.session() as session:
        dense = []
        for i in range(60):
            dense.append(session.prefill([i % 50], parents=dense))
        assert dense[-1].timing.e2e is not None
        with limit_recursion(250):
            last = session.prefill([1])
            for _ in range(300):
                last = session.prefill([1], parents=[last], offsets=[0], new_offset=1)
            assert last.timing.e2e is not None


def test_released_messages_and_forgotten_clients_leave_nothing_behind():
    engine = tiny_models.engine()
    with engine.session() as session:
        for i in range(30):
            session.prefill([i, i + 1]).result().release()
        assert session.messages == []
    for i in range(20):
        with engine.session(mode="prefix", client_id=f"client {i}") as session:
            session.decode([1, 2, 3], sampling=GREEDY).result()
    engine.clear_cache()
    assert not len(inspect(engine).prefix_tree)
    assert engine.stats().num_unreferenced_entries == 0


def test_clients_whose_calls_do_not_fit_leave_nothing_behind():
    engine = tiny_models.engine(tokens=64)
    for i in range(3):
        with engine.session(mode="prefix", client_id=f"client {i}") as session, pytest.raises(CacheFullError):
            session.decode([1], [session.prefill([2] * 64)], sampling=GREEDY).result()
    assert not len(inspect(engine).prefix_tree)


def test_ready_calls_take_turns_when_a_step_is_small():
    engine = tiny_models.engine(step=2)
    with engine.session() as session:
        calls = [session.decode([i], sampling=SamplingParams(max_tokens=40, temperature=0)) for i in range(6)]
        for _ in range(30):
            engine.step()
        counts = [len(inspect(m).generated) for m in calls]
        assert max(counts) - min(counts) <= 1


def test_a_prompt_that_nobody_can_use_yet_delays_no_first_token():
    engine = tiny_models.engine()
    with engine.session() as session:
        exc = session.prefill(list(range(10)))
        branches = [session.decode([20 + i, 3], [exc], sampling=GREEDY) for i in range(3)]
        later = session.prefill(list(range(30)))
        vote = session.decode([9], [later, *branches], sampling=GREEDY)
        engine.step()
        assert engine.stats().num_batched_tokens == 10 + 3 * 2
        engine.step()
        assert engine.stats().num_batched_tokens == 16 + 3 + 30, "encoded while the branches decode"
        assert vote.result().timing.ttft is not None


def test_max_tokens_beyond_the_last_position_is_cut_not_refused():
    engine = tiny_models.engine(tokens=tiny_models.POSITIONS + 16)
    with engine.session() as session:
        message = session.decode([1, 2], sampling=SamplingParams(temperature=0, max_tokens=100_000))
        assert message.length == tiny_models.POSITIONS
        assert message.finish_reason == "length"


# -- semantics that modes share ------------------------------------------------------------------------------


def test_forced_content_has_the_text_of_the_run_that_it_repeats(embedded):
    ways = SamplingParams(temperature=0, stop=" 6", max_tokens=30)
    with embedded.session(mode="prefix") as session:
        first = session.decode("1, 2, 3,", sampling=ways)
        text, content = first.text, first.output_token_ids
    assert text.endswith("5,")
    with embedded.session() as session:
        assert session.decode("1, 2, 3,", sampling=ways, forced_tokens=content).text == text


def test_a_character_that_never_became_whole_is_shown(embedded):
    ids = embedded.tokenizer(" hello \U0001f600", add_special_tokens=False)["input_ids"]
    with embedded.session() as session:
        message = session.decode("Say:", forced_tokens=ids[:-1])
        assert message.text == embedded.tokenizer.decode(ids[:-1])
        assert "".join(session.decode("Say:", forced_tokens=ids[:-1]).stream()) == message.text


def test_a_prefix_that_grew_past_its_branches_is_still_found():
    engine = tiny_models.engine()
    prompt, long = [1, 2, 3], [10 + i % 40 for i in range(30)]
    with engine.session(mode="prefix") as session:
        growing = session.decode(prompt, forced_tokens=long)
        for _ in range(6):
            engine.step()
        branch = session.decode([*prompt, *long[:20], 5, 6, 7], forced_tokens=[8])
        branch.result()
        growing.result()
        asked = session.decode([*prompt, *long[:20], 5, 6, 7, 9], sampling=GREEDY)
        assert asked.usage.cached_tokens == 3 + 20 + 3


def test_an_abandoned_baseline_call_is_cancelled_though_others_use_its_prompt():
    engine = tiny_models.engine(step=4)
    with engine.session(mode="prefix") as session:
        first = session.decode(list(range(20)), sampling=GREEDY)
        second = session.decode([*range(20), 30], sampling=GREEDY)
        engine.step()
        first.release()
        assert second.output_token_ids == answer(tiny_models.engine(), [*range(20), 30])
        with pytest.raises(MessageReleasedError):
            first.result()
        engine.check()
