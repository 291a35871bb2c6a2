"""What a caller sees of sessions and messages: laziness, streams, footers, endings, usage, release, reuse."""

import asyncio
import itertools
import threading

import pytest
import torch
from helpers.inspect_engine import inspect

from choreograph import SamplingParams, Turn
from choreograph.errors import (
    CacheFullError,
    ConfigError,
    InvalidRequestError,
    InvalidTokensError,
    MessageReleasedError,
    SamplingError,
    SessionClosedError,
)
from choreograph.outputs import Usage

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(tiny_engine):
    made = tiny_engine()
    yield made
    made.run_until_idle()
    made.check()


@pytest.fixture
def session(engine):
    with engine.session(seed=1) as opened:
        yield opened
        engine.check()
    engine.check()
    assert engine.stats().num_referenced_entries == 0


@pytest.fixture
def talk(embedded):
    """A session with text."""
    with embedded.session(seed=1) as opened:
        yield opened
    embedded.run_until_idle()
    embedded.check()
    assert embedded.stats().num_referenced_entries == 0


def ids(engine, text: str) -> list[int]:
    return engine.tokenizer(text, add_special_tokens=False)["input_ids"]


# -- handles are lazy and batch themselves -------------------------------------------------------------------


def test_nothing_runs_until_a_value_is_read(engine, session):
    first = session.prefill([1, 2, 3])
    answer = session.decode([4], parents=[first], sampling=GREEDY)
    assert engine.stats().num_steps == 0
    assert (answer.id, answer.kind, first.kind, answer.done, first.done) == (
        answer.id,
        "decode",
        "prefill",
        False,
        True,
    )
    assert first.tokens == [1, 2, 3]
    assert first.length == 3
    assert engine.stats().num_steps == 0, "the tokens of a prefill are known"
    assert len(answer.tokens) == 7
    assert engine.stats().num_steps > 0
    assert answer.done


def test_reading_one_value_batches_what_was_submitted(engine, session):
    shared = session.prefill([1, 2, 3])
    branches = [session.decode([4, i], parents=[shared], sampling=GREEDY) for i in range(5)]
    branches[0].result()
    alone = engine.stats().num_steps
    assert alone <= 1 + GREEDY.max_tokens
    assert all(branch.done for branch in branches), "the others ran in the same steps"
    assert [len(branch.output_token_ids) for branch in branches] == [6] * 5
    assert engine.stats().num_steps == alone


def test_a_chain_of_prefills_is_one_step(engine, session):
    first = session.prefill([1])
    second = session.prefill([2], parents=[first])
    session.prefill([3], parents=[first, second]).result()
    assert engine.stats().num_steps == 1


def test_engine_step_and_run_until_idle_compute_what_was_submitted(engine, session):
    answer = session.decode([1], sampling=GREEDY)
    assert engine.step()
    assert not answer.done
    engine.run_until_idle()
    assert answer.done
    steps = engine.stats().num_steps
    assert not engine.step()
    assert engine.stats().num_steps == steps


def test_results_do_not_depend_on_the_order_of_reading(tiny_engine):
    def run(order):
        engine = tiny_engine()
        with engine.session(seed=3) as session:
            made = [session.decode([1, i], sampling=SAMPLED) for i in range(4)]
            for i in order:
                made[i].result()
                engine.check()
            return [one.tokens for one in made]

    assert run([0, 1, 2, 3]) == run([3, 1, 0, 2])


def test_a_list_of_calls_gives_a_list_of_messages_or_changes_nothing(engine, session):
    first, second = session.prefill([{"tokens": [1, 2]}, {"tokens": [3], "new_offset": 9}])
    assert (first.tokens, first.position, second.tokens, second.position) == ([1, 2], 0, [3], 9)
    calls = [
        {"header": [4], "parents": [first], "sampling": GREEDY},
        {"header": [4], "parents": [second, first], "offsets": [5, None], "new_offset": 0, "forced_tokens": [7, 8]},
        {"header": [5], "sampling": GREEDY, "footer": [6, 6]},
    ]
    one, two, three = session.decode(calls)
    assert one.tokens == session.decode([4], parents=[first], sampling=GREEDY).tokens
    assert (two.tokens, two.offsets, two.position) == ([4, 7, 8], (5, 6), 0)
    assert three.tokens[-2:] == [6, 6]
    assert session.decode(tuple(calls))[1].tokens == two.tokens


def test_a_list_is_taken_whole_or_not_at_all(engine, session):
    before = inspect(engine).cache_manager.stats, len(session.messages), list(inspect(engine).waiting)
    good = {"header": [1], "sampling": GREEDY}
    for bad in ({"header": []}, {"header": [1], "colour": 2}, {"sampling": GREEDY}, {"header": [{"header": [1]}]}):
        with pytest.raises(InvalidRequestError):
            session.decode([good, bad])
        assert (inspect(engine).cache_manager.stats, len(session.messages), list(inspect(engine).waiting)) == before


def test_arguments_beside_a_list_are_refused(session):
    parent = session.prefill([1])
    with pytest.raises(InvalidRequestError, match=r"parents=.*put it into each request"):
        session.prefill([{"tokens": [1]}], parents=[parent])
    with pytest.raises(InvalidRequestError, match="new_offset=3"):
        session.prefill([{"tokens": [1]}], new_offset=3)
    with pytest.raises(InvalidRequestError, match="sampling="):
        session.decode([{"header": [1]}], sampling=GREEDY)


def test_sampling_parameters_are_given_per_call_by_name(talker):
    base = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with talker.session(seed=1) as session:
        assert len(session.decode([5], sampling=base, max_tokens=4).output_token_ids) == 4
        assert len(session.decode([5], max_tokens=3, ignore_eos=True).output_token_ids) == 3
        one, two = session.decode([{"header": [5], "sampling": base, "max_tokens": most} for most in (2, 5)])
        assert (len(one.output_token_ids), len(two.output_token_ids)) == (2, 5)
        seeded = [session.decode([5], max_tokens=8, temperature=2.0, seed=3).tokens for _ in range(2)]
        assert seeded[0] == seeded[1]
        whole = session.decode([5], sampling=base)
        cut = session.decode([5], sampling=base, stop=whole.text[2:4])
        assert cut.text == whole.text[: whole.text.index(whole.text[2:4])]
        assert session.decode([5], sampling=base, logprobs=1).logprobs


def test_sampling_parameters_that_do_not_exist_or_fit_are_refused(session):
    for submit in (
        lambda: session.decode([1], maxtokens=4),
        lambda: session.decode([{"header": [1], "maxtokens": 4}]),
        lambda: session.decode([{"header": [1]}], maxtokens=4),
    ):
        with pytest.raises(InvalidRequestError, match=r"maxtokens=4: .*known: .*'forced_tokens'.*'stop'.*'max_tokens'"):
            submit()
    with pytest.raises(InvalidRequestError, match=r"max_tokens=4: .*known: .*'tokens'") as caught:
        session.prefill([{"tokens": [1], "max_tokens": 4}])
    assert "temperature" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="max_tokens=256 with a list"):
        session.decode([{"header": [1]}], max_tokens=256)
    with pytest.raises(SamplingError, match="max_tokens=0"):
        session.decode([1], max_tokens=0)
    with pytest.raises(SamplingError, match="min_tokens=5"):
        session.decode([1], sampling=SamplingParams(min_tokens=5), max_tokens=4)
    with pytest.raises(SamplingError, match="sampling=7"):
        session.decode([1], sampling=7, max_tokens=4)
    assert not session.messages


# -- placement -----------------------------------------------------------------------------------------------


def test_default_places_follow_the_parents(session):
    first = session.prefill([1, 2])
    second = session.prefill([3, 4, 5])
    third = session.prefill([6], parents=[first, second])
    assert (first.position, second.position, third.position) == (0, 0, 5)
    assert third.offsets == (0, 2)
    moved = session.decode([7], parents=[second, first], offsets=[10, None], sampling=GREEDY)
    assert (moved.offsets, moved.position) == ((10, 13), 15)
    assert moved.parents == (second, first)


def test_the_place_behind_a_decoded_parent_is_known_when_its_length_is(session):
    parent = session.decode([1], sampling=GREEDY, footer=[3])
    child = session.prefill([2], parents=[parent])
    assert child.position == parent.length == 1 + 6 + 1


@pytest.mark.parametrize("mode", ["choreographed", "prefix", "naive"])
def test_places_and_endings_in_every_mode(engine, mode):
    with engine.session(mode=mode) as session:
        first = session.prefill([1, 2])
        answer = session.decode([3], parents=[first], sampling=GREEDY, footer=[4])
        last = session.prefill([5], parents=[first, answer])
        assert (first.position, answer.position, last.position) == (0, 2, 2 + answer.length)
        assert last.offsets == (0, 2)
        assert (first.finish_reason, answer.finish_reason) == ("encoded", "length")
        assert session.decode([6], parents=[last], sampling=GREEDY).result().usage.completion_tokens == 6
        engine.check()
    assert engine.stats().num_referenced_entries == 0


# -- decoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_forced_tokens_repeat_content(session, sampling):
    parent = session.prefill([1, 2, 3])
    answer = session.decode([4], parents=[parent], sampling=sampling, footer=[5])
    again = session.decode([4], parents=[parent], forced_tokens=answer.output_token_ids, footer=[5])
    assert again.tokens == answer.tokens
    assert again.finish_reason == "forced"
    assert again.usage.completion_tokens == len(answer.output_token_ids)


def test_forced_tokens_know_no_limit_and_no_stop(session):
    forced = [2, 9, 2, 2, 9]
    options = SamplingParams(max_tokens=1, stop_token_ids=[9])
    answer = session.decode([1], sampling=options, forced_tokens=forced)
    assert (answer.output_token_ids, answer.finish_reason) == (forced, "stop")
    assert session.decode([1], forced_tokens=[2, 3]).finish_reason == "forced"


def test_a_header_turn_brings_its_footer(embedded, talk):
    question = talk.prefill(talk.user("Hello"))
    short = SamplingParams(temperature=0, max_tokens=2)
    answer = talk.decode(talk.assistant("Hi"), parents=[question], sampling=short)
    header, footer = ids(embedded, "<|im_start|>assistant\nHi"), ids(embedded, "<|im_end|>\n")
    assert answer.tokens == header + answer.output_token_ids + footer
    assert (answer.finish_reason, len(answer.output_token_ids)) == ("length", 2)
    plain = talk.decode("Hi", parents=[question], sampling=short)
    assert plain.tokens == ids(embedded, "Hi") + plain.output_token_ids
    for given, want in ((" END", ids(embedded, " END")), ([5, 6], [5, 6]), ("", []), ([], [])):
        own = talk.decode(talk.assistant("Hi"), parents=[question], sampling=short, footer=given)
        assert own.tokens == header + own.output_token_ids + want


def test_a_generated_stop_is_not_doubled_by_the_footer(embedded, talk):
    end = embedded.tokenizer.eos_token_id
    options = SamplingParams(logit_bias={end: 100.0}, max_tokens=9, min_tokens=2)
    answer = talk.decode(talk.assistant(), sampling=options)
    assert answer.output_token_ids[-1] == end
    assert answer.output_token_ids.count(end) == 1
    assert answer.tokens[-2:] == [end, *ids(embedded, "\n")]
    assert answer.tokens[-3] != end
    assert (answer.finish_reason, len(answer.output_token_ids)) == ("stop", 3)
    assert "<|im_end|>" not in answer.text


def test_a_footer_that_only_looks_like_the_last_token_is_kept(session):
    answer = session.decode([1], forced_tokens=[5, 9], footer=[9, 9])
    assert answer.tokens == [1, 5, 9, 9, 9]


def test_stop_strings_cut_the_text(embedded, talk):
    question = talk.prefill(talk.user("Count from one to five, in digits."))
    full = talk.decode(talk.assistant(), parents=[question], sampling=SamplingParams(temperature=0, max_tokens=16))
    middle = full.text[3:6]
    options = SamplingParams(temperature=0, max_tokens=16, stop=["never", middle])
    cut = talk.decode(talk.assistant(), parents=[question], sampling=options)
    assert cut.text == full.text[: full.text.find(middle)]
    assert (cut.finish_reason, full.finish_reason) == ("stop", "length")
    assert len(cut.output_token_ids) < len(full.output_token_ids)
    assert cut.output_token_ids == full.output_token_ids[: len(cut.output_token_ids)]


def test_stop_token_ids_stop(session):
    full = session.decode([1], sampling=GREEDY).output_token_ids
    stop = full[3]
    first = full.index(stop)
    options = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[stop])
    answer = session.decode([1], sampling=options)
    assert (answer.output_token_ids, answer.finish_reason) == (full[: first + 1], "stop")


def test_end_tokens_min_tokens_and_ignore_eos(session):
    def decode(**options):
        return session.decode([1], sampling=SamplingParams(max_tokens=5, logit_bias={2: 100.0}, **options))

    assert (decode().output_token_ids, decode().finish_reason) == ([2], "stop")
    late = decode(min_tokens=3)
    assert (late.output_token_ids.index(2), late.finish_reason) == (3, "stop")
    endless = decode(ignore_eos=True)
    assert (endless.output_token_ids, endless.finish_reason) == ([2] * 5, "length")
    assert decode(min_tokens=5).finish_reason == "length"


def test_max_tokens_end_at_the_last_position(session):
    answer = session.decode(
        [1, 2], new_offset=500, sampling=SamplingParams(max_tokens=400, ignore_eos=True), footer=[3]
    )
    assert answer.position + answer.length == 512
    assert answer.finish_reason == "length"


def test_log_probabilities_belong_to_the_generated_tokens(session):
    quiet = session.decode([1], sampling=GREEDY)
    assert quiet.logprobs is None
    assert session.prefill([1]).logprobs is None
    answer = session.decode([1], sampling=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3))
    assert [one.token for one in answer.logprobs] == answer.output_token_ids
    for one in answer.logprobs:
        assert len(one.top) == 3
        assert max(one.top, key=one.top.get) == one.token
        assert one.logprob == one.top[one.token] <= 0
    forced = session.decode([1], forced_tokens=answer.output_token_ids, sampling=SamplingParams(logprobs=0))
    assert [one.logprob for one in forced.logprobs] == pytest.approx([one.logprob for one in answer.logprobs], abs=1e-4)


def test_equal_seeds_give_equal_tokens(tiny_engine):
    def run(session_seed, **options):
        with tiny_engine().session(seed=session_seed) as session:
            return [session.decode([1], sampling=SamplingParams(max_tokens=12, **options)).tokens for _ in range(2)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(5)[0] != run(5)[1], "branches of one session differ"
    one, two = run(5, seed=7)
    assert [one, two] == run(6, seed=7)
    assert one == two


def test_a_refused_call_takes_no_seed(tiny_engine):
    def run(disturb):
        with tiny_engine().session(seed=5) as session:
            if disturb:
                for bad in ({"new_offset": -1}, {"offsets": [1]}, {"forced_tokens": []}, {"footer": [1] * 5000}):
                    with pytest.raises(Exception, match=r"offset|tokens"):
                        session.decode([1], **bad)
            return session.decode([1], sampling=SAMPLED).tokens

    assert run(True) == run(False)


def test_calls_that_another_thread_is_refused_give_nobody_a_seed_twice(tiny_engine):
    engine, stop = tiny_engine(tokens=64), threading.Event()
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)

    def refused() -> None:
        while not stop.is_set():
            with pytest.raises(CacheFullError):
                session.decode([1] * 10, sampling=SamplingParams(max_tokens=200))

    with engine.session(seed=3) as session:
        other = threading.Thread(target=refused)
        other.start()
        said = [tuple(session.decode([5], sampling=sampling).output_token_ids) for _ in range(30)]
        stop.set()
        other.join()
    with tiny_engine().session(seed=3) as session:
        assert said == [tuple(session.decode([5], sampling=sampling).output_token_ids) for _ in range(30)]


# -- streams, awaiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"stop": ["e"]}, {"stop": ["never seen"]}, {"stop": ["a ", "e", "s,"], "min_tokens": 5}, {"min_tokens": 12}],
)
def test_pieces_joined_are_the_text(talk, options):
    question = talk.prefill(talk.user("Name three animals."))
    sampling = SamplingParams(temperature=0, max_tokens=14, **options)
    answer = talk.decode(talk.assistant(), parents=[question], sampling=sampling)
    pieces = list(answer.stream())
    assert "".join(pieces) == answer.text
    assert all(pieces)
    assert list(answer.stream()) == ([answer.text] if answer.text else [])


def test_characters_come_whole(embedded, talk):
    text = "naïve 汉字 🙂 done"
    answer = talk.decode("Say:", forced_tokens=ids(embedded, text))
    pieces = list(answer.stream())
    assert "".join(pieces) == answer.text == text
    assert "\ufffd" not in "".join(pieces)


def test_a_stream_comes_piece_by_piece(embedded, talk):
    other = talk.decode("B", sampling=SamplingParams(temperature=0, max_tokens=4))
    answer = talk.decode("A", sampling=SamplingParams(temperature=0, max_tokens=4))
    stream = answer.stream()
    next(stream)
    assert not answer.done
    assert "".join(stream)
    assert answer.done
    assert other.done, "others make progress meanwhile"


def test_the_stream_of_a_prefill_is_its_text(talk):
    assert list(talk.prefill("some text").stream()) == ["some text"]


def test_text_needs_a_tokenizer(session):
    answer = session.decode([1], sampling=GREEDY)
    for read in (lambda: answer.text, lambda: list(answer.stream()), lambda: session.prefill([1]).text):
        with pytest.raises(ConfigError, match="tokenizer"):
            read()
    for text in ("text", Turn("user", "text")):
        with pytest.raises(ConfigError, match="tokenizer"):
            session.prefill(text)
    assert len(answer.tokens) == 7


async def test_awaiting_a_message_computes_it(engine, session):
    first = session.prefill([1, 2])
    answer = await session.decode([3], parents=[first], sampling=GREEDY)
    assert len(answer.output_token_ids) == 6
    assert (await first) is first
    assert (await answer) is answer


async def test_awaited_messages_share_steps(engine, session):
    async def branch(header):
        return await session.decode([header], sampling=GREEDY)

    gathered = await asyncio.gather(*(branch(i) for i in range(6)))
    assert engine.stats().num_steps <= 2 * GREEDY.max_tokens
    engine.check()
    assert [one.tokens for one in gathered] == [session.decode([i], sampling=GREEDY).tokens for i in range(6)]


async def test_other_tasks_go_on_while_a_pin_is_waited_for(tiny_engine):
    """One of them gives it up."""
    engine = tiny_engine(tokens=64)
    with engine.session() as session:
        pinned = session.prefill(list(range(1, 41))).pin(seconds=60)
        answer = session.decode([1], sampling=SamplingParams(max_tokens=30, ignore_eos=True))

        async def lift() -> None:
            await asyncio.sleep(0.05)
            pinned.unpin()

        async with asyncio.timeout(20):
            await asyncio.gather(answer, lift())
        assert len(answer.output_token_ids) == 30


async def test_awaiting_a_released_message_fails(session):
    answer = session.decode([1], sampling=GREEDY)
    answer.release()
    with pytest.raises(MessageReleasedError, match=str(answer.id)):
        await answer


async def test_a_waiter_sees_a_release_by_another_task(session):
    answer = session.decode([1], sampling=SamplingParams(max_tokens=200, ignore_eos=True))

    async def release():
        await asyncio.sleep(0)
        answer.release()

    got, _ = await asyncio.gather(answer, release(), return_exceptions=True)
    assert isinstance(got, MessageReleasedError)


# -- reports -------------------------------------------------------------------------------------------------


def test_usage_counts_cached_computed_and_generated_tokens(session):
    first = session.prefill([1, 2, 3])
    second = session.prefill([4, 5], parents=[first])
    answer = session.decode([6], parents=[first, second], sampling=GREEDY, footer=[7, 8])

    def counts(message):
        usage = message.usage
        return usage.cached_tokens, usage.computed_tokens, usage.completion_tokens

    assert counts(first) == (0, 3, 0)
    assert counts(second) == (3, 2, 0)
    assert counts(answer) == (5, 1 + 2, 6)


@pytest.mark.parametrize(("mode", "cached", "computed"), [
    ("choreographed", 3 + 5 + 5, 5 + 1 + 1), ("prefix", 5, 5 + 1 + 1), ("naive", 0, 2 * (5 + 1))
])  # fmt: skip
def test_usage_of_a_session_counts_all_messages_and_compares_between_modes(engine, mode, cached, computed):
    with engine.session(mode=mode) as session:
        assert session.usage == Usage()
        first = session.prefill([1, 2, 3])
        second = session.prefill([4, 5], [first])
        answers = [session.decode([header], [first, second], sampling=GREEDY).result() for header in (6, 7)]
        total = session.usage  # completes what was submitted
        assert total == Usage(cached, computed, sum(len(answer.output_token_ids) for answer in answers))
        assert total == sum((message.usage for message in session.messages), Usage())
        answers[0].release()
        assert session.usage == total
        session.prefill([8] * 4)
        assert session.usage.computed_tokens == computed + (4 if mode == "choreographed" else 0)
    assert session.usage.completion_tokens == total.completion_tokens


def test_usage_of_a_session_includes_cancelled_and_failed_messages(engine, session):
    cancelled = session.decode([1], sampling=SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(4):
        engine.step()
    cancelled.release()
    assert 1 <= session.usage.completion_tokens <= 4
    draft = session.decode([1], sampling=GREEDY)
    session.prefill([2] * 511, [draft])  # runs past the last position
    assert session.usage.completion_tokens >= 1 + len(draft.output_token_ids)


def test_finish_reason_says_why_a_message_ended(session):
    assert session.prefill([1]).finish_reason == "encoded"
    assert session.prefill([1]).finish_reason == "cached"
    assert session.decode([1], sampling=GREEDY).finish_reason == "length"
    assert session.decode([1], forced_tokens=[4]).finish_reason == "forced"
    assert session.decode([1], sampling=SamplingParams(logit_bias={2: 100})).finish_reason == "stop"


def test_timing_is_in_order(session):
    first = session.prefill([1, 2, 3])
    answer = session.decode([4], parents=[first], sampling=GREEDY)
    child = session.decode([5], parents=[answer], sampling=GREEDY)
    for timing in (answer.timing, child.timing):
        assert 0 <= timing.queue_time <= timing.ttft <= timing.e2e
    assert first.timing.ttft is None
    assert 0 <= first.timing.queue_time <= first.timing.e2e
    again = session.prefill([1, 2, 3])
    assert again.timing.e2e >= 0


def test_handles_show_themselves(session):
    answer = session.decode([1], sampling=GREEDY)
    assert repr(answer) == f"<Message {answer.id} decode waiting>"
    answer.result()
    assert "decode" in repr(answer)
    assert answer.error is None


def test_lists_that_are_handed_out_are_copies(session):
    header = [1, 2]
    answer = session.decode(header, sampling=GREEDY)
    before = list(answer.tokens)
    header.append(3)
    answer.tokens.append(4)
    answer.output_token_ids.clear()
    assert answer.tokens == before


def test_tensors_and_arrays_are_token_ids(session):
    given = torch.tensor([5, 6, 7])
    assert session.prefill(given).tokens == session.prefill(given.numpy()).tokens == [5, 6, 7]
    assert session.prefill(iter((5, 6))).tokens == [5, 6]
    assert all(type(token) is int for token in session.prefill(given.numpy()).tokens)


# -- release -------------------------------------------------------------------------------------------------


def test_a_release_waits_for_children(engine, session):
    parent = session.prefill([1, 2, 3])
    child = session.decode([4], parents=[parent], sampling=GREEDY)
    grandchild = session.decode([5], parents=[child], sampling=GREEDY)
    want = session.decode([4], parents=[session.prefill([1, 2, 3])], sampling=GREEDY)
    parent.release()
    child.release()
    assert len(grandchild.tokens) == 7
    assert child.tokens == want.tokens
    engine.check()


def test_a_release_in_flight_cancels(engine, session):
    answer = session.decode([1], sampling=SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(3):
        engine.step()
    held = engine.stats().num_referenced_pages
    answer.release()
    assert engine.stats().num_referenced_pages < held
    engine.check()
    with pytest.raises(MessageReleasedError, match=f"message {answer.id} was released"):
        answer.tokens  # noqa: B018
    assert not engine.step(), "nothing is left to do"


def test_a_release_before_the_first_step_cancels(engine, session):
    answer = session.decode([1], sampling=GREEDY)
    answer.release()
    answer.release()
    for read in (
        answer.result,
        lambda: answer.tokens,
        lambda: answer.position,
        lambda: answer.usage,
        lambda: answer.timing,
    ):
        with pytest.raises(MessageReleasedError, match=str(answer.id)):
            read()
    assert engine.stats().num_steps == 0


def test_cancelling_one_branch_leaves_the_others(engine, session):
    shared = session.prefill([1, 2, 3])
    want = session.decode([4], parents=[shared], sampling=GREEDY).tokens
    one, two = session.decode([{"header": [4], "parents": [shared], "sampling": GREEDY}] * 2)
    for _ in range(3):
        engine.step()
    shared.release()
    one.release()
    engine.check()
    assert two.tokens == want


def test_a_released_equal_prefill_stays_for_its_twin(engine, session):
    first, twin = session.prefill([1, 2, 3]), session.prefill([1, 2, 3])
    first.release()
    want = session.decode([4], parents=[session.prefill([1, 2, 3])], sampling=GREEDY)
    assert session.decode([4], parents=[twin], sampling=GREEDY).tokens == want.tokens


def test_a_twin_outlives_the_call_that_encodes_it(engine, session):
    """The second message is found while the first is still being decoded or encoded; then the first goes."""
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    answer = session.decode([1], sampling=sampling)
    while not answer.done:
        engine.step()
    twin = session.prefill(answer.tokens)
    answer.release()
    child = session.decode([4], parents=[twin], sampling=GREEDY)
    assert len(child.tokens) == 7
    engine.check()


def test_known_values_stay_readable(engine):
    with engine.session() as session:
        first = session.prefill([1, 2])
        answer = session.decode([3], parents=[first], sampling=SamplingParams(temperature=0, max_tokens=4, logprobs=1))
        never = session.decode([4], sampling=GREEDY)
        known = answer.result().tokens, answer.finish_reason, answer.usage, answer.position, answer.logprobs
        del never
    assert (answer.tokens, answer.finish_reason, answer.usage, answer.position, answer.logprobs) == known
    assert first.tokens == [1, 2]
    assert answer.done
    engine.check()


def test_a_closed_session_releases_everything(engine):
    with engine.session() as session:
        parent = session.prefill([1, 2])
        running = session.decode([3], parents=[parent], sampling=SamplingParams(max_tokens=50, ignore_eos=True))
        waiting = session.decode([4], parents=[running], sampling=GREEDY)
        for _ in range(4):
            engine.step()
    engine.check()
    assert engine.stats().num_referenced_entries == 0
    assert not engine.step()
    for message in (running, waiting):
        with pytest.raises(MessageReleasedError):
            message.result()
    with pytest.raises(SessionClosedError):
        session.prefill([1])
    session.close()
    engine.clear_cache()
    assert engine.stats().num_free_pages == engine.stats().num_pages


def test_a_session_closes_after_an_error_inside(engine):
    def workflow():
        with engine.session() as session:
            session.decode([1], sampling=GREEDY).result()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        workflow()
    assert engine.stats().num_referenced_entries == 0
    engine.check()


# -- equal work is found again -------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [None, 0, 17, 300])
def test_an_equal_prefill_is_found_by_content(engine, session, start):
    session.prefill([1, 2, 3]).result()
    rows = engine.stats().num_batched_tokens
    again = session.prefill([1, 2, 3], new_offset=start)
    assert again.usage.cached_tokens == 3
    assert again.usage.computed_tokens == 0
    assert again.finish_reason == "cached"
    assert again.position == (start or 0)
    assert engine.stats().num_batched_tokens == rows


def test_a_message_found_in_the_cache_behaves_as_if_it_was_encoded(tiny_engine):
    def answer(warm: bool):
        engine = tiny_engine()
        with engine.session() as session:
            if warm:
                session.prefill([1, 2, 3]).result()
            moved = session.prefill([1, 2, 3], new_offset=20)
            sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)
            made = session.decode([4], parents=[moved], offsets=[20], sampling=sampling)
            return made.tokens, [one.logprob for one in made.logprobs]

    (cold, cold_logprobs), (warm, warm_logprobs) = answer(False), answer(True)
    assert cold == warm
    assert cold_logprobs == pytest.approx(warm_logprobs, abs=1e-4)


def test_relative_places_count(engine, session):
    parent = session.prefill([1, 2, 3])
    session.prefill([4, 5], parents=[parent], offsets=[10]).result()
    assert session.prefill([4, 5], parents=[parent], offsets=[30]).usage.computed_tokens == 0
    assert session.prefill([4, 5], parents=[parent], offsets=[10], new_offset=20).usage.computed_tokens == 2
    assert session.prefill([4, 5]).usage.computed_tokens == 2


def test_content_outlives_sessions_but_not_the_cache(engine):
    for want in (0, 3):
        with engine.session() as session:
            assert session.prefill([1, 2, 3]).usage.cached_tokens == want
    engine.clear_cache()
    with engine.session() as session:
        assert session.prefill([1, 2, 3]).usage.cached_tokens == 0


def test_a_decoded_message_is_found_as_a_prefill(engine, session):
    answer = session.decode([1, 2], sampling=GREEDY, footer=[3])
    engine.run_until_idle() if answer.done else answer.result()
    assert session.prefill(answer.tokens).usage.cached_tokens == answer.length


@pytest.mark.parametrize("mode", ["choreographed", "prefix"])
def test_clients_never_share(engine, mode):
    used = {}
    for client in ("a", "b", "a", "b\0", "", "default"):
        with engine.session(mode=mode, client_id=client) as session:
            parent = session.prefill([1, 2, 3, 4])
            answer = session.decode([5], parents=[parent], sampling=GREEDY)
            result = parent.usage.cached_tokens if mode == "choreographed" else answer.usage.cached_tokens
            assert (result > 0) == (client in used)
            used[client] = answer.tokens
        engine.check()
    assert len(set(map(tuple, used.values()))) == 1


def test_sessions_of_all_modes_agree_on_plain_conversations(tiny_engine):
    """Each message sees all before it, in order: then all three modes compute the same thing."""

    def run(mode):
        with tiny_engine().session(mode=mode, seed=4) as session:
            first = session.prefill([1, 2, 3])
            one = session.decode([4], parents=[first], sampling=SAMPLED, footer=[5])
            two = session.decode([6], parents=[first, one], sampling=GREEDY)
            return one.tokens, two.tokens

    assert run("choreographed") == run("prefix") == run("naive")


def test_nothing_but_text_and_calls(session):
    for bad in ({}, [[]], "", None):
        with pytest.raises((InvalidTokensError, ConfigError)):
            session.prefill(bad)


def test_token_ids_without_an_end_are_looked_at_as_they_come(engine):
    with engine.session() as session, pytest.raises(InvalidTokensError, match="outside the vocabulary"):
        session.prefill(itertools.count())
