"""CUDA graphs of small steps, over input buffers with fixed addresses.

A graph serves all steps with the same number of tokens (after padding) and up to the same amount of
attention work. Slots, work lists and cos/sin tables are copied into its buffers before every replay; the
host is not involved while it runs.
"""

import gc
import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import torch
from jaxtyping import Float
from torch import Tensor

from ...attention import triton_backend as triton
from ...attention.backend import ForwardContext, to_device
from ...attention.metadata import AttentionMetadata, AttentionSpec
from ...attention.triton_partition import TileMetadata, partition
from ..hf_model import HFModel
from ..kernels.few_row_linear import MAX_FEW_ROWS, few_rows_for_tracing, fuse_operators
from ..kernels.fused_projections import FusionGroup, fuse, fused_for_tracing, unfuse
from .model_graph import compile_model, deduplicate, use_forward_context

NUM_SIZE_BUCKETS = 4  # each bucket has four times the capacity of the one before

# Capacities of the smallest bucket.
BASE_WORK_ITEMS = 64
BASE_KV_CHUNKS = 256
BASE_ROW_PARAMS = 1024
BASE_PARTIAL_ROWS = 256
BASE_SHIFTS = 64

MAX_GRAPHS = 40  # further steps run eagerly

MAX_CAPTURE_FAILURES = 3  # failed captures after which no more are tried

Replay = Callable[[], Tensor]  # runs a captured graph and returns its logits, (1, N, V)

CompiledModel = Callable[..., Tensor]

# By model: its graph of few rows and that of more.
_COMPILED_MODELS: WeakKeyDictionary[Any, dict[bool, ReferenceType[CompiledModel]]] = WeakKeyDictionary()


class PinnedBuffer:
    """Pinned host array and the device tensor that it is copied to.

    `host` is (count,) numpy, `device` a (count,) tensor of the same dtype.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._source = torch.zeros(count, dtype=dtype, pin_memory=on_gpu)
        self.host = self._source.numpy()
        self.device = torch.zeros(count, dtype=dtype, device=device)
        self._copy_done: Any = torch.cuda.Event() if on_gpu else None

    def wait(self) -> None:
        """Block until the last copy is done, so `host` can be modified."""
        if self._copy_done is not None:
            self._copy_done.synchronize()

    def flush(self) -> None:
        """Launch the asynchronous copy from `host` to `device`."""
        self.device.copy_(self._source, non_blocking=True)
        if self._copy_done is not None:
            self._copy_done.record()


class StaticMetadata:
    """Static buffers for attention metadata of layers with equal spec and context."""

    def __init__(
        self, spec: AttentionSpec, num_tokens: int, max_tile_rows: int, bucket: int, device: torch.device
    ) -> None:
        factor = 4**bucket
        shapes = {  # int32 arrays of `TileMetadata`
            "work_items": (BASE_WORK_ITEMS * factor, 4),
            "kv_chunks": (BASE_KV_CHUNKS * factor, 4),
            "row_params": (BASE_ROW_PARAMS * factor, 3),
            "rows": (BASE_PARTIAL_ROWS * factor, 2),
            "merge_order": (BASE_PARTIAL_ROWS * factor,),
            "merge_indptr": (num_tokens + 1,),
        }
        half_dim = spec.rope.half_dim if spec.rope is not None else 0
        rope_shape = (2, BASE_SHIFTS * factor, half_dim)
        self._spec = spec
        self._indices = PinnedBuffer(sum(map(prod, shapes.values())), torch.int32, device)
        self._rope_tables = PinnedBuffer(prod(rope_shape), torch.float32, device)
        self._host_rope_tables = self._rope_tables.host.reshape(rope_shape)
        self._host_arrays, device_arrays, start = {}, {}, 0
        for name, shape in shapes.items():
            end = start + prod(shape)
            self._host_arrays[name] = self._indices.host[start:end].reshape(shape)
            device_arrays[name] = self._indices.device[start:end].view(shape)
            start = end
        cos, sin = self._rope_tables.device.view(rope_shape)
        self.device_tiles = triton.DeviceTiles(
            **device_arrays,
            cos=cos,
            sin=sin,
            alibi_slopes=torch.from_numpy(triton.alibi_slopes_array(spec)).to(device),
            max_tile_rows=max_tile_rows,
            single_split=False,
            aligned=None,
        )

    def fill(self, tiles: TileMetadata, metadata: AttentionMetadata) -> None:
        """Copy a step's work items and RoPE tables to the device."""
        self._indices.wait()
        self._host_arrays["work_items"][:] = 0  # an item without rows does nothing
        for name, buffer in self._host_arrays.items():
            array = getattr(tiles, name)
            buffer[: len(array)] = array
        self._indices.flush()
        self._rope_tables.wait()
        for buffer, table in zip(self._host_rope_tables, metadata.rope_tables(self._spec.rope), strict=True):
            buffer[: len(table)] = table
        self._rope_tables.flush()


class StaticForwardContext:
    """Forward context whose inputs are buffers with fixed addresses.

    References to the KV pool's tensors are weak, so a pool replaced by a larger one is freed at once.
    """

    def __init__(self, prepared: "_PreparedStep", static_metadata: list[StaticMetadata], device: torch.device) -> None:
        context = prepared.forward_context
        self._pool_refs = [(ref(keys), ref(values)) for keys, values in zip(context.keys, context.values, strict=True)]
        self._specs, self._metadata_index = context.specs, prepared.metadata_index
        self._static_metadata = static_metadata
        num_tokens = context.metadata.num_tokens
        self._inputs = PinnedBuffer(3 * num_tokens, torch.int64, device)
        self.ids, self.positions, slots = self._inputs.device.view(3, 1, num_tokens)
        self._slots = slots[0]

    def uses_same_pool(self, forward_context: ForwardContext) -> bool:
        return all(keys() is new for (keys, _), new in zip(self._pool_refs, forward_context.keys, strict=True))

    def fill(self, prepared: "_PreparedStep", tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Copy a step's tokens, positions, slots and attention work to the device."""
        self._inputs.wait()
        inputs: tuple[Any, ...] = (tokens, positions, prepared.forward_context.metadata.slots)
        for buffer, numbers in zip(self._inputs.host.reshape(3, -1), inputs, strict=True):
            buffer[:] = 0
            buffer[: len(numbers)] = numbers
        self._inputs.flush()
        work = zip(self._static_metadata, prepared.tiles, prepared.metadata_and_specs, strict=True)
        for static_metadata, tiles, (metadata, _) in work:
            static_metadata.fill(tiles, metadata)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        """Write KV to the pool and attend, as `ForwardContext.attend` does."""
        keys, values = (reference() for reference in self._pool_refs[layer])
        assert keys is not None and values is not None
        tiles = self._static_metadata[self._metadata_index[layer]].device_tiles
        triton.write(self._slots, key[0], value[0], keys, values)
        return triton.run(tiles, query[0], keys, values, scale, self._specs[layer], sinks)[None]


class GraphCapturer:
    """CUDA graph capture into a shared memory pool; replays must not overlap."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side_stream = torch.cuda.Stream()

    def __call__(self, fn: Callable[[], Tensor]) -> Replay:
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            fn()  # compilation and one-time initialization must not be captured
        torch.cuda.current_stream().wait_stream(self._side_stream)
        gc.collect()  # no memory of an old graph may be freed during the capture
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # other threads may copy
                result = fn()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that CUDA aborted leaves its stream current and its pool in use
            self._pool = torch.cuda.graph_pool_handle()
            raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class _PreparedStep(NamedTuple):
    """Step padded to a graph size, with its partitioned attention work."""

    forward_context: ForwardContext
    metadata_and_specs: list[tuple[AttentionMetadata, AttentionSpec]]  # distinct pairs of the layers
    metadata_index: tuple[int, ...]  # of each layer's pair
    tiles: list[TileMetadata]  # of each pair
    bucket: int | None  # None if no graph has capacity for it

    @property
    def graph_key(self) -> tuple[object, ...]:
        return self.forward_context.metadata.num_tokens, self.bucket, self.metadata_index


class CudaGraphForward:
    """`HFModel.forward` through CUDA graphs, for small steps.

    Returns None for a step that must run eagerly: it exceeds the largest size or bucket, waits for KV
    loads layer by layer, has injected hidden states, or could not be captured.
    """

    def __init__(
        self,
        hf_model: HFModel,
        sizes: tuple[int, ...],
        *,
        capturer: Callable[[Callable[[], Tensor]], Replay] | None = None,
        use_compiler: bool = True,
    ) -> None:
        self.sizes = tuple(sorted({max(2, size) for size in sizes}))  # a trace of one token would serve no other size
        self._hf_model, self._capturer = hf_model, capturer or GraphCapturer()
        self._compiled: dict[bool, CompiledModel] = {}  # by whether it serves few rows only
        self._fused_groups: list[FusionGroup] = []
        self._max_few_rows = MAX_FEW_ROWS if supports_few_rows(hf_model) else 0
        if use_compiler:
            self._compiled = {few: _shared_compiled_model(hf_model, few) for few in (False, True)}
            with hf_model.attention_hook():  # no other thread may trace the model
                self._fused_groups = fuse(hf_model.model)
            finalize(self._compiled[False], unfuse, self._fused_groups)
        self._graphs: dict[tuple[object, ...], tuple[StaticForwardContext, Replay]] = {}
        self._failed_keys: set[tuple[object, ...]] = set()
        self.capture_error: str | None = None  # reason of the last failed capture

    def __call__(
        self, tokens: list[int], positions: list[int], forward_context: ForwardContext, logits_indices: list[int]
    ) -> Tensor | None:
        prepared = self.prepare(forward_context)
        if prepared is None or forward_context.layer_waiters:
            return None
        logits = self._replay(prepared, tokens, positions)
        if logits is None and prepared.bucket is not None and self._try_capture(prepared, tokens, positions):
            logits = self._replay(prepared, tokens, positions)
        if logits is None:
            return None
        if logits_indices == list(range(len(logits_indices))):
            return logits[: len(logits_indices)].to(torch.float32, copy=True)  # the next replay overwrites them
        return logits[to_device(logits_indices, torch.long, logits.device)].float()

    def launch(self, tokens: Tensor, positions: list[int], forward_context: ForwardContext) -> Tensor | None:
        """Replay a captured graph with tokens that are on the device.

        Return the float32 logits (N, V) of all tokens, or None if no graph fits.
        """
        prepared = self.prepare(forward_context)
        if prepared is None or forward_context.layer_waiters:
            return None
        logits = self._replay(prepared, [0] * len(positions), positions, tokens)
        return None if logits is None else logits[: len(positions)].to(torch.float32, copy=True)

    def prepare(self, forward_context: ForwardContext) -> _PreparedStep | None:
        """Pad a step and partition its attention work, cached in its metadata.

        Return None for a step with too many tokens, with injected hidden states, hooks or alignments.
        """
        size = next((size for size in self.sizes if size >= forward_context.metadata.num_tokens), None)
        if size is None or forward_context.injected_hidden or forward_context.hooked or forward_context.is_aligned:
            return None
        context, info = forward_context.pad_to(size), self._hf_model.model_info
        index_by_ids: dict[tuple[int, int], int] = {}
        pairs: list[tuple[AttentionMetadata, AttentionSpec]] = []
        metadata_index = []
        for layer, spec in enumerate(context.specs):
            metadata = context.layer_metadata.get(layer, context.metadata)
            index = index_by_ids.setdefault((id(metadata), id(spec)), len(pairs))
            if index == len(pairs):
                pairs.append((metadata, spec))
            metadata_index.append(index)
        tile_rows = triton.tile_rows(info.head_shape, size, info.dtype.itemsize)
        tiles = [partition(metadata, spec, tile_rows, info.kv_heads) for metadata, spec in pairs]
        used = max(len(metadata.shifts) / BASE_SHIFTS for metadata, _ in pairs)  # share of the smallest bucket
        for tile in tiles:
            used = max(
                used,
                len(tile.work_items) / BASE_WORK_ITEMS,
                len(tile.kv_chunks) / BASE_KV_CHUNKS,
                len(tile.row_params) / BASE_ROW_PARAMS,
                len(tile.rows) / BASE_PARTIAL_ROWS,
            )
        bucket = next((bucket for bucket in range(NUM_SIZE_BUCKETS) if used <= 4**bucket), None)
        return _PreparedStep(context, pairs, tuple(metadata_index), tiles, bucket)

    def _replay(
        self, prepared: _PreparedStep, tokens: list[int], positions: list[int], device_tokens: Tensor | None = None
    ) -> Tensor | None:
        """Replay the CUDA graph that was captured for steps of this shape.

        Args:
            device_tokens: (n,) token ids on the device, used in place of `tokens`.

        Returns:
            Logits (N, V) of the N padded tokens, overwritten by the next replay. None if no graph was
            captured for `prepared.graph_key`, or if the KV pool was replaced after the capture.
        """
        static_context, replay = self._graphs.get(prepared.graph_key, (None, None))
        if static_context is None or replay is None or not static_context.uses_same_pool(prepared.forward_context):
            return None
        static_context.fill(prepared, tokens, positions)
        if device_tokens is not None:
            static_context.ids[0, : len(positions)] = device_tokens
        return replay()[0]

    def _try_capture(self, prepared: _PreparedStep, tokens: list[int], positions: list[int]) -> bool:
        """Capture the graph of a step; return True on success."""
        key = prepared.graph_key
        old = self._graphs.get(key)  # keeps the memory pool in use until another graph does
        if old is not None:
            self._graphs.clear()  # the KV pool was replaced
        if (
            len(self._graphs) == MAX_GRAPHS
            or key in self._failed_keys
            or len(self._failed_keys) == MAX_CAPTURE_FAILURES
        ):
            return False
        try:
            self._graphs[key] = self._capture(prepared, tokens, positions)
        except Exception as exc:  # of torch, its compiler or Triton; eager steps still work
            self._failed_keys.add(key)
            self.capture_error = str(exc.__context__ or exc)[:300]  # the cause, not the end of the capture
            warnings.warn(
                f"{self._hf_model.model_info.name}: steps of {prepared.forward_context.metadata.num_tokens} rows are "
                f"not recorded and run eagerly: {self.capture_error}",
                stacklevel=2,
            )
        return key in self._graphs

    def _capture(
        self, prepared: _PreparedStep, tokens: list[int], positions: list[int]
    ) -> tuple[StaticForwardContext, Replay]:
        info, num_tokens = self._hf_model.model_info, prepared.forward_context.metadata.num_tokens
        tile_rows = triton.tile_rows(info.head_shape, num_tokens, info.dtype.itemsize)
        assert prepared.bucket is not None
        static_metadata = [
            StaticMetadata(spec, num_tokens, tile_rows, prepared.bucket, info.device)
            for _, spec in prepared.metadata_and_specs
        ]
        context = StaticForwardContext(prepared, static_metadata, info.device)

        is_few = num_tokens <= self._max_few_rows

        def run() -> Tensor:
            if self._compiled:
                with use_forward_context(context):
                    return self._compiled[is_few](context.ids, context.positions)
            logits: Tensor = self._hf_model.model(
                input_ids=context.ids, position_ids=context.positions, use_cache=False, step=context
            ).logits
            return logits

        context.fill(prepared, tokens, positions)  # the warm-up and the capture compute this step
        traces_few_rows = is_few and bool(self._compiled)
        groups = self._fused_groups
        changes = few_rows_for_tracing(self._hf_model.model, groups) if traces_few_rows else fused_for_tracing(groups)
        with changes:
            return context, self._capturer(run)


def supports_few_rows(hf_model: HFModel) -> bool:
    """Whether steps of few rows have a graph of their own."""
    return hf_model.model_info.device.type == "cuda" and hf_model.model_info.dtype.itemsize == 2


def _shared_compiled_model(hf_model: HFModel, few_rows: bool) -> CompiledModel:
    """Return a compiled model, shared and cached while any engine uses it."""
    by_rows = _COMPILED_MODELS.setdefault(hf_model.model, {})
    reference = by_rows.get(few_rows)
    compiled = reference() if reference is not None else None
    if compiled is None:
        name, change = ("forward_few", fuse_operators) if few_rows else ("forward_graphed", deduplicate)
        compiled = compile_model(hf_model.model, name, change)
        by_rows[few_rows] = ref(compiled)
    assert compiled is not None
    return compiled
