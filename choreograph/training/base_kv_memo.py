"""Encodings by the base model that the passes of a training share, such as those of instructions: computed once."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..models.hf_model import HFModel
from .packed_forward import KVByLayer, PackedCall, PackedTrace, compute_kv_per_call

MAX_MEMO_BYTES = 1 << 30  # bytes of keys and values to keep at most


class _MemoKey(NamedTuple):
    """Of an encoding. sees: of everything that the call sees the number of its name, which part, and how far it is
    moved."""

    tokens: tuple[int, ...]
    position: int
    visible_ranges: tuple[tuple[int, int, int, int], ...]


class BaseKVMemo:
    """What the base model makes of calls, while its weights and the types it computes in stay as they are.

    packs: all that will be asked for. What several of them have is kept, the most frequent first, as long as there is
    room. tokens: how many there is room for, if not as many as `MEMORY` holds. Each is computed by itself, so that it
    comes out the same, bit by bit, the caller that asks first.
    """

    def __init__(self, hf_model: HFModel, packed_traces: Iterable[PackedTrace], max_tokens: int | None = None) -> None:
        self._hf_model = hf_model
        self._key_ids: dict[_MemoKey, int] = {}
        self._entries: dict[int, KVByLayer | None] = {}
        self._max_tokens = (
            MAX_MEMO_BYTES // hf_model.model_info.kv_bytes_per_token if max_tokens is None else max_tokens
        )
        self._num_tokens = 0  # to keep
        count = Counter(number for packed in packed_traces for number in dict.fromkeys(self._key_ids_of(packed)))
        names = list(self._key_ids)
        for number, times in count.most_common():
            name = names[number]
            fits = self._num_tokens + len(name.tokens) <= self._max_tokens
            if times > 1 and fits and all(seen[0] in self._entries for seen in name.visible_ranges):
                self._entries[number] = None
                self._num_tokens += len(name.tokens)

    def __call__(self, packed: PackedTrace) -> list[KVByLayer]:
        """Call by call. To be used inside `adapter.hooked()`."""
        result: dict[int, KVByLayer] = {}
        numbers = self._key_ids_of(packed)
        for n, number in enumerate(numbers):
            if number in self._entries:
                known = self._entries[number]
                if known is None:
                    made = self._compute(packed, result, [n])[0].items()  # which may be a part of something larger
                    known = self._entries[number] = {layer: (k.clone(), v.clone()) for layer, (k, v) in made}
                result[n] = known
        if new := [n for n in range(len(numbers)) if n not in result]:
            result |= dict(zip(new, self._compute(packed, result, new), strict=True))
        return [result[n] for n in range(len(numbers))]

    def clear(self) -> None:
        """Keeps nothing from now on."""
        self._entries.clear()
        self._num_tokens = 0

    def check(self) -> None:
        """What is kept fits, is whole, and all that it sees is kept too."""
        names = list(self._key_ids)
        assert self._num_tokens == sum(len(names[number].tokens) for number in self._entries) <= self._max_tokens
        assert all(seen[0] in self._entries for number in self._entries for seen in names[number].visible_ranges)
        for number, known in self._entries.items():
            for keys, values in (known or {}).values():
                assert keys.shape[2] == values.shape[2] == len(names[number].tokens)

    def _compute(
        self, packed: PackedTrace, cached: Mapping[int, KVByLayer], new_indices: Sequence[int]
    ) -> list[KVByLayer]:
        return compute_kv_per_call(self._hf_model, subtrace(packed, list(cached), new_indices), list(cached.values()))

    def _key_ids_of(self, packed: PackedTrace) -> list[int]:
        """The numbers of the names of all calls."""
        result: list[int] = []
        for span in packed.own_calls:
            homes = ((*packed.locate(run), run.shift) for run in span.visible_ranges)
            sees = tuple((result[n], part.start, part.stop, shift) for n, part, shift in homes)
            name = _MemoKey(tuple(packed.tokens[span.lo : span.hi]), packed.positions[span.lo], sees)
            result.append(self._key_ids.setdefault(name, len(self._key_ids)))
        return result


def subtrace(packed: PackedTrace, cached_indices: Sequence[int], new_indices: Sequence[int]) -> PackedTrace:
    """Some calls of a pass, behind others that are encoded already."""
    moved, at = dict[int, int](), 0  # of every call: by how much its rows are moved
    for n in (*cached_indices, *new_indices):
        moved[n] = at - packed.own_calls[n].lo
        at += packed.own_calls[n].hi - packed.own_calls[n].lo

    def part(numbers: Sequence[int], past: PackedTrace | None) -> PackedTrace:
        spans, tokens, positions = list[PackedCall](), list[int](), list[int]()
        for n in numbers:
            lo, hi, sees = packed.own_calls[n]
            tokens += packed.tokens[lo:hi]
            positions += packed.positions[lo:hi]
            runs = ((run, moved[packed.locate(run)[0]]) for run in sees if past is not None)
            sees = tuple(run._replace(lo=run.lo + by, hi=run.hi + by) for run, by in runs)
            spans.append(PackedCall(lo + moved[n], hi + moved[n], sees))
        return PackedTrace(tokens, positions, tuple(spans), [], [], past)

    return part(new_indices, part(cached_indices, None))
