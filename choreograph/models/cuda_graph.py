"""Steps whose memory stays where it is, so that a graph of kernels can be recorded once and played for every step.

A `Fixed` step stands in for steps of one number of rows, of works up to one size. What differs from step to step
(slots, work, turns) is sent into its tensors before the graph is played; the host is asked nothing while it plays.
"""

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import numpy as np
import torch
import torch._dynamo
from jaxtyping import Float
from torch import Tensor

from ..attention import triton_backend as triton
from ..attention.backend import ForwardContext, to_device
from ..attention.metadata import AttentionMetadata, AttentionSpec
from ..attention.triton_partition import TileMetadata, partition
from .fused_projections import DedupMatmulPass, FusionGroup, fuse, fused_for_tracing, unfuse
from .hf_model import HFModel
from .torch_compile import OpaqueContext, compile_model

NUM_SIZE_BUCKETS = 4  # of works that graphs are made for; each has room for four times as much as the one before

BASE_WORK_ITEMS, BASE_KV_CHUNKS, BASE_ROW_PARAMS, BASE_PARTIAL_ROWS, BASE_SHIFTS = (
    64,
    256,
    1024,
    256,
    64,
)  # of the smallest


def size_bucket(tiles: Sequence[TileMetadata], metadata_list: Sequence[AttentionMetadata]) -> int | None:
    """The smallest size with room for all of these; None where no graph is made for so much."""
    most = max(len(metadata.shifts) / BASE_SHIFTS for metadata in metadata_list)
    for one in tiles:
        shares = (
            len(one.work_items) / BASE_WORK_ITEMS,
            len(one.kv_chunks) / BASE_KV_CHUNKS,
            len(one.row_params) / BASE_ROW_PARAMS,
            len(one.rows) / BASE_PARTIAL_ROWS,
        )
        most = max(most, *shares)
    return next((size for size in range(NUM_SIZE_BUCKETS) if most <= 4**size), None)


class PinnedBuffer:
    """Pinned host array that is repeatedly copied into one device tensor.

    `host` is (count,) numpy, `device` a (count,) tensor of the same dtype.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._source = torch.zeros(count, dtype=dtype, pin_memory=on_gpu)
        self.host = self._source.numpy()
        self.device = torch.zeros(count, dtype=dtype, device=device)
        self._copy_done: Any = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Wait until the last copy has read the host array, so that it can be modified."""
        if self._copy_done is not None:
            self._copy_done.synchronize()

    def flush(self) -> None:
        """Launch the copy from `host` to `device`."""
        self.device.copy_(self._source, non_blocking=True)
        if self._copy_done is not None:
            self._copy_done.record()


class StaticMetadata:
    """The work of all layers of a kind that see alike, at addresses that stay."""

    def __init__(
        self, spec: AttentionSpec, num_tokens: int, max_tile_rows: int, size: int, device: torch.device
    ) -> None:
        room = 4**size
        counts = {
            "work_items": (BASE_WORK_ITEMS * room, 4),
            "kv_chunks": (BASE_KV_CHUNKS * room, 4),
            "row_params": (BASE_ROW_PARAMS * room, 3),
            "rows": (BASE_PARTIAL_ROWS * room, 2),
            "merge_order": (BASE_PARTIAL_ROWS * room,),
            "merge_indptr": (num_tokens + 1,),
        }
        half = spec.rope.half_dim if spec.rope is not None else 0
        self._indices = PinnedBuffer(sum(int(np.prod(shape)) for shape in counts.values()), torch.int32, device)
        self._rope_buffer = PinnedBuffer(2 * BASE_SHIFTS * room * half, torch.float32, device)
        self._spec, self._host_arrays, views, at = spec, {}, [], 0
        for name, shape in counts.items():
            size = int(np.prod(shape))
            self._host_arrays[name] = self._indices.host[at : at + size].reshape(shape)
            views.append(self._indices.device[at : at + size].view(shape))
            at += size
        cos, sin = self._rope_buffer.device.view(2, BASE_SHIFTS * room, half)
        self._host_rope_tables = self._rope_buffer.host.reshape(2, BASE_SHIFTS * room, half)
        slopes = torch.from_numpy(triton.alibi_slopes_array(spec)).to(device)
        items, pieces, reads, rows_, order, starts = views
        self.device_tiles = triton.DeviceTiles(
            items, pieces, reads, rows_, order, starts, cos, sin, slopes, max_tile_rows, single_split=False
        )

    def fill(self, tiles: TileMetadata, metadata: AttentionMetadata) -> None:
        self._indices.wait()
        self._host_arrays["work_items"][:] = 0  # an item of no rows does nothing
        for name, part in self._host_arrays.items():
            given = getattr(tiles, name)
            part[: len(given)] = given
        self._indices.flush()
        turns = metadata.rope_tables(self._spec.rope)
        self._rope_buffer.wait()
        for table, given in zip(self._host_rope_tables, turns, strict=True):
            table[: len(given)] = given
        self._rope_buffer.flush()


class StaticForwardContext:
    """Travels through a model in a step's place. which: of every layer, its board. It does not keep the arena's
    tensors: one that gives way to a larger one has to go at once."""

    def __init__(
        self,
        template: ForwardContext,
        num_tokens: int,
        static_metadata: Sequence[StaticMetadata],
        metadata_index: Sequence[int],
        device: torch.device,
    ):
        self._pool_refs = [
            (ref(keys), ref(values)) for keys, values in zip(template.keys, template.values, strict=True)
        ]
        self._specs, self.static_metadata, self._metadata_index = template.specs, static_metadata, metadata_index
        self._inputs = PinnedBuffer(3 * num_tokens, torch.int64, device)
        ids, positions, self._slots = self._inputs.device.view(3, num_tokens)
        self.ids, self.positions = ids[None], positions[None]

    def uses_same_pool(self, forward_context: ForwardContext) -> bool:
        """Whether a step's keys lie where this one's do."""
        return all(keys() is new for (keys, _), new in zip(self._pool_refs, forward_context.keys, strict=True))

    def fill(self, tokens: Sequence[int], positions: Sequence[int], metadata: AttentionMetadata) -> None:
        self._inputs.wait()
        sides: tuple[Any, ...] = (tokens, positions, metadata.slots)
        for row, given in zip(self._inputs.host.reshape(3, -1), sides, strict=True):
            row[:] = 0
            row[: len(given)] = given
        self._inputs.flush()

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        (keys, values), work = (
            (there() for there in self._pool_refs[layer]),
            self.static_metadata[self._metadata_index[layer]].device_tiles,
        )
        assert keys is not None and values is not None
        triton.write(self._slots, key[0], value[0], keys, values)
        return triton.run(work, query[0], keys, values, scale, self._specs[layer], sinks)[None]


def group_layers_by_metadata(
    forward_context: ForwardContext,
) -> tuple[list[tuple[AttentionMetadata, AttentionSpec]], tuple[int, ...]]:
    """The plans and kinds that the layers of a step have, and which of them each layer has."""
    known: dict[tuple[int, int], int] = {}
    pairs: list[tuple[AttentionMetadata, AttentionSpec]] = []
    which = []
    for layer, kind in enumerate(forward_context.specs):
        metadata = forward_context.layer_metadata.get(layer, forward_context.metadata)
        place = known.setdefault((id(metadata), id(kind)), len(known))
        if place == len(pairs):
            pairs.append((metadata, kind))
        which.append(place)
    return pairs, tuple(which)


MAX_GRAPHS = 40  # graphs that are kept; further steps run eagerly

MAX_CAPTURE_FAILURES = 3  # recordings that may fail before no more is tried

_COMPILED_MODELS: WeakKeyDictionary[Any, ReferenceType[Callable[..., Tensor]]] = WeakKeyDictionary()


class CapturedGraph(Protocol):
    """Work that was recorded, and gives its result again whenever it is called."""

    def __call__(self) -> Tensor: ...


class GraphCapturer:
    """Records work as CUDA graphs that share the memory of their intermediate results: one plays at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side_stream = torch.cuda.Stream()

    def __call__(self, fn: Callable[[], Tensor]) -> CapturedGraph:
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            fn()  # what is compiled or made once must not be recorded
        torch.cuda.current_stream().wait_stream(self._side_stream)
        gc.collect()  # nothing of an old graph may be freed in the middle
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # copies go on beside
                result = fn()
        except BaseException:
            torch.cuda.set_stream(here)  # a capture that CUDA itself ended leaves its own behind, and its pool taken
            self._pool = torch.cuda.graph_pool_handle()
            raise

        def play() -> Tensor:
            graph.replay()
            return result

        return play


class _PreparedStep(NamedTuple):
    """A step worked out for its graph. size: None where no graph is made for so much work."""

    forward_context: ForwardContext
    metadata_and_specs: list[tuple[AttentionMetadata, AttentionSpec]]
    metadata_index: tuple[int, ...]
    tiles: list[TileMetadata]
    size: int | None


class _Graph(NamedTuple):
    static_context: StaticForwardContext
    replay: CapturedGraph

    def fill(self, prepared: _PreparedStep, tokens: list[int], positions: list[int]) -> None:
        self.static_context.fill(tokens, positions, prepared.forward_context.metadata)
        for board, made, (metadata, _) in zip(
            self.static_context.static_metadata, prepared.tiles, prepared.metadata_and_specs, strict=True
        ):
            board.fill(made, metadata)


class CudaGraphForward:
    """`adapter.forward` for steps of up to the largest bucket; None for others, which run eagerly: those that wait for
    loads layer by layer, and those of more work than a graph has room for."""

    def __init__(
        self,
        hf_model: HFModel,
        sizes: tuple[int, ...],
        *,
        capturer: Callable[[Callable[[], Tensor]], CapturedGraph] | None = None,
        use_compiler: bool = True,
    ) -> None:
        self.sizes = tuple(sorted({max(2, size) for size in sizes}))  # what is traced of one row serves no others
        self._hf_model, self._capturer = hf_model, capturer or GraphCapturer()
        self._compiled: Callable[..., Tensor] | None = None
        self._fused_groups: list[FusionGroup] = []
        if use_compiler:
            self._compiled = _shared_compiled_model(hf_model)
            with hf_model.attention_hook():  # nobody traces the model meanwhile
                self._fused_groups = fuse(hf_model.model)
            finalize(self._compiled, unfuse, self._fused_groups)
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._failed_keys: set[tuple[object, ...]] = set()
        self.capture_error: str | None = None  # why the last recording failed

    def __call__(
        self, tokens: list[int], positions: list[int], forward_context: ForwardContext, logits_indices: list[int]
    ) -> Tensor | None:
        laid = self.prepare(forward_context)
        if laid is None or laid.size is None or forward_context.layer_waiters:
            return None
        graph = self._lookup(laid) or self._get_or_capture(laid, tokens, positions)
        if graph is None:
            return None
        graph.fill(laid, tokens, positions)
        logits = graph.replay()[0]
        if logits_indices == list(range(len(logits_indices))):
            return logits[: len(logits_indices)].to(torch.float32, copy=True)  # the next graph writes here
        return logits[to_device(logits_indices, torch.long, logits.device)].float()

    def launch(self, tokens: Tensor, positions: list[int], forward_context: ForwardContext) -> Tensor | None:
        """All rows of a step whose graph is there, with tokens of the device."""
        laid = self.prepare(forward_context)
        graph = None if laid is None or forward_context.layer_waiters else self._lookup(laid)
        if laid is None or graph is None:
            return None
        graph.fill(laid, [0] * len(positions), positions)
        graph.static_context.ids[0, : len(positions)] = tokens
        return graph.replay()[0, : len(positions)].to(torch.float32, copy=True)

    def prepare(self, forward_context: ForwardContext) -> _PreparedStep | None:
        """Works a step out, once; None for one of too many rows."""
        count = next((size for size in self.sizes if size >= forward_context.metadata.num_tokens), None)
        if count is None or forward_context.injected_hidden:
            return None
        model_info = self._hf_model.model_info
        forward_context = forward_context.pad_to(count)
        pairs, which = group_layers_by_metadata(forward_context)
        tile = triton.tile_rows(model_info.head_shape, count, model_info.dtype.itemsize)
        made = [partition(metadata, kind, tile, model_info.kv_heads) for metadata, kind in pairs]
        return _PreparedStep(
            forward_context, pairs, which, made, size_bucket(made, [metadata for metadata, _ in pairs])
        )

    def _lookup(self, prepared: _PreparedStep) -> _Graph | None:
        """The graph for a step, where there is one over the arena as it lies now."""
        known = self._graphs.get(_graph_key(prepared))
        return known if known is not None and known.static_context.uses_same_pool(prepared.forward_context) else None

    def _get_or_capture(self, prepared: _PreparedStep, tokens: list[int], positions: list[int]) -> _Graph | None:
        """A graph for a step, recorded; None where that cannot be done."""
        key = _graph_key(prepared)
        old = self._graphs.get(key)
        if old is not None:
            self._graphs.clear()  # the arena has moved; `old` keeps the pool in use until another graph does
        if (
            len(self._graphs) == MAX_GRAPHS
            or key in self._failed_keys
            or len(self._failed_keys) == MAX_CAPTURE_FAILURES
        ):
            return None
        try:
            self._graphs[key] = self._capture(prepared, tokens, positions)
        except Exception as exc:  # torch, its compiler and Triton have errors of many kinds; eager steps stay right
            self._failed_keys.add(key)
            self.capture_error = str(exc.__context__ or exc)[:300]  # what ended the recording, not its ending
            name, rows = self._hf_model.model_info.name, prepared.forward_context.metadata.num_tokens
            warnings.warn(
                f"{name}: steps of {rows} rows are not recorded and run eagerly: {self.capture_error}", stacklevel=2
            )
        return self._graphs.get(key)

    def _capture(self, prepared: _PreparedStep, tokens: list[int], positions: list[int]) -> _Graph:
        rows, size, device = (
            prepared.forward_context.metadata.num_tokens,
            prepared.size,
            self._hf_model.model_info.device,
        )
        assert size is not None
        model_info = self._hf_model.model_info
        tile = triton.tile_rows(model_info.head_shape, rows, model_info.dtype.itemsize)
        boards = [StaticMetadata(kind, rows, tile, size, device) for _, kind in prepared.metadata_and_specs]
        fixed = StaticForwardContext(prepared.forward_context, rows, boards, prepared.metadata_index, device)

        def work() -> Tensor:
            if self._compiled is not None:
                result: Tensor = self._compiled(fixed.ids, fixed.positions, OpaqueContext(fixed))
                return result
            return self._run_eager(fixed)

        graph = _Graph(fixed, lambda: torch.empty(0))
        graph.fill(prepared, tokens, positions)  # what is computed while it is recorded is this step
        with fused_for_tracing(self._fused_groups):
            return graph._replace(replay=self._capturer(work))

    def _run_eager(self, static_context: StaticForwardContext) -> Tensor:
        result: Tensor = self._hf_model.model(
            input_ids=static_context.ids, position_ids=static_context.positions, use_cache=False, step=static_context
        ).logits
        return result


def _graph_key(prepared: _PreparedStep) -> tuple[object, ...]:
    return prepared.forward_context.metadata.num_tokens, prepared.size, prepared.metadata_index


def _shared_compiled_model(hf_model: HFModel) -> Callable[..., Tensor]:
    """Engines over one model share what is traced of it, while any of them lives: all else is read from the step."""
    known = _COMPILED_MODELS.get(hf_model.model)
    result = known() if known is not None else None
    if result is None:
        result = cast(
            Callable[..., Tensor],
            compile_model(hf_model, "forward_graphed", dynamic=True, graph_pass=DedupMatmulPass()),
        )
        _COMPILED_MODELS[hf_model.model] = ref(result)
    return result
