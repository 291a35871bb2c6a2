"""Entries of a vLLM server, as the proxy finds them.

An entry holds keys and values of a part of a prompt, or of its end and the answer to it. A later prompt of the same
tenant reuses it as the continuation of the same context, as a whole message, or as a quote inside another text. All
functions run in the event loop.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ...vllm.reuse_params import new_name
from ..reuse.context_index import ROOT, ContextIndex, extend_lineage, longest
from ..reuse.span_index import MIN_SPAN, Span, SpanIndex, gaps_between

MAX_RELEASES = 1024  # names of dropped entries that wait for a request which releases them

SOURCES = ("prefix", "message", "quoted", "computed")  # where prompt tokens come from


class UpstreamTenant(NamedTuple):
    """What separates entries: none is found under another key."""

    authorization: str
    cache_salt: str
    model: str
    workflow: str
    labels: tuple[str, ...]

    @property
    def namespace(self) -> tuple[object, ...]:
        """What separates names in the server, which knows no keys."""
        return self.cache_salt, self.model, self.workflow, self.labels


@dataclass(eq=False)
class UpstreamEntry:
    """Keys and values that the server stores under a name."""

    tokens: list[int]
    lineage: bytes  # of the tokens before them
    name: str = field(default_factory=new_name)

    @cached_property
    def digest(self) -> bytes:
        """Hash of the tokens and their context."""
        return hashlib.sha256(self.lineage + np.asarray(self.tokens, dtype=np.uint64).tobytes()).digest()


@dataclass
class PromptPart:
    """Tokens [start, stop) of a prompt: reused, or computed and stored."""

    start: int
    stop: int
    source: str  # one of SOURCES
    entry: UpstreamEntry
    source_start: int = 0  # in the entry


@dataclass
class PromptPlan:
    """A prompt in parts, the last of which the answer continues."""

    tokens: list[int]
    parts: list[PromptPart]

    @property
    def reused(self) -> list[PromptPart]:
        return [part for part in self.parts if part.source != "computed"]

    @property
    def computed(self) -> list[PromptPart]:
        return [part for part in self.parts if part.source == "computed"]

    def counts(self) -> dict[str, int]:
        """Return the prompt tokens by source."""
        counts = dict.fromkeys(SOURCES, 0)
        for part in self.parts:
            counts[part.source] += part.stop - part.start
        return {f"{source}_tokens": count for source, count in counts.items()}

    def holes(self) -> list[list[PromptPart]]:
        """Return runs of computed parts that a reused part follows."""
        last = max((number for number, part in enumerate(self.parts) if part.source != "computed"), default=0)
        runs = itertools.groupby(self.parts[:last], key=lambda part: part.source == "computed")
        return [list(run) for is_computed, run in runs if is_computed]


def to_spans(parts: Iterable[PromptPart]) -> list[dict[str, Any]]:
    """Return parts as the connector's `spans`: their keys come from entries."""
    return [
        {
            "entry": part.entry.name,
            "start": part.source_start,
            "stop": part.source_start + part.stop - part.start,
            "at": part.start,
        }
        for part in parts
    ]


class _TenantEntries:
    """Entries of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, UpstreamEntry] = OrderedDict()  # by name
        self.num_tokens = 0
        self.contexts: ContextIndex[UpstreamEntry] = ContextIndex()
        self.by_content: dict[tuple[int, ...], UpstreamEntry] = {}
        self.spans: SpanIndex[UpstreamEntry] = SpanIndex()

    def add(self, entry: UpstreamEntry) -> bool:
        """Add an entry; return False if an equal one is there."""
        if entry.name in self.entries:
            return True
        siblings = self.contexts.followers(entry.lineage, entry.tokens[0])
        if any(other.tokens == entry.tokens for other in siblings):  # a concurrent request stored it too
            return False
        self.contexts.add(entry)
        self.entries[entry.name] = entry
        self.num_tokens += len(entry.tokens)
        self.by_content[tuple(entry.tokens)] = entry
        self.spans.add(entry, entry.tokens)
        return True

    def remove(self, entry: UpstreamEntry) -> None:
        del self.entries[entry.name]
        self.num_tokens -= len(entry.tokens)
        self.contexts.remove(entry)
        if self.by_content.get(tuple(entry.tokens)) is entry:
            del self.by_content[tuple(entry.tokens)]
        self.spans.remove(entry)

    def find(self, tokens: list[int], start: int, stop: int, cuts: Sequence[int]) -> list[Span[UpstreamEntry]]:
        """Return whole messages in tokens[start:stop], then quotes between them."""
        whole = [
            Span(first, last, entry, 0)
            for first, last in itertools.pairwise(cuts)
            if start <= first and last <= stop and last - first >= MIN_SPAN
            if (entry := self.by_content.get(tuple(tokens[first:last]))) is not None
        ]
        quotes = [self.spans.find(tokens, first, (), last) for first, last in gaps_between(whole, start, stop)]
        return sorted(itertools.chain(whole, *quotes), key=lambda span: span.start)

    def continuation(
        self, lineage: bytes, tokens: list[int], start: int, stop: int
    ) -> tuple[UpstreamEntry, int] | None:
        """Return the entry that continues a context furthest, and how far."""
        return longest(self.contexts.followers(lineage, tokens[start]), tokens, start, stop) if start < stop else None


class _Planner:
    """Parts of a prompt, from left to right."""

    def __init__(self, tenant: _TenantEntries, tokens: list[int], cuts: Sequence[int]) -> None:
        self._tenant, self._tokens, self._cuts = tenant, tokens, cuts
        self._lineage, self._is_prefix = ROOT, True  # every part was encoded after the same parts
        self._position = 0
        self.parts: list[PromptPart] = []

    def plan(self, *, reuses: bool) -> PromptPlan:
        if reuses:
            limit = len(self._tokens) - 1  # at least one token is computed
            self._continue_to(limit)
            for span in self._tenant.find(self._tokens, self._position, limit, self._cuts):
                self._continue_to(span.start)
                self._compute_to(span.start)
                self._is_prefix = False
                self._append(span.key, span.source_start, span.stop, "quoted" if self._is_part(span) else "message")
            self._continue_to(limit)
        self._compute_to(len(self._tokens))
        return PromptPlan(self._tokens, self.parts)

    @staticmethod
    def _is_part(span: Span[UpstreamEntry]) -> bool:
        return span.stop - span.start < len(span.key.tokens)

    def _continue_to(self, stop: int) -> None:
        """Append entries that followed the same context."""
        find = partial(self._tenant.continuation, tokens=self._tokens, stop=stop)
        while (found := find(self._lineage, start=self._position)) is not None:
            self._append(found[0], 0, self._position + found[1], "prefix" if self._is_prefix else "message")

    def _compute_to(self, stop: int) -> None:
        """Append new tokens, cut between turns into parts of some length."""
        ends = [cut for cut in self._cuts if self._position < cut < stop] + [stop]
        for end in ends:
            if end - self._position >= MIN_SPAN or end == stop > self._position:
                entry = UpstreamEntry(self._tokens[self._position : end], self._lineage)
                self._append(entry, 0, end, "computed")

    def _append(self, entry: UpstreamEntry, source_start: int, stop: int, source: str) -> None:
        self.parts.append(PromptPart(self._position, stop, source, entry, source_start))
        self._lineage = extend_lineage(self._lineage, entry.digest, source_start, stop - self._position)
        self._position = stop


class EntryStore:
    """Entries of all tenants, within a number of tokens.

    A tenant that stores most loses its least recently used entries first.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tenants: dict[UpstreamTenant, _TenantEntries] = {}
        self._releases: OrderedDict[tuple[object, str], None] = OrderedDict()  # namespaces and names, oldest first

    @property
    def num_tokens(self) -> int:
        return sum(tenant.num_tokens for tenant in self._tenants.values())

    def plan(self, key: UpstreamTenant, tokens: list[int], cuts: Collection[int] = ()) -> PromptPlan:
        """Cut a prompt into reused and computed parts.

        Args:
            tokens: token ids of the prompt, at least one.
            cuts: places between turns, where new entries start and end.
        """
        tenant = self._tenants.get(key) or _TenantEntries()
        plan = _Planner(tenant, tokens, sorted({0, len(tokens), *cuts})).plan(reuses=bool(tenant.entries))
        for part in plan.reused:
            tenant.entries.move_to_end(part.entry.name)
        return plan

    def add(self, key: UpstreamTenant, entries: Sequence[UpstreamEntry]) -> None:
        """Keep entries that the server stored; drop others beyond the limit."""
        if not entries:
            return
        tenant = self._tenants.setdefault(key, _TenantEntries())
        self.drop(key, [entry.name for entry in entries if not tenant.add(entry)])
        while self.num_tokens > self._max_tokens:
            largest = max(self._tenants, key=lambda other: self._tenants[other].num_tokens)
            self.drop(largest, [next(iter(self._tenants[largest].entries))])

    def drop(self, key: UpstreamTenant, names: Iterable[str]) -> None:
        """Forget entries; a later request of the namespace releases them."""
        tenant = self._tenants.get(key)
        for name in names:
            self._releases[key.namespace, name] = None
            if tenant is not None and name in tenant.entries:
                tenant.remove(tenant.entries[name])
        if tenant is not None and not tenant.entries:
            del self._tenants[key]
        while len(self._releases) > MAX_RELEASES:  # the server evicts the others when it needs their place
            self._releases.popitem(last=False)

    def names(self, key: UpstreamTenant) -> list[str]:
        """Return the names of all entries of a tenant."""
        return list(self._tenants[key].entries) if key in self._tenants else []

    def take_releases(self, key: UpstreamTenant) -> list[str]:
        """Return the names to release, once."""
        names = [name for namespace, name in self._releases if namespace == key.namespace]
        for name in names:
            del self._releases[key.namespace, name]
        return names

    def check(self) -> None:
        """Raise AssertionError if counts and indexes disagree."""
        for tenant in self._tenants.values():
            entries = list(tenant.entries.values())
            assert entries and tenant.num_tokens == sum(len(entry.tokens) for entry in entries), "wrong token count"
            indexed = list(tenant.contexts)
            assert set(indexed) == set(entries) and len(indexed) == len(entries), "wrong index of contexts"
            assert all(entry in tenant.spans for entry in entries), "an entry is not indexed"
            assert set(tenant.by_content.values()) <= set(entries), "wrong index of contents"
        assert self.num_tokens <= self._max_tokens, "too many tokens"
