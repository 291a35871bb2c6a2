"""Fixed parts of agents' prompts, marked or inferred (KVFlow §3.3)."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..api.session import Session
from ..context.placement import namespace_of
from ..kv_cache.entry import KVEntry
from ..kv_cache.hashing import content_hash
from ..kv_cache.hints import prefix_key
from ..kv_cache.prefix_tree import common_prefix_len
from ..kv_cache.shared_headers import MIN_SHARED_PREFILL_TOKENS
from ..request.request import Request


class FixedPart(NamedTuple):
    """Fixed part of a prompt: a message or its first tokens."""

    message_hash: bytes  # content hash of the whole message
    context: tuple[bytes, ...]  # content hashes of everything that it attends to


class FixedPrefix:
    """Fixed part of one agent's prompts, as keys of the KV cache.

    In choreographed mode a key is the content hash of a message or of its first tokens; in prefix
    mode the hash of the first tokens of the whole prompt.
    """

    def __init__(self, session: Session) -> None:
        self._core, self._mode = session.core, session.mode
        self._marks: dict[int, tuple[Request, int | None]] = {}  # by message ID: end of the fixed part; None: all
        self._unresolved: dict[int, tuple[Request, int | None]] = {}  # marks whose message has no key yet
        self._parts: dict[bytes, FixedPart] = {}
        self.keys: dict[bytes, None] | None = {}  # None: to be computed again
        self._is_explicit = False  # something was marked, so nothing is inferred
        self._last_parents: list[tuple[Request, ...]] = []  # of each decode of the last turn
        self._last_prompts: list[list[int]] = []  # prompts of the last turn, in prefix mode, to infer from
        self._turn_prompts: list[list[int]] = []  # the same of the turn in progress
        self._turn_keys: set[bytes] = set()  # keys of fixed parts in the prompts of the turn in progress

    def mark(self, request: Request, end: int | None) -> None:
        """Mark a message, or its tokens before `end`."""
        self._marks[request.id] = self._unresolved[request.id] = request, end
        self.keys = None
        self._is_explicit = True

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts that the next ones are compared with."""
        return sum(map(len, (*self._last_prompts, *self._turn_prompts)))

    def resolve(self) -> dict[bytes, None]:
        """Compute `keys`: all fixed parts and everything that these attend to."""
        for request, end in list(self._unresolved.values()):
            if self._add(request, end) is not None:
                del self._unresolved[request.id]
        if self.keys is None:
            self.keys = {key: None for part, (_, context) in self._parts.items() for key in (part, *context)}
        return self.keys

    def observe_prompt(self, decode: Request, *, infer: bool) -> None:
        """Find the fixed part of a prefix-mode prompt.

        It ends with the last marked token. If nothing was ever marked and `infer` is set, it is the
        longest start that the prompt shares with one of the last turn.
        """
        tokens: list[int] = []
        end = 0
        for parent, visible, part in zip(decode.parents, decode.parent_tokens(), decode.parent_slices, strict=True):
            if parent.id in self._marks:
                mark, start = self._marks[parent.id][1], part[0] if part else 0
                end = len(tokens) + (len(visible) if mark is None else max(0, min(mark - start, len(visible))))
            tokens += visible
        if self._is_explicit:
            self._last_prompts, self._turn_prompts = [], []
        elif infer:
            if tokens not in self._turn_prompts:  # several answers to one prompt
                self._turn_prompts.append(tokens)
            end = max((common_prefix_len(last, tokens) for last in self._last_prompts), default=0)
        if end:
            key, cache_manager = prefix_key(decode.namespace, tokens[:end]), self._core.cache_manager
            path = cache_manager.prefix_tree.match(decode.namespace, tokens[:end])
            cache_manager.fixed_parts.add_prefix(key, path)
            self._parts[key], self.keys = FixedPart(key, ()), None
            self._turn_keys.add(key)

    def finish_turn(self, decodes: Sequence[Request], *, infer: bool) -> None:
        """Update the fixed parts by what a turn attended to."""
        if self._mode == "prefix":
            if not decodes:
                return
            seen = {parent.id for decode in decodes for parent in decode.parents}
            self._marks = {id: mark for id, mark in self._marks.items() if id in seen}
            self._parts, self.keys = {key: self._parts[key] for key in self._turn_keys}, None
            self._unresolved = {}
            self._last_prompts = self._turn_prompts
            self._turn_prompts, self._turn_keys = [], set()
            return
        marked = {key for request, end in self._marks.values() if (key := self._add(request, end)) is not None}
        self._marks, self._unresolved = {}, {}
        if infer and not self._is_explicit:
            for decode in decodes:
                self._infer(decode.parents)
        if decodes:
            attended = content_hashes(parent for decode in decodes for parent in decode.parents).keys() | marked
            self._parts = {
                key: part for key, part in self._parts.items() if key in attended or part.message_hash in attended
            }
            self.keys = None
            self._last_parents = [decode.parents for decode in decodes]

    def _infer(self, parents: Sequence[Request]) -> None:
        """Add messages of the last turn, and equal first tokens after them."""
        last = content_hashes(parent for others in self._last_parents for parent in others)
        is_start = True
        for index, parent in enumerate(parents):
            entry = parent.entry
            if entry is None or entry.content_hash is None:
                continue
            if entry.content_hash in last:
                self._add(parent, None)
            elif is_start:
                is_start = False
                others = [o[index].entry for o in self._last_parents if len(o) > index and o[index].entry is not None]
                ends = (common_prefix_len(o.tokens, entry.tokens) for o in others if _have_equal_context(o, entry))
                end = max(ends, default=0)
                if end >= MIN_SHARED_PREFILL_TOKENS:
                    self._add(parent, end)

    def _add(self, request: Request, end: int | None) -> bytes | None:
        """Add a fixed part; return its key, None before admission."""
        entry = request.entry
        if entry is None or entry.content_hash is None:
            return None
        key = entry.content_hash
        if end is not None and end < len(entry.tokens):
            namespace = namespace_of(request, self._core.hf_model.model_info)
            source = entry.layers.hidden_source
            key = content_hash(namespace, entry.tokens[:end], entry.base_position, entry.context, source)
            self._core.cache_manager.fixed_parts.add(key, entry, end)
        self._parts[key], self.keys = FixedPart(entry.content_hash, _context_hashes(entry)), None
        return key


def content_hashes(requests: Iterable[Request]) -> dict[bytes, None]:
    """Return the unique content hashes of admitted requests, in order."""
    entries = (request.entry for request in requests)
    return {e.content_hash: None for e in entries if e is not None and e.content_hash is not None}


def _context_hashes(entry: KVEntry) -> tuple[bytes, ...]:
    """Return the content hashes of everything that an entry attends to, transitively."""
    entries, seen = [entry], {entry.id}
    for ancestor in entries:  # grows during iteration
        for read_entry in ancestor.read_entries:
            if read_entry.id not in seen:
                seen.add(read_entry.id)
                entries.append(read_entry)
    return tuple(e.content_hash for e in entries[1:] if e.content_hash is not None)


def _have_equal_context(a: KVEntry, b: KVEntry) -> bool:
    """Return whether equal tokens of two entries have equal keys and values."""

    def places(entry: KVEntry) -> tuple[bytes | None, list[tuple]]:
        source = entry.layers.hidden_source
        source_hash = None if source is None else source.content_hash
        return source_hash, [(s.entry.content_hash, *s[1:]) for s in entry.context]

    return a.base_position == b.base_position and a.runs is None and b.runs is None and places(a) == places(b)
