"""Speculative decoding gives the tokens, texts, log-probabilities and KV of plain decoding."""

import random
from functools import cache

import pytest
import torch
from helpers import tiny_models
from helpers.char_tokenizer import tokenizer as char_tokenizer
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import Node, graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from choreograph.errors import ConfigError
from choreograph.execution.drafts import Drafter, NGramIndex, VisibleMessage
from choreograph.request.decode_state import DecodeState
from choreograph.request.request import Request

SMALL_VOCABULARY = 7  # n-grams recur, and drafts are accepted and rejected


@cache
def model():
    return tiny_models.build(vocabulary=SMALL_VOCABULARY, seed=3)


def engine(draft_tokens: int, *, tokens=2048, step=1024, calls=256, page=4, **options) -> Engine:
    config = EngineConfig(
        cache=CacheConfig(capacity=tokens, page_size=page, poison_freed_pages=True),
        scheduler=SchedulerConfig(max_num_batched_tokens=step, max_num_seqs=calls),
        draft_tokens=draft_tokens,
        **options,
    )
    return Engine.from_pretrained(model(), config=config)


def sampling(seed: int, index: int) -> SamplingParams:
    pick = random.Random(seed * 100 + index)
    return SamplingParams(
        temperature=pick.choice([0.0, 0.0, 0.3, 1.0]),
        top_p=pick.choice([1.0, 0.9]),
        top_k=pick.choice([0, 3]),
        seed=seed + index,
        max_tokens=pick.choice([1, 2, 9, 20]),
        min_tokens=pick.choice([0, 1]),
        stop_token_ids=pick.sample(range(SMALL_VOCABULARY), pick.choice([0, 1])),
        frequency_penalty=pick.choice([0.0, 0.0, 0.4]),
        repetition_penalty=pick.choice([1.0, 1.0, 1.2]),
        logit_bias=pick.choice([{}, {2: 1.5}]),
        logprobs=pick.choice([None, 0, 2]),
    )


def submit(session, nodes: list[Node], seed: int) -> list:
    messages = []
    for index, node in enumerate(nodes):
        place = {"parents": [messages[p] for p in node.parents], "offsets": node.offsets, "new_offset": node.position}
        tokens = [token % SMALL_VOCABULARY for token in node.tokens]
        if node.generated is None:
            messages.append(session.prefill(tokens, **place))
        else:
            footer = [token % SMALL_VOCABULARY for token in node.footer]
            messages.append(session.decode(tokens, **place, sampling=sampling(seed, index), footer=footer))
    return messages


def run(nodes: list[Node], mode: str, seed: int, live: Engine) -> list[tuple]:
    with live.session(mode=mode) as session:
        messages = submit(session, nodes, seed)
        while live.step():
            live.check()
        results = []
        for message in messages:
            logprobs = message.logprobs or []
            values = [value for one in logprobs for value in (one.logprob, *one.top.values())]
            results.append((message.tokens, message.finish_reason, [one.token for one in logprobs], values))
        return results


@settings(max_examples=many(24), deadline=None)
@given(
    nodes=graphs(),
    mode=st.sampled_from(["choreographed", "prefix", "naive"]),
    seed=st.integers(0, 10**6),
    draft_tokens=st.integers(1, 9),
)
def test_drafts_change_no_message_of_a_random_graph(nodes, mode, seed, draft_tokens):
    pick = random.Random(seed)
    crowded = engine(
        draft_tokens,
        tokens=pick.choice([400, 2048]),
        step=pick.choice([2, 5, 1024]),
        calls=pick.choice([2, 256]),
        page=pick.choice([1, 4, 16]),
    )
    plain = run(nodes, mode, seed, engine(0))
    for speculative, expected in zip(run(nodes, mode, seed, crowded), plain, strict=True):
        assert speculative[:3] == expected[:3]
        assert speculative[3] == pytest.approx(expected[3], abs=1e-4)
    stats = crowded.stats()
    assert stats.num_accepted_tokens <= stats.num_drafted_tokens


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_repetitive_text_is_decoded_in_fewer_steps_by_every_backend(backend):
    live, plain = engine(7, backend=backend), engine(0, backend=backend)
    length = 14 if backend == "triton" else 40  # its interpreter is slow
    results = []
    for one in (live, plain):
        with one.session(seed=1) as session:
            context = session.prefill([1, 2, 3, 4, 5, 6] * 2)
            messages = [
                session.decode([header], [context], temperature=temperature, seed=5, max_tokens=length, footer=[1, 2])
                for header, temperature in ((1, 0.0), (3, 0.5))
            ]
            results.append([message.tokens for message in messages])
            usages = [message.usage for message in messages]
            one.run_until_idle()
            one.check()
            snapshots = [message.export_kv() for message in messages]
        results[-1] += [torch.stack([torch.stack(layer) for layer in snapshot.layers]) for snapshot in snapshots]
        if one is live:
            assert sum(usage.accepted_tokens for usage in usages) == live.stats().num_accepted_tokens > 0
            assert sum(usage.drafted_tokens for usage in usages) == live.stats().num_drafted_tokens
    assert results[0][:2] == results[1][:2]
    for speculative, expected in zip(results[0][2:], results[1][2:], strict=True):
        torch.testing.assert_close(speculative, expected, atol=1e-4, rtol=1e-4)
    assert live.stats().num_steps < plain.stats().num_steps
    assert plain.stats().num_drafted_tokens == 0


def test_preempted_decodes_resume_with_the_same_tokens():
    expected = None
    for draft_tokens in (0, 5):
        live = engine(draft_tokens, tokens=120)
        with live.session(seed=4) as session:
            messages = [session.decode([i, 2], temperature=0.6, max_tokens=60, seed=i) for i in range(1, 5)]
            tokens = [message.tokens for message in messages]
            live.check()
        assert live.events.counts["preempted"]
        expected = expected or tokens
        assert tokens == expected


def test_stop_strings_and_streams_end_where_plain_decoding_ends():
    texts, tokenizer = [], char_tokenizer()
    spelling = tiny_models.build(vocabulary=len(tokenizer), seed=3)
    for draft_tokens in (0, 6):
        live = Engine.from_pretrained(
            spelling, tokenizer=tokenizer, config=EngineConfig(cache=CacheConfig(2048), draft_tokens=draft_tokens)
        )
        with live.session(seed=2) as session:
            options = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
            text = session.decode("abab", **options).text
            pieces = list(session.decode("abab", **options, stop=text[37:39]).stream())
            texts.append((text, "".join(pieces)))
        live.run_until_idle()
    assert texts[0] == texts[1]
    assert live.stats().num_accepted_tokens


def test_log_probability_callbacks_get_one_row_per_token_in_order():
    rows: dict[int, list[torch.Tensor]] = {0: [], 6: []}
    for draft_tokens, received in rows.items():
        with engine(draft_tokens).session(seed=2) as session:
            message = session.decode([1, 2], temperature=0, max_tokens=30)
            message.on_logprobs(received.append)
            tokens = message.output_token_ids
        assert [int(row.argmax()) for row in received] == tokens
    assert len(rows[0]) == len(rows[6]) == 30
    torch.testing.assert_close(torch.stack(rows[6]), torch.stack(rows[0]), atol=1e-4, rtol=1e-4)


def test_constrained_and_forced_decodes_draft_nothing():
    class OnlyEven:
        def allowed(self):
            return torch.arange(SMALL_VOCABULARY) % 2 == 0

        def advance(self, token):
            assert token % 2 == 0

    live = engine(4)
    with live.session(seed=1) as session:
        message = session.decode([2, 4, 2, 4], temperature=0, max_tokens=20)
        message.constrain(OnlyEven())
        forced = session.decode([2, 4, 2, 4], forced_tokens=[2, 4] * 5)
        assert set(message.output_token_ids) <= {0, 2, 4, 6} and forced.output_token_ids == [2, 4] * 5
    assert live.stats().num_drafted_tokens == 0


def test_an_error_of_a_step_with_drafts_fails_only_its_cause():
    live = engine(4)
    healthy = inspect(live).hf_model.forward

    def forward(tokens, *arguments):
        if 6 in tokens[:1]:
            raise RuntimeError("broken")
        return healthy(tokens, *arguments)

    inspect(live).hf_model.forward = forward
    bias = {6: -100}
    with live.session(seed=1) as session:
        broken = session.decode([6], max_tokens=20)
        message = session.decode([1, 2], temperature=0, max_tokens=30, logit_bias=bias)
        while live.step():
            live.check()
        assert broken.error is not None
        tokens = message.tokens
    with engine(0).session(seed=1) as session:
        assert session.decode([1, 2], temperature=0, max_tokens=30, logit_bias=bias).tokens == tokens


def test_rows_of_many_requests_stay_within_the_limit_of_the_step():
    live = engine(8, step=12)
    with live.session(seed=1) as session:
        for message in [session.decode([i, i], temperature=0, max_tokens=30) for i in range(6)]:
            message.result()
    assert max(event.data["tokens"] for event in live.events.recent if event.kind == "step") <= 12
    assert live.stats().num_accepted_tokens


# -- the index and the drafter --------------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(0, 3), max_size=40), size=st.sampled_from([2, 3]), data=st.data())
def test_the_index_finds_the_latest_occurrence_as_a_scan_does(tokens, size, data):
    cut = data.draw(st.integers(0, len(tokens)))
    index = NGramIndex(tokens[:cut])
    index.extend(tokens[cut:])
    ngram = tuple(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    ends = [end for end in range(size, len(tokens)) if tuple(tokens[end - size : end]) == ngram]
    assert index.find(ngram) == (ends[-1] if ends else None)


def drafter(header: list[int], *messages: VisibleMessage, max_tokens: int = 4) -> tuple[Drafter, DecodeState]:
    state = DecodeState(SamplingParams(), [], frozenset(), torch.Generator())
    request = Request(1, 1, "choreographed", "", header, (), (), None, (), decode_state=state)
    return Drafter(request, messages, max_tokens), state


def test_a_draft_continues_the_nearest_message_and_stays_inside_its_slice():
    far, near = NGramIndex([1, 2, 3, 9, 9]), NGramIndex([5, 1, 2, 3, 4, 6, 7])
    drafts, state = drafter([1, 2], VisibleMessage(far, 0, 5), VisibleMessage(near, 0, 6))
    state.tokens.append(3)
    assert drafts.propose(state, 9) == [4, 6]
    hidden, state = drafter([1, 2], VisibleMessage(far, 0, 5), VisibleMessage(near, 3, 6))
    state.tokens.append(3)
    assert hidden.propose(state, 9) == [9, 9], "the start of the match is outside of the slice"


def test_a_draft_continues_a_repetition_of_what_was_generated():
    drafts, state = drafter([8])
    state.tokens += [1, 2, 3, 1, 2, 3]
    assert drafts.propose(state, 9) == [1, 2, 3, 1]
    state.tokens += [1]
    assert drafts.propose(state, 2) == [2, 3]


def test_drafts_shrink_and_pause_after_rejections_and_grow_again():
    drafts, state = drafter([8], max_tokens=8)
    state.tokens += [1, 2, 3] * 4
    assert len(drafts.propose(state, 99)) == 8
    drafts.adapt(state, 8, 2)
    assert len(drafts.propose(state, 99)) == 4
    drafts.adapt(state, 4, 0)
    assert len(drafts.propose(state, 99)) == 1
    drafts.adapt(state, 1, 0)
    assert drafts.propose(state, 99) == []
    state.tokens += [1, 2, 3] * 2
    assert len(drafts.propose(state, 99)) == 1
    drafts.adapt(state, 1, 1)
    assert len(drafts.propose(state, 99)) == 2


def test_a_negative_draft_length_is_refused():
    with pytest.raises(ConfigError, match="draft_tokens=-1"):
        EngineConfig(draft_tokens=-1)
