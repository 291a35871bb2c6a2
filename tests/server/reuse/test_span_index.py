"""Quotes of stored messages against a slow search, and bounded memory."""

import random

from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.server.reuse.span_index import MAX_CANDIDATES, MIN_SPAN, STRIDE, SpanIndex


def longest_quote(tokens, start, stored):
    """Length of the longest run at tokens[start:] that occurs in a stored message."""
    best = 0
    for source in range(len(stored)):
        length = 0
        while source + length < len(stored) and start + length < len(tokens):
            if stored[source + length] != tokens[start + length]:
                break
            length += 1
        best = max(best, length)
    return best


@settings(max_examples=many(60), deadline=None)
@given(seed=st.integers(0, 1 << 32), letters=st.sampled_from([2, 5, 1000]))
def test_quotes_are_equal_to_their_source_and_none_is_missed(seed, letters):
    generator = random.Random(seed)
    stored = [[generator.randrange(letters) for _ in range(generator.randrange(0, 150))] for _ in range(3)]
    tokens: list[int] = []
    for _ in range(4):
        tokens += [generator.randrange(letters) for _ in range(generator.randrange(20))]
        source = generator.choice(stored)
        start = generator.randrange(len(source) + 1)
        tokens += source[start : start + generator.randrange(80)]
    index = SpanIndex[int]()
    for key, source in enumerate(stored):
        index.add(key, source)
    spans = index.find(tokens)
    end, used = 0, set()
    for span in spans:
        length = span.stop - span.start
        assert length >= MIN_SPAN and span.start >= end
        assert tokens[span.start : span.stop] == stored[span.key][span.source_start : span.source_start + length]
        source_places = {(span.key, span.source_start + i) for i in range(length)}
        assert not used & source_places
        used |= source_places
        end = span.stop
    if letters == 1000:  # no stored window occurs twice, except by a repeated quote
        quoted = [
            start for start in range(len(tokens)) if max(longest_quote(tokens, start, s) for s in stored) >= MIN_SPAN
        ]
        for start in quoted:
            keys = [k for k, s in enumerate(stored) if longest_quote(tokens, start, s) >= MIN_SPAN]
            assert any(span.start <= start < span.stop for span in spans) or any(span.key in keys for span in spans)


def test_a_quote_of_the_minimal_length_is_found_at_every_place():
    source = list(range(100, 200))
    index = SpanIndex[str]()
    index.add("message", source)
    for start in range(len(source) - MIN_SPAN + 1):
        tokens = [1, 2, *source[start : start + MIN_SPAN], 3]
        assert index.find(tokens) == [(2, 2 + MIN_SPAN, "message", start)]
        assert index.find(tokens, 3) == []  # the rest is too short
        assert index.find(tokens, used=[("message", start, start + 40)]) == []


def test_a_quote_of_a_message_that_repeats_itself_is_one_span():
    for period in (1, 5, 11, 16, 20, 33):
        source = [1, 2, 3, *(list(range(100, 100 + period)) * 200)[:200], 4]
        index = SpanIndex[str]()
        index.add("other", [9, *source[20:120]])  # shares the repeated text
        index.add("message", source)
        index.add("third", [8, *source[3:40]])
        assert index.find([7, 7, *source[3:], 7]) == [(2, 203, "message", 3)]


def test_tokens_of_a_message_are_used_once():
    source = list(range(64))
    index = SpanIndex[str]()
    index.add("message", source)
    first, *others = index.find([*source, 99, *source])
    assert first == (0, 64, "message", 0) and others == []


def test_a_message_that_is_not_usable_hides_no_other():
    source = list(range(64))
    index = SpanIndex[str]()
    index.add("failed", source)
    index.add("usable", source)
    assert [span.key for span in index.find(source)] == ["failed"]
    assert [span.key for span in index.find(source, is_usable="usable".__eq__)] == ["usable"]
    assert index.find(source, is_usable=lambda key: False) == []


def test_the_index_is_bounded_and_empty_after_removal():
    index = SpanIndex[int]()
    for key in range(20):
        index.add(key, [7] * 320)
    assert index.num_windows == MAX_CANDIDATES
    index.add(20, list(range(1000, 1320)))
    assert index.num_windows == MAX_CANDIDATES + 320 // STRIDE
    for key in range(21):
        index.remove(key)
    assert index.num_windows == 0 and 0 not in index
