"""The automaton of stop strings against a search that looks for each string."""

import copy
import pickle

import pytest
import torch
from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import SamplingParams
from choreograph.errors import SamplingError
from choreograph.request.decode_state import DecodeState
from choreograph.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_TOKEN_IDS
from choreograph.stop_strings import ROOT, StopAutomaton, stop_automaton

words = st.text("ab", min_size=1, max_size=6)
pieces = st.lists(st.text("abc", max_size=5), max_size=12)


class Pieces:
    """A detokenizer in which token k is the k-th piece."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def step(self, token: int) -> str:
        return self._texts[token]

    def flush(self) -> str:
        return ""


def search(stop: list[str], texts: list[str], min_tokens: int) -> tuple[str, bool]:
    """Return the text up to the first stop string, and whether there is one."""
    text = ""
    for number, piece in enumerate(texts):
        starts = [(text + piece).find(s, max(0, len(text) - len(s) + 1)) for s in stop]
        found = [start for start in starts if start >= 0]
        text += piece
        if found and number >= min_tokens:
            return text[: min(found)], True
    return text, False


@settings(max_examples=many(400))
@given(stop=st.lists(words, min_size=1, max_size=8), texts=pieces, min_tokens=st.integers(0, 6))
def test_answers_end_as_a_search_for_each_string_ends_them(stop, texts, min_tokens):
    sampling = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=len(texts) + 7)
    state = DecodeState(sampling, [], frozenset(), torch.Generator(), detokenizer=Pieces(texts))
    stable, reason = "", None
    for token in range(len(texts)):
        reason = state.append(token)
        if reason is not None:
            break
        assert state.stable_text.startswith(stable)
        stable = state.stable_text
    text, is_stopped = search(stop, texts, min_tokens)
    assert state.text == text and text.startswith(stable)
    assert is_stopped == (reason == "stop")


@settings(max_examples=many(200))
@given(stop=st.lists(words, min_size=1, max_size=8), text=st.text("abc", max_size=20))
def test_only_text_that_a_stop_string_may_remove_is_held_back(stop, text):
    automaton = StopAutomaton(stop)
    state, _ = automaton.read(ROOT, text)
    suffixes = [text[start:] for start in range(len(text))]
    held = [len(suffix) for suffix in suffixes if any(s.startswith(suffix) and s != suffix for s in stop)]
    assert automaton.num_held(state) == max(held, default=0)


def test_every_character_is_read_once_with_any_number_of_strings():
    class Counting(str):
        num_read = 0

        def __iter__(self):
            Counting.num_read += len(self)
            return super().__iter__()

    automaton = StopAutomaton([f"stop {number}" for number in range(200)])
    state = ROOT
    for _ in range(50):
        state, _ = automaton.read(state, Counting("some text, then st"))
    assert Counting.num_read == 50 * 18


def test_the_answers_of_a_request_share_one_automaton():
    sampling = SamplingParams(stop=["a", "bc"], seed=1)
    others = [sampling.with_seed(2), copy.copy(sampling), SamplingParams(stop=("a", "bc")),
              pickle.loads(pickle.dumps(sampling))]  # fmt: skip
    assert all(other.stop_automaton is sampling.stop_automaton for other in others)
    assert (sampling.seed, others[0].seed) == (1, 2) and others[0] == SamplingParams(stop=["a", "bc"], seed=2)
    assert stop_automaton(["a"]) is not sampling.stop_automaton


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop": [f"s{n}" for n in range(MAX_STOP_STRINGS + 1)]}, "stop: 257 strings: use at most 256"),
        ({"stop": ["x" * MAX_STOP_CHARS, "y"]}, "stop: 2,049 characters in total: use at most 2,048"),
        ({"stop_token_ids": range(MAX_TOKEN_IDS + 1)}, "stop_token_ids: 4,097 token ids: use at most 4,096"),
        ({"logit_bias": dict.fromkeys(range(MAX_TOKEN_IDS + 1), 1)}, "logit_bias: 4,097 token ids: use at most 4,096"),
    ],
)
def test_what_a_request_lists_is_limited(options, reason):
    with pytest.raises(SamplingError, match=reason):
        SamplingParams(**options)


def test_lists_up_to_the_limits_are_accepted():
    length = MAX_STOP_CHARS // MAX_STOP_STRINGS
    stop = [f"{number:0{length}}" for number in range(MAX_STOP_STRINGS)]
    ids = range(MAX_TOKEN_IDS)
    sampling = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=dict.fromkeys(ids, 1))
    assert len(sampling.stop) == MAX_STOP_STRINGS and len(sampling.logit_bias) == MAX_TOKEN_IDS
