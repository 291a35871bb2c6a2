"""Reads pages of vLLM's KV cache, and rotates keys."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float

_BASE = 128  # digits that every floating-point format of a cache holds exactly


class UnsupportedCacheError(ValueError):
    """KV cache that cannot be read, or keys that cannot be rotated."""


class Rotary:
    """Rotation of keys by a number of positions.

    Args:
        inv_freq: angle of each pair of dimensions for one position, in radians.
        is_neox: a pair is (i, i + half), not (2 i, 2 i + 1).
    """

    def __init__(self, inv_freq: Float[torch.Tensor, " half"], *, is_neox: bool) -> None:
        self._inv_freq, half = inv_freq.double().cpu(), len(inv_freq)
        neox, interleaved = (slice(half), slice(half, 2 * half)), (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        self._pairs = neox if is_neox else interleaved  # dimensions that are rotated with each other

    @classmethod
    def of_vllm(cls) -> "Rotary":
        """Return the rotation of the model that this process has loaded.

        Raises:
            UnsupportedCacheError: if there is none, or several, or one that is not a fixed rotation.
        """
        from vllm.model_executor.layers import rotary_embedding

        embeddings = list({id(rope): rope for rope in rotary_embedding._ROPE_DICT.values()}.values())
        if len(embeddings) != 1:
            raise UnsupportedCacheError(
                f"the model has {len(embeddings)} rotary embeddings: messages can be moved where all layers share one "
                "(none: learned positions or ALiBi)"
            )
        return cls.of_embedding(embeddings[0])

    @classmethod
    def of_embedding(cls, rope: Any) -> "Rotary":
        """Return the rotation of a rotary embedding, checked against its table."""
        kind = type(rope).__name__
        is_neox = getattr(rope, "is_neox_style", True)
        if kind in ("RotaryEmbedding", "Llama3RotaryEmbedding"):
            inv_freq, table = rope._compute_inv_freq(rope.base), rope._compute_cos_sin_cache()
        elif kind == "YaRNScalingRotaryEmbedding":
            inv_freq, table = rope._compute_inv_freq(rope.scaling_factor), rope._compute_cos_sin_cache()
        elif kind == "Phi3LongRoPEScaledRotaryEmbedding":
            factors = rope.long_factor if rope.use_long_rope else rope.short_factor
            inv_freq = rope._compute_inv_freq(factors)
            table = rope._compute_cos_sin_cache(64, factors, 1.0)
        else:
            raise UnsupportedCacheError(f"rotary embedding {kind}: not among those whose rotation is known")
        half = inv_freq.shape[-1]
        inv_freq = inv_freq.double().cpu()
        cos, sin = table[:64].double().cpu().tensor_split([half], dim=-1)
        angles = torch.arange(len(cos), dtype=torch.float64)[:, None] * inv_freq
        scale = torch.hypot(cos, sin)  # of attention, the same for queries and keys at all positions
        error = torch.hypot(cos - scale * angles.cos(), sin - scale * angles.sin()).max()
        if table.shape[-1] != 2 * half or error > 1e-3 or (scale - scale[0, 0]).abs().max() > 1e-3:
            raise UnsupportedCacheError(f"rotary embedding {kind}: its table is not a rotation by its frequencies")
        return cls(inv_freq, is_neox=is_neox)

    def tables(
        self, shifts: Sequence[int], device: torch.device
    ) -> tuple[Float[torch.Tensor, "T 1 half"], Float[torch.Tensor, "T 1 half"]] | None:
        """Return cosines and sines of shifts; None if all are 0."""
        if not any(shifts):
            return None
        angles = torch.tensor(shifts, dtype=torch.float64)[:, None, None] * self._inv_freq
        return angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)

    def rotate(
        self, keys: Float[torch.Tensor, "T G D"], tables: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Float[torch.Tensor, "T G D"]:
        """Return keys rotated by tables, computed in float32."""
        if tables is None:
            return keys
        cos, sin = tables
        half = len(self._inv_freq)
        source = keys.float()
        result = source.clone() if 2 * half < keys.shape[-1] else torch.empty_like(source)
        first, second = (source[..., place] for place in self._pairs)
        torch.mul(first, cos, out=result[..., self._pairs[0]]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=result[..., self._pairs[1]]).addcmul_(first, sin)
        return result.to(keys.dtype)


class PageRange(NamedTuple):
    """Consecutive tokens of a request in the pages of every layer."""

    ids: torch.Tensor  # pages
    skip: int  # tokens in the first page before the first one
    length: int


class PageReader:
    """Reads keys and values out of pages, whose layout is measured.

    Backends pack keys differently. What their writer does with numbers that name their own place gives the layout.

    Args:
        layer: attention layer of vLLM.
        cache: its pages.
    """

    def __init__(self, layer: Any, cache: torch.Tensor, block_size: int) -> None:
        self._block_size = block_size
        self._num_heads, self._head_size = layer.num_kv_heads, layer.head_size
        self._places = [self._measure(layer, cache, is_key) for is_key in (True, False)]
        self._strides = [self._as_strides(places) for places in self._places]

    def _measure(self, layer: Any, cache: torch.Tensor, is_key: bool) -> torch.Tensor:
        """Return the place in a block's memory of each (token, head, dimension)."""
        shape = (self._block_size, self._num_heads, self._head_size)
        names = torch.arange(1, self._block_size * self._num_heads * self._head_size + 1, device=cache.device)
        slots = torch.arange(self._block_size, device=cache.device)
        zeros = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        found = torch.zeros(cache.stride(0), dtype=torch.int64, device=cache.device)
        weight = 1
        while weight <= len(names):  # digit by digit: the dtype of a cache holds few whole numbers
            digits = ((names // weight) % _BASE).to(cache.dtype).view(shape)
            block = torch.zeros(cache.stride(0), dtype=cache.dtype, device=cache.device)
            page = block.as_strided((1, *cache.shape[1:]), cache.stride())
            layer.impl.do_kv_cache_update(layer, *((digits, zeros) if is_key else (zeros, digits)), page, slots)
            found += block.long() * weight
            weight *= _BASE
        places = found.nonzero().flatten()
        places = places[found[places].argsort()]
        if not torch.equal(found[places], names):
            raise UnsupportedCacheError("the pages of this attention backend do not hold keys and values one by one")
        return places

    def _as_strides(self, places: torch.Tensor) -> tuple[int, tuple[int, int, int]] | None:
        """Return offset and strides of a layout; None without strides."""
        grid = places.view(self._block_size, self._num_heads, self._head_size).cpu()
        offset = int(grid.flatten()[0])

        def step(axis: int) -> int:
            return int(grid.select(axis, 1).flatten()[0]) - offset if grid.shape[axis] > 1 else 0

        steps = step(0), step(1), step(2)
        token, head, dim = (torch.arange(n) for n in grid.shape)
        strided = offset + steps[0] * token[:, None, None] + steps[1] * head[:, None] + steps[2] * dim
        return (offset, steps) if torch.equal(grid, strided) else None

    def locate(self, block_ids: Sequence[int], start: int, stop: int, device: torch.device) -> "PageRange":
        """Return where tokens [start, stop) of a request are.

        Args:
            block_ids: pages of all tokens of the request.
        """
        first = start // self._block_size
        ids = torch.tensor(block_ids[first : -(-stop // self._block_size)]).to(device, non_blocking=True)
        return PageRange(ids, start - first * self._block_size, stop - start)

    def read(
        self, cache: torch.Tensor, pages: "PageRange"
    ) -> tuple[Float[torch.Tensor, "T G D"], Float[torch.Tensor, "T G D"]]:
        """Return keys and values of tokens in one layer."""
        keys, values = (self._gather(cache, pages.ids, kind)[pages.skip : pages.skip + pages.length] for kind in (0, 1))
        return keys, values

    def _gather(self, cache: torch.Tensor, ids: torch.Tensor, kind: int) -> torch.Tensor:
        shape = (-1, self._num_heads, self._head_size)
        if (layout := self._strides[kind]) is not None:
            offset, strides = layout
            size = (cache.shape[0], self._block_size, self._num_heads, self._head_size)
            pages = cache.as_strided(size, (cache.stride(0), *strides), cache.storage_offset() + offset)
            return pages[ids].reshape(shape)
        flat = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
        return flat[ids][:, self._places[kind]].reshape(shape)


def slots_of(block_ids: Sequence[int], block_size: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the slots of token ranges of a request."""
    tokens = torch.cat([torch.arange(start, stop) for start, stop in ranges])
    return torch.tensor(block_ids)[tokens // block_size] * block_size + tokens % block_size
