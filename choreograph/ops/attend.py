"""One step as a layer sees it: the plan, the arena's tensors, and the backend that joins them.

A `Step` travels through an unmodified transformers model as a keyword argument. Each layer calls `attend`,
which writes the rows' own keys and values into their slots before anything is read: rows may therefore read
rows of other calls in the same step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import gathered, native, reference, sdpa
from .kind import Kind
from .plan import Plan


@runtime_checkable
class Backend(Protocol):
    """Writes the step's own keys and values into their slots, then gives each row's attention, as a layer of its kind
    has it."""

    name: str

    def __call__(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        kind: Kind,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


def write(
    slots: Int[Tensor, "N"],
    key: Float[Tensor, "G N D"],
    value: Float[Tensor, "G N D"],
    keys: Float[Tensor, "S G D"],
    values: Float[Tensor, "S G D"],
) -> None:
    """Puts rows' own keys and values into their slots."""
    keys[slots] = key.transpose(0, 1)
    values[slots] = value.transpose(0, 1)


class WriteThenRead:
    """A backend made of a function that only reads, and one that writes."""

    def __init__(self, name: str, read: Callable[..., Tensor], write: Callable[..., None] = write) -> None:
        self.name = name
        self._read, self._write = read, write

    def __call__(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        kind: Kind,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._write(_slots(plan, keys.device), key, value, keys, values)
        return self._read(plan, query, keys, values, scale, kind, sinks)


def _slots(plan: Plan, device: torch.device) -> Tensor:
    """Where the rows' own keys and values go, sent to a device once a step."""
    key = f"slots {device}"
    if key not in plan.memo:
        plan.memo[key] = torch.from_numpy(plan.slots).to(device, non_blocking=True)
    return cast(Tensor, plan.memo[key])


class Native:
    """The compiled kernel: writes and reads in one call."""

    name = "native"

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._kernel = native.load(width, dtype)

    def __call__(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        kind: Kind,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._kernel.attend(plan, query, key, value, keys, values, scale, kind, sinks)


FEW = 16  # rows of a step that is small


class BySize:
    """One backend for small steps, another for large ones."""

    def __init__(self, small: Backend, large: Backend) -> None:
        self.name = f"{small.name}, {large.name} from {FEW + 1} rows on"
        self._small, self._large = small, large

    def __call__(self, plan: Plan, *given: Any, **named: Any) -> Tensor:
        return (self._small if plan.rows <= FEW else self._large)(plan, *given, **named)


def make_backend(name: str, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Backend, str | None]:
    """The backend by name, and why `auto` did not take the one that is made for the device (None if it did)."""
    if name == "sdpa" and device.type != "cpu":
        return WriteThenRead(name, gathered.attend), None
    if name in ("sdpa", "reference"):
        return WriteThenRead(name, {"sdpa": sdpa, "reference": reference}[name].attend), None
    if name == "flex":
        from . import flex  # the compiler comes with it: only where asked for

        return WriteThenRead(name, flex.attend), None
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton(device), None
    reason = native.supports(width, dtype, device)
    if reason is None:
        try:
            return Native(width, dtype), None
        except native.BackendUnavailable as problem:
            reason = str(problem)
    if name == "native":
        raise native.BackendUnavailable(reason)
    return WriteThenRead("sdpa", sdpa.attend), reason


def _triton(device: torch.device) -> Backend:
    try:
        import triton as compiler

        from . import triton
    except ImportError as problem:
        raise native.BackendUnavailable(f"Triton is not installed: {problem}") from None
    if device.type != "cuda" and not compiler.knobs.runtime.interpret:
        raise native.BackendUnavailable(
            f"device {device} is no GPU, and Triton's interpreter (TRITON_INTERPRET=1) is off"
        )
    return WriteThenRead("triton", triton.attend, triton.write)


@dataclass(eq=False)
class Step:
    """keys and values: per layer, (S, G, D), the arena's own tensors. kinds: of the layers. arrivals: called with the
    layer before it is read, each returns when what it brings of that layer is there. others: the plans of layers where
    something else is seen. kept: where what comes into some layers is kept, (S, E). given: what comes into some layers
    in place of what was computed, (1, N, E)."""

    plan: Plan
    keys: list[Tensor]
    values: list[Tensor]
    kinds: Sequence[Kind]
    backend: Backend
    arrivals: tuple[Callable[[int], None], ...] = ()
    others: Mapping[int, Plan] = field(default_factory=dict)
    kept: Mapping[int, Tensor] = field(default_factory=dict)
    given: Mapping[int, Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "1 G N D"],
        value: Float[Tensor, "1 G N D"],
        scale: float,
        sinks: Float[Tensor, "H"] | None = None,
    ) -> Float[Tensor, "1 N H D"]:
        for arrive in self.arrivals:
            arrive(layer)
        plan = self.others.get(layer, self.plan)
        kept = self.keys[layer], self.values[layer]
        return self.backend(plan, query[0], key[0], value[0], *kept, scale, self.kinds[layer], sinks)[None]

    def enter(self, layer: int, hidden: Float[Tensor, "1 N E"]) -> Float[Tensor, "1 N E"]:
        """What comes into a layer: keeps it where that is wanted, or puts what is given in its place."""
        if layer in self.given:
            return self.given[layer]
        if layer in self.kept:
            self.kept[layer][_slots(self.plan, hidden.device)] = hidden[0]
        return hidden

    def advanced(self) -> "Step":
        """The step behind this one, where its plans may be advanced."""
        known = {id(plan): plan for plan in self.others.values()}
        new = {name: plan.advanced() for name, plan in known.items()}
        others = {layer: new[id(plan)] for layer, plan in self.others.items()}
        return replace(self, plan=self.plan.advanced(), others=others)

    def padded(self, rows: int) -> "Step":
        """The same step with rows added that write into slot 0 (the bin page) and read nothing."""
        if rows == self.plan.rows:
            return self
        others = {layer: _padded(plan, rows) for layer, plan in self.others.items()}
        return replace(self, plan=_padded(self.plan, rows), others=others)


def _padded(plan: Plan, rows: int) -> Plan:
    """One and the same for one plan: what is worked out for it is worked out once."""
    if f"padded {rows}" not in plan.memo:
        nothing = np.zeros(rows - plan.rows, dtype=np.int64)
        slots, positions = (np.concatenate([one, nothing]) for one in (plan.slots, plan.positions))
        plan.memo[f"padded {rows}"] = replace(plan, slots=slots, positions=positions, memo={}, padding=len(nothing))
    return cast(Plan, plan.memo[f"padded {rows}"])
