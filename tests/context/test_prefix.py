"""The baseline: prefix mode equals a plain run of the concatenated text, and reuses the longest common prefix."""

import pytest
import torch
from helpers import tiny_models
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=5)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)  # few tokens: prefixes meet and part often


def hugging_face(tokens: list[int], count: int) -> list[int]:
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        out = tiny_models.model().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, len(tokens) :].tolist()


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("mode", ["prefix", "naive"])
@settings(max_examples=many(40), deadline=None)
@given(prompts=st.lists(st.lists(texts, min_size=1, max_size=3), min_size=1, max_size=6))
def test_prefix_mode_equals_a_plain_run_and_hits_are_longest_common_prefixes(mode, prompts):
    engine = tiny_models.engine()
    known: list[list[int]] = []
    with engine.session(mode=mode) as session:
        for pieces in prompts:
            parents = [session.prefill(piece, offsets=[], new_offset=None) for piece in pieces[:-1]]
            answer = session.decode(pieces[-1], parents=parents, sampling=GREEDY)
            whole = [token for piece in pieces for token in piece]
            assert answer.output_token_ids == hugging_face(whole, 5)
            best = max((common(whole, other) for other in known), default=0) if mode == "prefix" else 0
            assert answer.usage.cached_tokens == min(best, len(whole) - 1)
            assert answer.usage.computed_tokens == len(whole) - answer.usage.cached_tokens
            known.append(whole + answer.output_token_ids[:-1])
            engine.check()
        assert engine.stats().num_referenced_entries == 0


@settings(max_examples=many(30), deadline=None)
@given(prompts=st.lists(texts, min_size=2, max_size=8), step=st.sampled_from([2, 5, 1024]))
def test_calls_in_flight_share_their_prefixes_and_stay_right(prompts, step):
    """Submitted at once: a later call waits for the prefix that an earlier one is encoding, and uses it."""
    engine = tiny_models.engine(step=step)
    with engine.session(mode="prefix") as session:
        answers = session.decode([{"header": prompt, "sampling": GREEDY} for prompt in prompts])
        engine.run_until_idle()
        engine.check()
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.output_token_ids == hugging_face(prompt, 5)
            best = max((common(prompt, other) for other in prompts[:index]), default=0)
            assert answer.usage.cached_tokens >= min(best, len(prompt) - 1)


def test_branches_encode_their_common_prompt_once():
    engine = tiny_models.engine()
    with engine.session(mode="prefix", seed=0) as session:
        exc = session.prefill(list(range(40)))
        branches = [session.decode([50], [exc], sampling=SamplingParams(max_tokens=4, seed=i)) for i in range(8)]
        engine.run_until_idle()
        assert [b.usage.computed_tokens for b in branches] == [41] + [1] * 7
        voters = [session.decode([51], [exc, *branches], sampling=GREEDY) for _ in range(4)]
        engine.run_until_idle()
        assert all(v.usage.computed_tokens == 1 for v in voters[1:])
        # the first branch follows the problem in the voters' prompt: its text is a cached prefix too
        assert voters[0].usage.cached_tokens >= 40 + 1 + 3


def test_eviction_under_pressure_changes_no_answer():
    engine = tiny_models.engine(tokens=128)
    pick = torch.Generator().manual_seed(0)
    with engine.session(mode="prefix") as session:
        for _ in range(40):
            size = int(torch.randint(1, 60, (), generator=pick))
            prompt = torch.randint(0, 3, (size,), generator=pick).tolist()
            assert session.decode(prompt, sampling=GREEDY).output_token_ids == hugging_face(prompt, 5)
            engine.check()
    assert engine.events.counts["evicted"] > 0
