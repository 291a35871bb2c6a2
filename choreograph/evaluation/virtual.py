"""An engine on a virtual clock: the real scheduler, store, policies and workflows over a model that only takes time.

For machines that are not at hand. What a step and a copy cost comes from a `Machine`; everything that decides what is
computed and moved, and when, is the code that runs elsewhere. Nothing is learnt here about how good answers are.

A step costs the longer of its arithmetic (2 a parameter and token, 4 * width * layers a token and one that it sees) and
of what it reads (the weights, and every sampled call's context), plus a fixed overhead. Loads go one after the other
over a link, offloads over it the other way, and neither slows a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..core import Engine
from ..kv.transfers import Transfer, TransferFailed
from ..models.adapter import Adapter
from ..models.facts import ModelFacts
from ..ops.attend import Step
from ..ops.kind import Kind
from ..ops.rope import Rotary

VOCABULARY = 1 << 16


@dataclass(frozen=True)
class Machine:
    """A model on a device, in bytes, seconds, and sustained rates (peak rates times what is reached of them).

    cache: bytes for encodings on the device. link: bytes a second between it and host memory, each way.
    """

    name: str
    parameters: float
    weights: float
    layers: int
    width: int
    token_bytes: int
    arithmetic: float
    memory: float
    link: float
    cache: float
    overhead: float = 0.0

    @property
    def cache_tokens(self) -> int:
        return int(self.cache // self.token_bytes)

    def step_seconds(self, positions: list[int], sampled: list[int]) -> float:
        """Of rows at these positions; `sampled` are the rows whose calls read all of their context for one token."""
        seen = sum(positions) + len(positions)
        operations = 2 * self.parameters * len(positions) + 4 * self.width * self.layers * seen
        read = self.weights + self.token_bytes * sum(positions[row] + 1 for row in sampled)
        return max(operations / self.arithmetic, read / self.memory) + self.overhead


class Clock:
    """Seconds that pass only where something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class VirtualMover:
    """Transfers that take what the link takes. They are carried out when the clock has passed their end."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self._machine, self._clock = machine, clock
        self._free = {"loading": 0.0, "offloading": 0.0}
        self._times: dict[Transfer, tuple[float, float]] = {}  # from, to

    def start(self, transfer: Transfer) -> None:
        begin = max(self._clock.now, self._free[transfer.kind])
        end = begin + transfer.tokens * self._machine.token_bytes / self._machine.link
        self._free[transfer.kind] = end
        self._times[transfer] = begin, end

    def tick(self) -> None:
        for transfer in [t for t, (_, end) in self._times.items() if end <= self._clock.now]:
            del self._times[transfer]
            transfer.run()

    def wait(self, transfer: Transfer) -> None:
        if transfer in self._times:
            self._clock.until(self._times[transfer][1])
            self.tick()

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        if transfer in self._times:
            begin, end = self._times[transfer]
            self._clock.until(begin + (end - begin) * (layer + 1) / transfer.layers)
            self.tick()
        if transfer.error is not None:
            raise TransferFailed(transfer)

    def close(self) -> None:
        for transfer in self._times:
            transfer.cancel()


class VirtualModel(Adapter):
    """Takes the time of a forward pass and gives every row the same logits."""

    def __init__(self, machine: Machine, clock: Clock, positions: int) -> None:
        self.machine, self.clock = machine, clock
        self.mover = VirtualMover(machine, clock)
        self.tokenizer = None
        self.compiled = None
        self.facts = ModelFacts(
            name=machine.name,
            layers=machine.layers,
            query_heads=1,
            kv_heads=1,
            head_dim=2,
            max_positions=positions,
            vocab_size=VOCABULARY,
            kinds=(Kind(Rotary((1.0,))),) * machine.layers,
            movable=True,
            dtype=torch.float16,
            device=torch.device("cpu"),
            fingerprint=f"virtual {machine.name}",
            parameters=int(machine.parameters),
        )

    def forward(
        self, tokens: list[int], positions: list[int], step: Step, rows: list[int], models: Sequence[str] = ()
    ) -> torch.Tensor:
        seconds = self.machine.step_seconds(positions, rows)
        for layer in range(self.machine.layers):
            for arrive in step.arrivals:
                arrive(layer)
            self.clock.now += seconds / self.machine.layers
        self.mover.tick()
        return torch.zeros(1, VOCABULARY).expand(len(rows), -1)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return ()


def virtual_engine(machine: Machine, config: EngineConfig, *, positions: int = 131072) -> tuple[Engine, Clock]:
    """An engine as `config` says on a machine that is not there, and its clock."""
    clock = Clock()
    model = VirtualModel(machine, clock, positions)
    engine = Engine(model, config)
    engine.runner.store.traffic.mover = model.mover
    engine.runner.store.pins.clock = clock
    engine.runner.real_time = False
    engine.runner.store.sleep = lambda seconds: clock.until(clock.now + seconds)
    return engine, clock
