"""Random graphs of requests that read parts of earlier ones, in the coordinates of the wire protocol.

A call's prompt is its parts and then its own tokens. A part is a view of an earlier call's message, placed anywhere, or
tokens between two views, which are computed. All computed tokens have the position of their slot in the prompt.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from helpers.oracle_families import Graph, row_logprobs
from hypothesis import strategies as st
from offline_engine import OfflineEngine, Request, logprobs_of, report_of, tokens_of
from tiny_models import VOCABULARY


@dataclass(frozen=True)
class View:
    """Tokens [start, stop) of the message of an earlier call; position None: that of the slot."""

    call: int
    start: int
    stop: int
    position: int | None = None


@dataclass
class Call:
    """A message with what its prompt reads; the driver appends what vLLM generated to `answer`."""

    parts: list[View | tuple[int, ...]]
    tokens: list[int]
    num_generated: int = 0
    footer: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    @property
    def message(self) -> list[int]:
        return self.tokens + self.answer + (self.footer if self.answer else [])

    @property
    def length(self) -> int:
        """Tokens of the message when it is complete."""
        return len(self.tokens) + self.num_generated + (len(self.footer) if self.num_generated else 0)

    @property
    def header_slot(self) -> int:
        """Slot of the first own token."""
        return sum(part_length(part) for part in self.parts)


def part_length(part: View | tuple[int, ...]) -> int:
    return part.stop - part.start if isinstance(part, View) else len(part)


tokens = st.integers(0, VOCABULARY - 1)
texts = st.one_of(
    st.lists(tokens, min_size=1, max_size=9),
    st.builds(  # longer than a block; not shrunk token by token
        lambda seed, length: np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist(),
        st.integers(0, 99),
        st.integers(10, 45),
    ),
)


@st.composite
def graphs(draw, *, max_calls: int = 6, holes: bool = False) -> list[Call]:
    """Calls whose views are slices, equal, reordered, overlapping, with gaps, or placed behind the reader."""
    calls: list[Call] = []
    for index in range(draw(st.integers(2, max_calls))):
        parts: list[View | tuple[int, ...]] = []
        for _ in range(draw(st.integers(0, 4)) if index else 0):
            viewed = draw(st.integers(0, index - 1))
            length = calls[viewed].length
            start, stop = 0, length
            if draw(st.booleans()):
                start = draw(st.integers(0, length - 1))
                stop = draw(st.integers(start + 1, length))
            parts.append(View(viewed, start, stop, draw(st.one_of(st.none(), st.integers(-80, 160)))))
            if holes and draw(st.booleans()):
                parts.append(tuple(draw(st.lists(tokens, min_size=1, max_size=9))))
        generates = draw(st.booleans())
        calls.append(
            Call(
                parts,
                draw(texts),
                num_generated=draw(st.integers(1, 9)) if generates else 0,
                footer=draw(st.lists(tokens, max_size=2)) if generates else [],
            )
        )
    return calls


@dataclass
class Prompt:
    """What a call sends: its prompt with all parts, and the spans."""

    tokens: list[int]
    spans: list[dict]

    def cut(self, slots: int) -> "Prompt":
        """Return the first slots of the prompt, with the spans that end before the last of them."""
        return Prompt(self.tokens[:slots], [s for s in self.spans if s["at"] + s["stop"] - s["start"] < slots])


def prompt_of(calls: Sequence[Call], call: Call, names: Sequence[str]) -> Prompt:
    """Return the prompt of a call up to its own tokens.

    Args:
        names: entries of the earlier calls.
    """
    prompt = Prompt([], [])
    for part in call.parts:
        at = len(prompt.tokens)
        if isinstance(part, View):
            span = {"entry": names[part.call], "start": part.start, "stop": part.stop, "at": at}
            prompt.spans.append(span if part.position is None else span | {"position": part.position})
            prompt.tokens += calls[part.call].message[part.start : part.stop]
        else:
            prompt.tokens += part
    return Prompt(prompt.tokens + call.message, prompt.spans)


def is_computed(prompt: Prompt, slot: int) -> bool:
    return not any(s["at"] <= slot < s["at"] + s["stop"] - s["start"] for s in prompt.spans)


class OraclePrompt:
    """Rows of the oracle behind the slots of one prompt.

    Args:
        graph: rows of all prompts.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._seen: list[tuple[int, int]] = []  # (row, position) of each slot
        self.computed: dict[int, int] = {}  # row of each slot that is computed

    def compute(self, text: Iterable[int]) -> None:
        """Add tokens that have the positions of their slots and see all slots before them."""
        for token in text:
            slot, row = len(self._seen), len(self._graph.tokens)
            self.computed[slot] = row
            self._seen.append((row, slot))
            self._graph.tokens.append(token)
            self._graph.positions.append(slot)
            self._graph.visible.append(list(self._seen))

    def view(self, rows: Iterable[int], position: int | None = None) -> None:
        """Add rows of earlier prompts; position None: that of the slot."""
        position = len(self._seen) if position is None else position
        self._seen.extend((row, position + j) for j, row in enumerate(rows))

    def rows(self, start: int, stop: int) -> list[int]:
        """Return the rows of slots [start, stop)."""
        return [row for row, _ in self._seen[start:stop]]


def expected_rows(model, calls: Sequence[Call]) -> list[dict[int, np.ndarray]]:
    """Return the oracle's log-probabilities behind each computed slot of each call's prompt."""
    graph, prompts, messages = Graph(), [], []
    for call in calls:
        prompt = OraclePrompt(graph)
        for part in call.parts:
            if isinstance(part, View):
                prompt.view(messages[part.call][part.start : part.stop], part.position)
            else:
                prompt.compute(part)
        prompt.compute(call.message)
        prompts.append(prompt)
        messages.append(prompt.rows(call.header_slot, call.header_slot + len(call.message)))
    rows = row_logprobs(model, graph)
    return [{slot: rows[row] for slot, row in prompt.computed.items()} for prompt in prompts]


_numbers = itertools.count()


def run_graph(
    engine: OfflineEngine, calls: Sequence[Call], *, repair: float = 0, **options
) -> list[dict[int, np.ndarray]]:
    """Run the calls, and return the log-probabilities behind the computed slots of each.

    Every computed slot is sampled by a request whose prompt ends there. Answers are generated, stored and completed by
    a request with the rest of the message, which replaces the entry that it reads.

    Args:
        repair: share of the tokens of each view that is computed again.
        options: fields of all requests.
    """

    def request(prompt: Prompt, store: list[dict] | None = None, max_tokens: int = 1) -> Request:
        reuse = {"spans": prompt.spans} | ({} if store is None else {"store": store})
        reuse |= {"repair": repair} if repair else {}
        return Request(prompt.tokens, reuse if prompt.spans or store else None, max_tokens, **options)

    prefix = f"graph-{next(_numbers)}"
    names = [f"{prefix}-{index}" for index in range(len(calls))]
    result: list[dict[int, np.ndarray]] = []
    for name, call in zip(names, calls, strict=True):
        prompt, rows, header = prompt_of(calls, call, names), {}, call.header_slot
        store = [{"entry": name, "start": header, "stop": None if call.num_generated else len(prompt.tokens)}]
        cuts = [prompt.cut(slot + 1) for slot in range(len(prompt.tokens) - 1) if is_computed(prompt, slot)]
        outputs = engine.run(request(prompt, store, max(1, call.num_generated)), *(request(cut) for cut in cuts))
        check_report(report_of(outputs[0]), prompt, [name], is_repaired=repair > 0)
        for cut, output in zip([prompt, *cuts], outputs, strict=True):
            for offset, row in enumerate(logprobs_of(output)):
                rows[len(cut.tokens) - 1 + offset] = row
        if call.num_generated:
            call.answer = tokens_of(outputs[0])
            spans = prompt.spans
            prompt, stored = prompt_of(calls, call, names), len(call.tokens) + call.num_generated - 1
            own = {"entry": name, "start": 0, "stop": stored, "at": header, "position": header}
            store = [{"entry": name, "start": header, "stop": len(prompt.tokens)}]
            prompt = Prompt(prompt.tokens, [*spans, own])
            (output,) = engine.run(request(prompt, store))
            check_report(report_of(output), prompt, [name], is_repaired=repair > 0)
            rows[len(prompt.tokens) - 1] = logprobs_of(output)[0]
        result.append(rows)
    engine.run(Request([0], {"release": names, "mode": "exact"}, **options))
    return result


def check_report(report: dict, prompt: Prompt, stored: list[str], *, is_repaired: bool) -> None:
    """The report counts what the spans name; what is computed again is not counted as reused.

    Behind a hole, what continues the prompt exactly is left to the prefix cache.
    """
    reused: dict[str, int] = {}
    for span in prompt.spans:
        reused[span["entry"]] = reused.get(span["entry"], 0) + span["stop"] - span["start"]
    assert report["reused_tokens"] <= sum(reused.values())
    has_holes = any(is_computed(prompt, slot) for slot in range(prompt.spans[-1]["at"] if prompt.spans else 0))
    if not is_repaired and not has_holes:
        assert report["reused"] == reused
        assert report["reused_tokens"] == sum(reused.values())
    assert report["computed_tokens"] == len(prompt.tokens) - report["reused_tokens"]
    assert report["stored"] == stored
    assert not report.get("missing") and not report.get("refused")


def repaired(calls: Sequence[Call], share: float) -> list[Call]:
    """Return the calls that compute the first tokens of each view again, in the context of the reader."""
    result = []
    for call in calls:
        parts: list[View | tuple[int, ...]] = []
        for part in call.parts:
            if isinstance(part, View):
                middle = part.start + math.ceil(share * part_length(part))
                parts.append(tuple(calls[part.call].message[part.start : middle]))
                position = None if part.position is None else part.position + middle - part.start
                if middle < part.stop:
                    parts.append(View(part.call, middle, part.stop, position))
            else:
                parts.append(part)
        result.append(replace(call, parts=parts))
    return result


def largest_difference(found: Sequence[dict[int, np.ndarray]], expected: Sequence[dict[int, np.ndarray]]) -> float:
    """Return the largest difference over all rows that were found, in nats."""
    pairs = [(rows[slot], truth[slot]) for rows, truth in zip(found, expected, strict=True) for slot in rows]
    return max(float(np.abs(row - truth).max()) for row, truth in pairs)
