"""Batches through `torch.compile`: graphs of one size, and of any.

The model is unchanged: the graph is what transformers' own forward traces to. In bfloat16 on processors with AVX2,
linear layers read weights that `packed_linear` packed, and graphs are kept on disk (`graph_cache`); elsewhere
weights are folded in and prepacked (inductor freezing), and every process compiles its graphs. Where a graph has one
size, smaller batches are padded; padding tokens write to the null page and read nothing. Attention is one opaque
operator. It gets its forward context from a context variable, so graphs have only tensors as inputs.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...attention.backend import ForwardContext
from ...attention.cpp_backend import BackendUnavailableError, cpu_flags, cpu_limits
from ..hf_model import HFModel
from ..kernels.int4_linear import Int4Linear
from ..kernels.packed_linear import load_kernel, pack_model, packed_for_tracing
from .graph_cache import LoadedGraph, graph_file
from .graph_passes import deduplication_pass, forwards_for_tracing, fuse_packed, is_silu, silu_forward

_log = logging.getLogger("choreograph")

# Freezing folds and prepacks the weights; concatenation fuses projections that share an input. Both are
# read while tracing: as options of torch.compile they would come too late.
INDUCTOR_OPTIONS = {"freezing": True, "cpp.enable_concat_linear": True}

# Inductor decides by the sizes at tracing whether a loop runs in threads: one graph serves steps of few tokens and
# another one prefills. Only with packed weights; frozen graphs would hold another copy of them.
MAX_FEW_TOKENS = 32

_FORWARD_CONTEXT: ContextVar[Any] = ContextVar("forward_context")  # of the graph that runs in this thread

_library = torch.library.Library("choreograph", "DEF")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, float scale, Tensor? sinks) -> Tensor")


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, sinks: Tensor | None) -> Tensor:
    result: Tensor = _FORWARD_CONTEXT.get().attend(layer, query, key, value, scale, sinks)
    return result


def _attend_shape(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, sinks: Tensor | None) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


_library.impl("attend", _attend, "CPU")
_library.impl("attend", _attend, "CUDA")
torch.library.register_fake("choreograph::attend", _attend_shape, lib=_library)


def compile_cache() -> AbstractContextManager[None]:
    """Key inductor's own cache by the limits of instructions inside the block.

    Its keys leave them out: code for AVX-512 would be loaded under ATEN_CPU_CAPABILITY=avx2, and its results are wrong.
    """
    config: Any = torch.compiler.config
    result: AbstractContextManager[None] = config.patch(cache_key_tag=f"{config.cache_key_tag} {cpu_limits()}".strip())
    return result


@contextmanager
def use_forward_context(forward_context: Any) -> Iterator[None]:
    """Let compiled graphs attend through `forward_context` inside the block."""
    token = _FORWARD_CONTEXT.set(forward_context)
    try:
        yield
    finally:
        _FORWARD_CONTEXT.reset(token)


class _TokenMixer:
    """Replacement for attention in which each token reads only itself."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        mixed = query + key.mean((1, 3), keepdim=True) + value.mean((1, 3), keepdim=True)
        return mixed.transpose(1, 2).contiguous()


class CompiledForward:
    """Compiled `HFModel.forward`; returns None for batches without a graph."""

    def __init__(
        self, hf_model: HFModel, sizes: tuple[int, ...] | None = None, *, compiles_larger: bool = False
    ) -> None:
        """Choose how steps are compiled; graphs are traced on first use.

        Args:
            sizes: batch sizes in tokens with a graph of their own, ascending; None chooses them.
            compiles_larger: whether larger batches have a graph too.
        """
        self._hf_model = hf_model
        self._packed_layers = _packed_layers(hf_model.model)
        # with AMX, oneDNN multiplies more rows faster than the kernel of packed weights
        is_quantized = any(isinstance(layer, Int4Linear) for layer in self._packed_layers)
        self._max_packed_tokens = 8 if "amx_bf16" in cpu_flags() and not is_quantized else None  # None: no limit
        # without packed weights, oneDNN's products are chosen for each size
        self.sizes = sizes or ((1,) if self._is_packed(None) else (1, 2, 4, 8, 16))
        larger = (self.sizes[-1] + 1, MAX_FEW_TOKENS + 1) if compiles_larger else ()
        self.warm_up_sizes = tuple(sorted({*self.sizes, *larger}))  # steps of these sizes trace every graph
        self._compiles_larger = compiles_larger
        self._graphs: dict[int | str | None, Any] = {}  # by size; "few" tokens; None: more
        self._stores_graphs = True  # False after a graph could not be stored
        self._tracing_options: Callable[[], AbstractContextManager[Any]] = nullcontext
        try:
            from torch._inductor import config

            self._tracing_options = partial(config.patch, INDUCTOR_OPTIONS)
        except ImportError:  # a private module: without it graphs are slower
            pass

    def __call__(
        self, tokens: list[int], positions: list[int], forward_context: ForwardContext, logits_indices: list[int]
    ) -> Tensor | None:
        size = next((size for size in self.sizes if size >= len(tokens)), None)
        if size is None and not self._compiles_larger:
            return None
        packs = self._is_packed(size)
        key = "few" if size is None and packs and len(tokens) <= MAX_FEW_TOKENS else size
        graph = self._graphs.get(key)
        file = None
        if graph is None and packs and self._stores_graphs:
            file = graph_file(self._hf_model.model, f"forward_{key}")
            graph = file.load() if file is not None else None
        is_traced = graph is not None
        device = self._hf_model.model_info.device
        if size is None:
            # dynamo fixes sizes of 0 and 1, and takes equal sizes as one: they must differ while it traces
            needed = logits_indices or [0]
            rows = needed + needed[:1] * (1 + (not is_traced and len(needed) + 1 == len(tokens)))
            inputs = [torch.tensor(numbers, device=device) for numbers in ([tokens], [positions], rows)]
        else:
            padding = [0] * (size - len(tokens))
            inputs = [torch.tensor([numbers + padding], device=device) for numbers in (tokens, positions)]
        if graph is None:
            name = f"forward_{key}"
            graph_pass = deduplication_pass(fuse_packed, graph_name=name) if packs else None
            backend: str | Callable[..., Any] = "inductor" if file is None else file.compile
            # Only what is marked below varies. By default, dynamo also takes numbers of the model as inputs of the graph
            # if they differ from those of another model that was traced under this name.
            graph = compile_model(self._hf_model, name, dynamic=False, graph_pass=graph_pass, backend=backend)
            if size is None:
                for tensor, dim in zip(inputs, (1, 1, 0), strict=True):
                    torch._dynamo.mark_dynamic(tensor, dim)
        context = forward_context if size is None else forward_context.pad_to(size)
        try:
            with use_forward_context(context), nullcontext() if is_traced else self._tracing(packs):
                logits: Tensor = graph(*inputs)[0]
        except Exception as exc:
            if file is not None and file.error is not None:  # an error of the step itself is no reason
                self._stop_storing(file.error)
                return self(tokens, positions, forward_context, logits_indices)
            if is_traced or size is not None:
                raise
            # some models trace with fixed sizes only; an error of the step itself is raised by the eager step again
            warnings.warn(f"steps of more than {self.sizes[-1]} tokens stay eager: {str(exc)[:300]}", stacklevel=2)
            self._compiles_larger = False
            return None
        if file is not None and not is_traced:
            try:
                graph = file.save(partial(self._check, graph, key))
            except Exception as exc:  # the graph may be wrong at other sizes, too
                self._stop_storing(exc)
                return self(tokens, positions, forward_context, logits_indices)
        self._graphs[key] = graph
        return logits[: len(logits_indices)].float() if size is None else logits[logits_indices].float()

    def _stop_storing(self, reason: Exception) -> None:
        _log.warning("compiled graphs are not stored: %s", str(reason)[:300])
        _log.debug("raised while a compiled graph was stored", exc_info=reason)
        self._stores_graphs = False

    def _check(self, traced: Any, key: int | str | None, stored: LoadedGraph) -> None:
        """Raise AssertionError unless a stored graph is right at several sizes.

        Its results must be those of the traced graph. For one of three inputs, they must be close to those of the model
        without compilation.
        """
        sizes = {"few": (2, 3, 17, MAX_FEW_TOKENS), None: (MAX_FEW_TOKENS + 1, 2 * MAX_FEW_TOKENS + 3)}
        info, context = self._hf_model.model_info, _TokenMixer()
        for size in (key,) if isinstance(key, int) else sizes[key]:
            positions = [i % info.max_positions for i in range(size)]
            rows = positions if size == key else [0, 1, size - 1][: 2 + size % 2]
            differences = []
            for attempt in range(3):  # in bfloat16, logits of single tokens without context can be far off
                # of the whole vocabulary: the first ids are special tokens, whose logits are off most
                tokens = [7919 * (i + attempt + 1) % info.vocab_size for i in range(size)]
                inputs = [torch.tensor([numbers], device=info.device) for numbers in (tokens, positions)]
                inputs += [torch.tensor(rows, device=info.device)] * (size != key)
                with use_forward_context(context):
                    expected, result = traced(*inputs), stored(*inputs)
                torch.testing.assert_close(result, expected, rtol=0, atol=0)
                uncompiled = self._hf_model.logits(tokens, positions, context, rows)
                differences.append(float((result[0] - uncompiled).abs().max() / uncompiled.abs().max()))
                if differences[-1] <= 0.1:
                    break
            else:
                raise AssertionError(f"with {size} tokens it differs from the model without compilation: {differences}")

    def _is_packed(self, size: int | None) -> bool:
        """Whether the graph of `size` uses packed weights."""
        limit = self._max_packed_tokens
        return bool(self._packed_layers) and (limit is None or (size is not None and size <= limit))

    @contextmanager
    def _tracing(self, packs: bool) -> Iterator[None]:
        """Set up how linear layers are compiled inside the block.

        Packed weights have their own kernel; other layers are left to inductor, with freezing. In float32, it
        takes MKL's matmul unless reduced precision is allowed. On AVX2, oneDNN needs half the time for 2 to 8
        rows, so reduced precision is allowed while tracing. AVX2 processors do not have it, and the setting is
        restored before the graph runs again.
        """
        if packs:
            activations = [(module, silu_forward) for module in self._hf_model.model.modules() if is_silu(module)]
            with compile_cache(), packed_for_tracing(self._packed_layers), forwards_for_tracing(activations):
                yield
            return
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        precision = matmul.fp32_precision
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            matmul.fp32_precision = "tf32"
        try:
            with compile_cache(), self._tracing_options(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*FX graph cache copying.*")
                yield
        finally:
            matmul.fp32_precision = precision


def _packed_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """Return layers with packed weights; pack those of a model in bfloat16."""
    if quantized := [module for module in model.modules() if isinstance(module, Int4Linear)]:
        return list(quantized)
    try:
        load_kernel()
    except BackendUnavailableError:
        return []
    return pack_model(model)


def compile_model(
    hf_model: HFModel,
    name: str,
    *,
    dynamic: bool,
    graph_pass: Callable[[torch.fx.Graph], None] | None = None,
    backend: str | Callable[..., Any] = "inductor",
) -> Any:
    """Compile the model into one graph.

    The graph maps (1, N) token ids and positions to (1, N, V) logits. With a third input, (R,) indices,
    it returns the logits of those tokens, (1, R, V).

    Args:
        name: distinct name of the code object; dynamo keeps one list of graphs per code object.
        dynamic: accept any number of tokens; False: only if the inputs are marked so.
        graph_pass: changes the graph before it is lowered.
        backend: compiles the traced graph.
    """
    model = hf_model.model

    def forward(ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        kept = {} if rows is None else {"logits_to_keep": rows}  # a number would be a dynamic input
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **kept).logits
        return logits

    forward.__code__ = forward.__code__.replace(co_name=name)
    # No guards: nothing that a graph depends on changes after it is traced.
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    if graph_pass is not None:
        options["post_grad_custom_pre_pass"] = graph_pass
    return torch.compile(forward, fullgraph=True, dynamic=dynamic, backend=backend, options=options)
