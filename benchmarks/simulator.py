"""An engine on a virtual clock: the real scheduler, store, policies and workflows over a model that only takes time.

For machines that are not at hand. What a step and a copy cost comes from a `Machine`; everything that decides what is
computed and moved, and when, is the code that runs elsewhere. Nothing is learnt here about how good answers are.

A step costs the longer of its arithmetic (2 a parameter and token, 4 * width * layers a token and one that it sees) and
of what it reads (the weights, and every sampled call's context), plus a fixed overhead. Loads go one after the other
over a link, offloads over it the other way, and neither slows a step. With `charge_host`, the processor time that this
process spends between two steps, on scheduling, the cache and the workflows, passes on the clock too.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from choreograph.api.engine import Engine
from choreograph.attention.backend import ForwardContext
from choreograph.attention.metadata import AttentionSpec
from choreograph.attention.rope import Rope
from choreograph.config import EngineConfig
from choreograph.kv_cache.transfer import Transfer, TransferError
from choreograph.models.hf_model import HFModel
from choreograph.models.info import ModelInfo

VOCAB_SIZE = 1 << 16
NUM_LOGITS = 8  # of each row: sampling on the host must not cost what it would cost on the device


@dataclass(frozen=True)
class HardwareModel:
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

    def step_seconds(self, positions: list[int], sampled_rows: list[int]) -> float:
        """Of rows at these positions; `sampled` are the rows whose calls read all of their context for one token."""
        seen = sum(positions) + len(positions)
        operations = 2 * self.parameters * len(positions) + 4 * self.width * self.layers * seen
        read = self.weights + self.token_bytes * sum(positions[row] + 1 for row in sampled_rows)
        return max(operations / self.arithmetic, read / self.memory) + self.overhead


class SimClock:
    """Seconds that pass only where something takes time.

    charge_host: also the processor time of this thread outside of `uncharged` blocks.
    """

    def __init__(self, charge_host: bool = False) -> None:
        self._simulated = 0.0
        self._charge_host = charge_host
        self._host_offset = time.thread_time()
        self._num_uncharged = 0

    @property
    def now(self) -> float:
        self._charge()
        return self._simulated

    def _charge(self) -> None:
        if self._charge_host and not self._num_uncharged:
            host = time.thread_time()
            self._simulated += host - self._host_offset
            self._host_offset = host

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self._charge()
        self._simulated += seconds

    def advance_to(self, moment: float) -> None:
        self._charge()
        self._simulated = max(self._simulated, moment)

    @contextmanager
    def uncharged(self) -> Iterator[None]:
        """Do not charge what the simulation itself costs."""
        self._charge()
        self._num_uncharged += 1
        try:
            yield
        finally:
            self._num_uncharged -= 1
            self._host_offset = time.thread_time()


class SimTransferExecutor:
    """Transfers that take what the link takes. They are carried out when the clock has passed their end."""

    def __init__(self, hardware: HardwareModel, clock: SimClock) -> None:
        self._hardware, self._clock = hardware, clock
        self._idle_at = {"loading": 0.0, "offloading": 0.0}
        self._times: dict[Transfer, tuple[float, float]] = {}  # from, to

    def start(self, transfer: Transfer) -> None:
        begin = max(self._clock.now, self._idle_at[transfer.direction])
        end = begin + transfer.tokens * self._hardware.token_bytes / self._hardware.link
        self._idle_at[transfer.direction] = end
        self._times[transfer] = begin, end

    def tick(self) -> None:
        now = self._clock.now
        for transfer in [t for t, (_, end) in self._times.items() if end <= now]:
            del self._times[transfer]
            with self._clock.uncharged():
                transfer.run()

    def wait(self, transfer: Transfer) -> None:
        if transfer in self._times:
            self._clock.advance_to(self._times[transfer][1])
            self.tick()

    def wait_for(self, transfer: Transfer, layer: int) -> None:
        if transfer in self._times:
            begin, end = self._times[transfer]
            self._clock.advance_to(begin + (end - begin) * (layer + 1) / transfer.layers)
            self.tick()
        if transfer.error is not None:
            raise TransferError(transfer)

    def close(self) -> None:
        for transfer in self._times:
            transfer.cancel()


class SimModel(HFModel):
    """Takes the time of a forward pass and gives every row the same logits."""

    def __init__(self, hardware: HardwareModel, clock: SimClock, max_positions: int) -> None:
        self.hardware, self.clock = hardware, clock
        self.executor = SimTransferExecutor(hardware, clock)
        self.tokenizer = None
        self.compiled = None
        self.model_info = ModelInfo(
            name=hardware.name,
            layers=hardware.layers,
            query_heads=1,
            kv_heads=1,
            head_dim=2,
            max_positions=max_positions,
            vocab_size=VOCAB_SIZE,
            attention_specs=(AttentionSpec(Rope((1.0,))),) * hardware.layers,
            supports_shift=True,
            dtype=torch.float16,
            device=torch.device("cpu"),
            fingerprint=f"virtual {hardware.name}",
            parameters=int(hardware.parameters),
        )

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        forward_context: ForwardContext,
        logits_indices: list[int],
        models: Sequence[str] = (),
    ) -> torch.Tensor:
        with self.clock.uncharged():
            seconds = self.hardware.step_seconds(positions, logits_indices)
            for layer in range(self.hardware.layers):
                for arrive in forward_context.layer_waiters:
                    arrive(layer)
                self.clock.advance(seconds / self.hardware.layers)
            self.executor.tick()
            return torch.zeros(1, NUM_LOGITS).expand(len(logits_indices), -1)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return ()


def simulated_engine(
    hardware: HardwareModel, config: EngineConfig, *, max_positions: int = 131072, charge_host: bool = False
) -> tuple[Engine, SimClock]:
    """An engine as `config` says on a machine that is not there, and its clock."""
    clock = SimClock(charge_host)
    model = SimModel(hardware, clock, max_positions)
    engine = Engine(model, config)
    engine.core.cache_manager.offload_manager.executor = model.executor
    engine.core.cache_manager.pins.clock = clock
    engine.core.wall_clock = False
    engine.core.cache_manager.sleep = clock.advance
    return engine, clock
