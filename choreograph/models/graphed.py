"""Small steps on a GPU without Python in the way: CUDA graphs, one for each number of rows and size of work.

A graph plays what `torch.compile` made of the unmodified model, with the Triton programs for attention inside. It reads
from tensors that stay where they are (`ops/fixed.py`); a step fills them with a few copies and plays the graph.
"""

import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import torch
import torch._dynamo
from torch import Tensor

from ..ops import triton
from ..ops.attend import Step
from ..ops.crossing import sent
from ..ops.fixed import Board, Fixed, layers_by_board, size_of
from ..ops.kind import Kind
from ..ops.plan import Plan
from ..ops.tiles import Arrays, arrays
from .adapter import Adapter
from .compiled import OpaqueStep, compiled_model
from .joined import Group, Once, as_one, join, leave

MOST = 40  # graphs that are kept; further steps run eagerly
TRIES = 3  # recordings that may fail before no more is tried
_TRACED: WeakKeyDictionary[Any, ReferenceType[Callable[..., Tensor]]] = WeakKeyDictionary()


class Recording(Protocol):
    """Work that was recorded, and gives its result again whenever it is called."""

    def __call__(self) -> Tensor: ...


class CudaRecorder:
    """Records work as CUDA graphs that share the memory of their intermediate results: one plays at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream()

    def __call__(self, work: Callable[[], Tensor]) -> Recording:
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            work()  # what is compiled or made once must not be recorded
        torch.cuda.current_stream().wait_stream(self._beside)
        gc.collect()  # nothing of an old graph may be freed in the middle
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # copies go on beside
                result = work()
        except BaseException:
            torch.cuda.set_stream(here)  # a capture that CUDA itself ended leaves its own behind, and its pool taken
            self._pool = torch.cuda.graph_pool_handle()
            raise

        def play() -> Tensor:
            graph.replay()
            return result

        return play


class _Laid(NamedTuple):
    """A step worked out for its graph. size: None where no graph is made for so much work."""

    step: Step
    pairs: list[tuple[Plan, Kind]]
    which: tuple[int, ...]
    made: list[Arrays]
    size: int | None


class _Graph(NamedTuple):
    fixed: Fixed
    play: Recording

    def fill(self, laid: _Laid, tokens: list[int], positions: list[int]) -> None:
        self.fixed.fill(tokens, positions, laid.step.plan)
        for board, made, (plan, _) in zip(self.fixed.boards, laid.made, laid.pairs, strict=True):
            board.fill(made, plan)


class GraphedForward:
    """`adapter.forward` for steps of up to the largest bucket; None for others, which run eagerly: those that wait for
    loads layer by layer, and those of more work than a graph has room for."""

    def __init__(
        self,
        adapter: Adapter,
        buckets: tuple[int, ...],
        *,
        record: Callable[[Callable[[], Tensor]], Recording] | None = None,
        through_compiler: bool = True,
    ) -> None:
        self.buckets = tuple(sorted({max(2, size) for size in buckets}))  # what is traced of one row serves no others
        self._adapter, self._record = adapter, record or CudaRecorder()
        self._compiled: Callable[..., Tensor] | None = None
        self._joined: list[Group] = []
        if through_compiler:
            self._compiled = _traced(adapter)
            with adapter.hooked():  # nobody traces the model meanwhile
                self._joined = join(adapter.model)
            finalize(self._compiled, leave, self._joined)
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._failed: set[tuple[object, ...]] = set()
        self.refused: str | None = None  # why the last recording failed

    def __call__(self, tokens: list[int], positions: list[int], step: Step, rows: list[int]) -> Tensor | None:
        laid = self.prepare(step)
        if laid is None or laid.size is None or step.arrivals:
            return None
        graph = self._known(laid) or self._graph_of(laid, tokens, positions)
        if graph is None:
            return None
        graph.fill(laid, tokens, positions)
        logits = graph.play()[0]
        if rows == list(range(len(rows))):
            return logits[: len(rows)].to(torch.float32, copy=True)  # the next graph writes here
        return logits[sent(rows, torch.long, logits.device)].float()

    def begin(self, tokens: Tensor, positions: list[int], step: Step) -> Tensor | None:
        """All rows of a step whose graph is there, with tokens of the device."""
        laid = self.prepare(step)
        graph = None if laid is None or step.arrivals else self._known(laid)
        if laid is None or graph is None:
            return None
        graph.fill(laid, [0] * len(positions), positions)
        graph.fixed.ids[0, : len(positions)] = tokens
        return graph.play()[0, : len(positions)].to(torch.float32, copy=True)

    def prepare(self, step: Step) -> _Laid | None:
        """Works a step out, once; None for one of too many rows."""
        count = next((size for size in self.buckets if size >= step.plan.rows), None)
        if count is None or step.given:
            return None
        facts = self._adapter.facts
        step = step.padded(count)
        pairs, which = layers_by_board(step)
        tile = triton.tile_of(facts.heads, count, facts.dtype.itemsize)
        made = [arrays(plan, kind, tile, facts.kv_heads) for plan, kind in pairs]
        return _Laid(step, pairs, which, made, size_of(made, [plan for plan, _ in pairs]))

    def _known(self, laid: _Laid) -> _Graph | None:
        """The graph for a step, where there is one over the arena as it lies now."""
        known = self._graphs.get(_key(laid))
        return known if known is not None and known.fixed.same_arena(laid.step) else None

    def _graph_of(self, laid: _Laid, tokens: list[int], positions: list[int]) -> _Graph | None:
        """A graph for a step, recorded; None where that cannot be done."""
        key = _key(laid)
        old = self._graphs.get(key)
        if old is not None:
            self._graphs.clear()  # the arena has moved; `old` keeps the pool in use until another graph does
        if len(self._graphs) == MOST or key in self._failed or len(self._failed) == TRIES:
            return None
        try:
            self._graphs[key] = self._new(laid, tokens, positions)
        except Exception as problem:  # torch, its compiler and Triton have errors of many kinds; eager steps stay right
            self._failed.add(key)
            self.refused = str(problem.__context__ or problem)[:300]  # what ended the recording, not its ending
            name, rows = self._adapter.facts.name, laid.step.plan.rows
            warnings.warn(
                f"{name}: steps of {rows} rows are not recorded and run eagerly: {self.refused}", stacklevel=2
            )
        return self._graphs.get(key)

    def _new(self, laid: _Laid, tokens: list[int], positions: list[int]) -> _Graph:
        rows, size, device = laid.step.plan.rows, laid.size, self._adapter.facts.device
        assert size is not None
        facts = self._adapter.facts
        tile = triton.tile_of(facts.heads, rows, facts.dtype.itemsize)
        boards = [Board(kind, rows, tile, size, device) for _, kind in laid.pairs]
        fixed = Fixed(laid.step, rows, boards, laid.which, device)

        def work() -> Tensor:
            if self._compiled is not None:
                found: Tensor = self._compiled(fixed.ids, fixed.positions, OpaqueStep(fixed))
                return found
            return self._eager(fixed)

        graph = _Graph(fixed, lambda: torch.empty(0))
        graph.fill(laid, tokens, positions)  # what is computed while it is recorded is this step
        with as_one(self._joined):
            return graph._replace(play=self._record(work))

    def _eager(self, fixed: Fixed) -> Tensor:
        found: Tensor = self._adapter.model(
            input_ids=fixed.ids, position_ids=fixed.positions, use_cache=False, step=fixed
        ).logits
        return found


def _key(laid: _Laid) -> tuple[object, ...]:
    return laid.step.plan.rows, laid.size, laid.which


def _traced(adapter: Adapter) -> Callable[..., Tensor]:
    """Engines over one model share what is traced of it, while any of them lives: all else is read from the step."""
    known = _TRACED.get(adapter.model)
    found = known() if known is not None else None
    if found is None:
        found = cast(Callable[..., Tensor], compiled_model(adapter, "forward_graphed", dynamic=True, once=Once()))
        _TRACED[adapter.model] = ref(found)
    return found
