"""Differentiable forward pass over a trace packed into one sequence.

Every call occupies its base positions. A call attends causally to its own tokens, and to all tokens of its parent
slices. Parent keys are rotated from their base position to the position where the call attends to them (Prompt
Choreography §2.2 to §2.4), and gradients reach every parent. Calls that only the base model computes form a prefix,
which is computed beforehand without gradients.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from ...attention.metadata import Alignment, AttentionSpec
from ...attention.reference import apply_softcap_alibi, outside_window, shift_aligned
from ...attention.rope import Rope, rotate
from ...models.hf_model import HFModel
from ...outputs import BASE_MODEL
from .traced_calls import (
    TracedCall,
    TraceSlice,
    check_parents,
    first_decode_index,
    iter_decodes,
    reorder_calls,
    reused_parents,
)

KVByLayer = dict[int, tuple[Tensor, Tensor]]  # layer: keys and values of some tokens, (1, G, N, D) each

MAX_MEMO_BYTES = 1 << 30  # maximum bytes of keys and values in a BaseKVMemo


class PackedTrace:
    """Calls packed into one token sequence, after a prefix.

    The base model computes the prefix.
    """

    def __init__(
        self, calls: Sequence[TracedCall], num_prefix_calls: int = 0, alignment: Alignment | None = None
    ) -> None:
        self.calls = tuple(calls)  # in layout order, prefix first; their parents are indices of this tuple
        self.num_prefix_calls = num_prefix_calls
        self.alignment = alignment  # of attention to parents that were encoded without what precedes them
        self.own_calls = self.calls[num_prefix_calls:]  # calls after the prefix
        self.first_indices = list(accumulate((len(call.tokens) for call in calls), initial=0))  # of each call's tokens
        self.num_prefix_tokens = self.first_indices[num_prefix_calls]
        self.tokens: list[int] = []  # of own calls
        self.positions: list[int] = []  # base positions of `tokens`
        self.targets: list[int] = []  # generated tokens of own calls
        self.logits_indices: list[int] = []  # indices into `tokens` of the tokens that predict `targets`
        for call in self.own_calls:
            generated = call.generated or []
            last_header = len(self.tokens) + len(call.prompt) - 1
            self.logits_indices += range(last_header, last_header + len(generated))
            self.targets += generated
            self.positions += range(call.start, call.start + len(call.tokens))
            self.tokens += call.tokens

    @cached_property
    def prefix(self) -> "PackedTrace":
        return PackedTrace(self.calls[: self.num_prefix_calls], alignment=self.alignment)

    def check(self) -> None:
        """Assert that calls attend to earlier calls and the prefix generates nothing."""
        check_parents(self.calls)
        assert 0 <= self.num_prefix_calls <= len(self.calls)
        assert all(call.generated is None for call in self.prefix.calls)
        assert len(self.tokens) == len(self.positions) == self.first_indices[-1] - self.num_prefix_tokens


def pack(calls: Sequence[TracedCall], alignment: Alignment | None = None) -> PackedTrace:
    """Pack a trace without a prefix."""
    return PackedTrace(calls, alignment=alignment)


def pack_adapter_stages(calls: Sequence[TracedCall], alignment: Alignment | None = None) -> PackedTrace:
    """Pack a split trace; calls before the first decode are the prefix."""
    return PackedTrace(calls, first_decode_index(calls), alignment)


def full_prompt_indices(packed_prompts: PackedTrace) -> dict[tuple[str, int], list[int]]:
    """Return the token indices of each decode's full prompt and output."""
    firsts = packed_prompts.first_indices
    result = {}
    for index, (name, call) in enumerate(iter_decodes(packed_prompts.calls)):
        context = [firsts[s.call] + k for s in call.parents for k in range(s.first, s.last)]
        result[name] = [*context, *range(firsts[index], firsts[index + 1])]
    return result


class PackedForwardContext:
    """Attention of one packed pass; the model calls `attend` in every layer.

    Args:
        prefix_kv: keys and values of every prefix call.
        kv_out: receives the keys and values of the tokens after the prefix.
    """

    def __init__(
        self,
        packed: PackedTrace,
        specs: Sequence[AttentionSpec],
        device: torch.device,
        prefix_kv: Sequence[KVByLayer] = (),
        kv_out: KVByLayer | None = None,
    ) -> None:
        assert len(prefix_kv) == packed.num_prefix_calls
        self._calls, self._specs, self._device = packed.own_calls, specs, device
        self._prefix_kv, self._kv_out = prefix_kv, kv_out
        self._lengths = [len(call.tokens) for call in self._calls]
        self._parents = [[s for s in call.parents if s.first < s.last] for call in self._calls]
        self._alignment = packed.alignment
        self._aligned: list[Tensor | None] = [None] * len(self._calls)  # (T,) bool: aligned keys, if there are any
        if packed.alignment is not None:
            reused = reused_parents(packed.calls)[packed.num_prefix_calls :]
            for number, (call, flags) in enumerate(zip(self._calls, reused, strict=True)):
                if any(flags):
                    keys = [f for s, f in zip(call.parents, flags, strict=True) for _ in range(s.last - s.first)]
                    self._aligned[number] = torch.tensor([*keys, *[False] * len(call.tokens)], device=device)
        self._shifts = {
            s: s.offset - s.first - packed.calls[s.call].start for parents in self._parents for s in parents
        }
        shifts = sorted(set(self._shifts.values()))
        self._rope_tables: dict[tuple[Rope, int], tuple[Tensor, Tensor]] = {}
        for rope in {spec.rope for spec in specs if spec.rope is not None}:
            cos, sin = (torch.from_numpy(table).to(device) for table in rope.cos_sin(shifts))
            self._rope_tables |= {(rope, shift): (cos[i], sin[i]) for i, shift in enumerate(shifts)}

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        spec = self._specs[layer]
        if self._kv_out is not None:
            self._kv_out[layer] = key, value
        # Tensors are split by call because the gradient of a slice is as large as the tensor it was cut from.
        prefix = [tuple(x.to(key.dtype) for x in kv[layer]) for kv in self._prefix_kv]
        keys = [*(k for k, _ in prefix), *key.split(self._lengths, dim=2)]
        values = [*(v for _, v in prefix), *value.split(self._lengths, dim=2)]
        rotated: dict[TraceSlice, Tensor] = {}  # shared by all calls that attend to a slice at the same position
        outputs = []
        for number, (rows, parents) in enumerate(zip(query.split(self._lengths, dim=2), self._parents, strict=True)):
            for s in parents:
                if s not in rotated:
                    rotated[s] = self._rotate_keys(_take_slice(keys[s.call], s), self._shifts[s], spec.rope)
            own = len(prefix) + number
            call_keys = torch.cat([*(rotated[s] for s in parents), keys[own]], dim=2)
            call_values = torch.cat([*(_take_slice(values[s.call], s) for s in parents), values[own]], dim=2)
            if spec.is_plain and sinks is None and self._aligned[number] is None:
                outputs.append(_attend(rows, call_keys, call_values, scale))
            else:
                distance = self._distance(number)
                aligned, given = self._aligned[number], (rows, call_keys, call_values, scale, distance, spec, sinks)
                outputs.append(_attend_unfused(*given, aligned, self._alignment))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _rotate_keys(self, keys: Float[Tensor, "1 G T D"], shift: int, rope: Rope | None) -> Float[Tensor, "1 G T D"]:
        if rope is None or not shift:
            return keys
        return rotate(keys, *self._rope_tables[rope, shift], rope.interleaved).to(keys.dtype)

    def _distance(self, number: int) -> Int[Tensor, "N T"]:
        """Return the position of each query token minus that of each key."""
        start = self._calls[number].start
        own = list(range(start, start + self._lengths[number]))
        context = [s.offset + k for s in self._parents[number] for k in range(s.last - s.first)]
        positions = torch.tensor(context + own, dtype=torch.long, device=self._device)
        return positions[len(context) :, None] - positions


def _take_slice(tensor: Float[Tensor, "1 G N D"], s: TraceSlice) -> Float[Tensor, "1 G T D"]:
    return tensor if s.last - s.first == tensor.shape[2] else tensor[:, :, s.first : s.last]


def _attend(
    query: Float[Tensor, "1 H N D"], keys: Float[Tensor, "1 G T D"], values: Float[Tensor, "1 G T D"], scale: float
) -> Float[Tensor, "1 H N D"]:
    """Compute the causal attention of the last N of T tokens.

    The query heads of a KV head are rows of one product: on a CPU many times faster than repeating the keys.
    """
    (_, heads, own, width), (_, groups, total, _) = query.shape, keys.shape
    visible = torch.ones(own, total, dtype=torch.bool, device=query.device).tril(total - own)
    rows = query.reshape(1, groups, heads // groups * own, width)
    mask = visible.repeat(heads // groups, 1)
    return functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).reshape(query.shape)


def _attend_unfused(
    query: Float[Tensor, "1 H N D"],
    keys: Float[Tensor, "1 G T D"],
    values: Float[Tensor, "1 G T D"],
    scale: float,
    distance: Int[Tensor, "N T"],
    spec: AttentionSpec,
    sinks: Float[Tensor, "H"] | None,
    aligned: Bool[Tensor, "T"] | None = None,
    alignment: Alignment | None = None,
) -> Float[Tensor, "1 H N D"]:
    """Compute attention with materialized scores: softcap, ALiBi, windows, sinks and aligned keys."""
    share = query.shape[1] // keys.shape[1]
    own, total = distance.shape
    k, v = (x[0].repeat_interleave(share, dim=0) for x in (keys, values))
    with torch.autocast(query.device.type, enabled=False):
        factors: Any = scale
        if aligned is not None and alignment is not None:
            factors = torch.where(aligned, scale / alignment.temperature, scale)
        scores = apply_softcap_alibi(query[0].float() @ k.float().transpose(-1, -2) * factors, distance, spec)
    future = torch.ones(own, total, dtype=torch.bool, device=query.device).triu(total - own + 1)
    scores = scores.masked_fill(future | outside_window(distance, spec), float("-inf"))
    if aligned is not None and alignment is not None:
        scores = shift_aligned(scores, aligned[None], alignment.temperature, math.log(alignment.scale))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, own, 1)], dim=-1)
    return (scores.softmax(-1)[..., :total].to(v.dtype) @ v)[None]


def forward(
    hf_model: HFModel,
    packed: PackedTrace,
    *,
    model: Any = None,
    adapter: str = BASE_MODEL,
    base_kv_provider: Callable[[PackedTrace], list[KVByLayer]] | None = None,
    kv_out: KVByLayer | None = None,
) -> Float[Tensor, "R V"]:
    """Compute the logits that predict the targets, with gradients.

    Call this inside `hf_model.attention_hook()`. Exit the hook after `backward`, which may recompute layers.

    Args:
        model: module to call instead of the model, such as a `PeftModel` around it.
        adapter: served adapter that computes the tokens after the prefix.
        base_kv_provider: computes the keys and values of each prefix call, such as a `BaseKVMemo`.
        kv_out: receives the keys and values of the tokens after the prefix.
    """
    hf_model.ensure_single_process("a packed forward pass")
    info = hf_model.model_info
    if not packed.targets:
        return torch.zeros(0, info.vocab_size, device=info.device)
    prefix_kv: list[KVByLayer] = []
    if packed.num_prefix_calls:
        prefix_kv = (
            compute_kv_per_call(hf_model, packed.prefix)
            if base_kv_provider is None
            else base_kv_provider(packed.prefix)
        )
    context = PackedForwardContext(packed, info.attention_specs, info.device, prefix_kv, kv_out)
    with hf_model.lora_rows([adapter] * len(packed.tokens)):
        return hf_model.logits(packed.tokens, packed.positions, context, packed.logits_indices, model=model)


@torch.no_grad()
def forward_no_grad(
    hf_model: HFModel, packed: PackedTrace, model: str = BASE_MODEL, kv_out: KVByLayer | None = None
) -> Float[Tensor, "R V"]:
    """Compute logits of the base model or a served adapter without gradients."""
    with hf_model.attention_hook():
        return forward(hf_model, packed, adapter=model, kv_out=kv_out)


@torch.no_grad()
def compute_kv(hf_model: HFModel, packed: PackedTrace, prefix_kv: Sequence[KVByLayer] = ()) -> KVByLayer:
    """Compute the base model's keys and values of the own tokens.

    Call it inside `hf_model.attention_hook()`. An adapter in training is disabled meanwhile.
    """
    info, num_tokens = hf_model.model_info, len(packed.tokens)
    if not num_tokens:
        empty = torch.zeros(1, info.kv_heads, 0, info.head_dim, device=info.device)
        return dict.fromkeys(range(len(info.attention_specs)), (empty, empty))
    result: KVByLayer = {}
    context = PackedForwardContext(packed, info.attention_specs, info.device, prefix_kv, result)
    with hf_model.base_weights(), hf_model.lora_rows([BASE_MODEL] * num_tokens):
        hf_model.logits(packed.tokens, packed.positions, context, [num_tokens - 1])
    return result


def compute_kv_per_call(hf_model: HFModel, packed: PackedTrace, prefix_kv: Sequence[KVByLayer] = ()) -> list[KVByLayer]:
    """Return `compute_kv` split by call."""
    lengths = [len(call.tokens) for call in packed.own_calls]
    kv = compute_kv(hf_model, packed, prefix_kv)
    split = {layer: [x.split(lengths, dim=2) for x in tensors] for layer, tensors in kv.items()}
    return [{layer: (keys[n], values[n]) for layer, (keys, values) in split.items()} for n in range(len(lengths))]


class _CallKey(NamedTuple):
    """Identity of a call's keys and values."""

    tokens: tuple[int, ...]
    start: int  # base position
    parents: tuple[TraceSlice, ...]  # with the id of the parent's key as `call`


class BaseKVMemo:
    """Cache of base-model keys and values of calls that traces share.

    Valid while the base weights and compute dtype stay the same. The most frequent calls are cached. Each of them is
    computed separately, so its values do not depend on the order of the traces, bit for bit.

    Args:
        packed_traces: all prefixes that will be requested.
        max_tokens: maximum cached tokens; None: as many as fit into MAX_MEMO_BYTES.
    """

    def __init__(self, hf_model: HFModel, packed_traces: Iterable[PackedTrace], max_tokens: int | None = None) -> None:
        self._hf_model = hf_model
        default = MAX_MEMO_BYTES // hf_model.model_info.kv_bytes_per_token
        self._max_tokens = default if max_tokens is None else max_tokens
        self._num_tokens = 0  # of all entries
        self._ids: dict[_CallKey, int] = {}  # nested keys instead of ids would grow exponentially
        self._entries: dict[int, KVByLayer | None] = {}  # by id; None: not computed yet
        counts = Counter(i for packed in packed_traces for i in dict.fromkeys(self._call_ids(packed)))
        keys = list(self._ids)
        for call_id, count in counts.most_common():
            key = keys[call_id]
            fits = self._num_tokens + len(key.tokens) <= self._max_tokens
            if count > 1 and fits and all(s.call in self._entries for s in key.parents):
                self._entries[call_id] = None
                self._num_tokens += len(key.tokens)

    def __call__(self, packed: PackedTrace) -> list[KVByLayer]:
        """Return keys and values of every call; use it inside `hf_model.attention_hook()`."""
        ids = self._call_ids(packed)
        result: dict[int, KVByLayer] = {}
        for n, call_id in enumerate(ids):
            if call_id not in self._entries:
                continue
            entry = self._entries[call_id]
            if entry is None:
                (computed,) = self._compute(packed, result, [n])
                entry = {layer: (keys.clone(), values.clone()) for layer, (keys, values) in computed.items()}
                self._entries[call_id] = entry
            result[n] = entry
        if new := [n for n in range(len(ids)) if n not in result]:
            result.update(zip(new, self._compute(packed, result, new), strict=True))
        return [result[n] for n in range(len(ids))]

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._num_tokens = 0

    def check(self) -> None:
        """Assert that entries fit, match their calls, and include their parents."""
        keys = list(self._ids)
        assert self._num_tokens == sum(len(keys[i].tokens) for i in self._entries) <= self._max_tokens
        assert all(s.call in self._entries for i in self._entries for s in keys[i].parents)
        for i, entry in self._entries.items():
            assert all(x.shape[2] == len(keys[i].tokens) for kv in (entry or {}).values() for x in kv)

    def _compute(self, packed: PackedTrace, cached: Mapping[int, KVByLayer], new: Sequence[int]) -> list[KVByLayer]:
        calls = reorder_calls(packed.calls, [*cached, *new])
        part = PackedTrace(calls, len(cached), packed.alignment)
        return compute_kv_per_call(self._hf_model, part, list(cached.values()))

    def _call_ids(self, packed: PackedTrace) -> list[int]:
        result: list[int] = []
        for call in packed.calls:
            parents = tuple(s._replace(call=result[s.call]) for s in call.parents)
            key = _CallKey(tuple(call.tokens), call.start, parents)
            result.append(self._ids.setdefault(key, len(self._ids)))
        return result
