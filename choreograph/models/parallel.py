"""One model computed by several processes, each with its part of the heads (tensor parallelism).

transformers shards the weights and adds up what the parts give. Here is what the processes have to agree on beside
it: that every step is the same step, which tokens are chosen, seeds, sizes. Where they could differ, rank 0's word
counts. Knows no messages and no cache.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import CallFailed, ConfigError, ModelError

FUSED = ("qkv_proj", "query_key_value")
FRAME = 1024  # bytes
NEVER = "tensor parallelism (tp_plan)"


class Ranks:
    """The processes of a model, and this one among them. Once an exchange or a step has failed, nothing more is
    computed: nobody knows what the others did."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")  # numbers go from host to host, beside what the model exchanges
        self._broken: str | None = None

    @property
    def name(self) -> str:
        """Part of the fingerprint: an encoding holds the heads of one rank."""
        return f"rank{self.rank}of{self.size}"

    def gather(self, what: str, value: Any) -> list[Any]:
        """What every rank gave, in order, as JSON gives it back. Raises CallFailed where a rank is gone, or does
        something else."""
        if self._broken is not None:
            raise CallFailed(f"{self.name} failed before ({self._broken}): start all processes again")
        try:
            found = self._exchange(json.dumps([what, value]).encode())
        except RuntimeError as problem:  # the library raises nothing narrower
            raise self._failed(f"no answer from the others: {problem}") from problem
        except BaseException:
            self._failed("interrupted")
            raise
        others = {f"rank {rank}: {other}" for rank, (other, _) in enumerate(found) if other != what}
        if others:
            raise self._failed(f"it does {what!r}, {'; '.join(sorted(others))}; all have to run the same program")
        return [value for _, value in found]

    def _exchange(self, mine: bytes) -> list[Any]:
        """Everybody's JSON: a frame that holds most of them, and a second round for longer ones."""
        found = self._round(len(mine).to_bytes(4, "little") + mine[: FRAME - 4], FRAME)
        sizes = [int.from_bytes(one[:4], "little") for one in found]
        most = max(sizes)
        if most > FRAME - 4:
            found = [bytes(4) + one for one in self._round(mine, most)]
        return [json.loads(one[4 : 4 + size]) for one, size in zip(found, sizes, strict=True)]

    def _round(self, mine: bytes, size: int) -> list[bytes]:
        sent = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
        found = [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, sent, group=self._group)
        return [bytes(one.tolist()) for one in found]

    def say(self, what: str, value: Any) -> Any:
        """Rank 0's value."""
        return self.gather(what, value)[0]

    def least(self, what: str, number: int) -> int:
        return min(self.gather(what, number))

    def clock(self) -> float:
        """Rank 0's time, for what ends by itself."""
        return float(self.say("clock", time.monotonic()))

    def same(self, what: str, value: object) -> None:
        """Raises ConfigError, on all ranks, unless all were given equal values."""
        found = self.gather(what, repr(value))
        if len(set(found)) > 1:
            raise ConfigError(f"{what} differ between processes: {'; '.join(found)}; give all of them the same")

    @contextmanager
    def step(self, rows: object) -> Iterator[None]:
        """Computes a step that is the same on all ranks. What breaks in it, breaks all of them."""
        found = self.gather("step", hashlib.sha256(repr(rows).encode()).hexdigest())
        if len(set(found)) > 1:
            raise self._failed("the steps of the processes differ; all have to run the same program")
        try:
            yield
        except Exception as problem:
            raise self._failed(f"a step broke: {problem}") from problem
        except BaseException:
            self._failed("interrupted")
            raise

    def _failed(self, why: str) -> CallFailed:
        self._broken = why.splitlines()[0][:300]
        return CallFailed(f"{self.name}: {self._broken}")


def ranks_of(model: PreTrainedModel, name: str) -> Ranks | None:
    """The processes over which transformers has sharded a model; None for one that is whole."""
    size = getattr(model, "_tp_size", None) or 1
    if size == 1:
        if any(local(parameter) is not parameter for parameter in model.parameters()):
            raise ModelError(f"{name}: its weights are sharded, but not by a tensor parallel plan; use tp_plan='auto'")
        return None
    if size != dist.get_world_size():
        raise ModelError(f"{name}: {size} of {dist.get_world_size()} processes share it; tp_plan needs all of them")
    config = model.config.get_text_config()
    query = config.num_attention_heads
    heads = {"query": query, "key-value": getattr(config, "num_key_value_heads", None) or query}
    split = {path.rsplit(".", 1)[-1] for path, style in (model.tp_plan or {}).items() if style == "colwise"}
    for what, projection in (("query", "q_proj"), ("key-value", "k_proj")):
        if heads[what] % size and split & {projection, *FUSED}:
            mend = f"start a number of processes that divides {heads[what]}"
            if heads[what] == 1:
                mend = "use one, or a tp_plan that says 'replicate' of k_proj and v_proj"
            raise ModelError(f"{name}: its {heads[what]} {what} heads cannot be divided among {size} processes: {mend}")
    return Ranks()


def check_heads(model: PreTrainedModel, name: str, query_heads: int, kv_heads: int) -> None:
    """Every query head needs its own key-value head in the same process."""
    config = model.config.get_text_config()
    query = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or query
    if kv > 1 and query_heads * kv != kv_heads * query:
        raise ModelError(
            f"{name}: the plan gives a process {query_heads} of {query} query heads and {kv_heads} of {kv} key-value "
            "heads; shard both alike, as tp_plan='auto' does"
        )


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # only sharded ones have it


def options(tp_plan: Any) -> dict[str, Any]:
    """What makes transformers shard a model over all processes; nothing without a plan. Raises ConfigError where there
    is one process only."""
    if tp_plan is None:
        return {}
    if tp_plan != "auto" and not isinstance(tp_plan, dict):
        raise ConfigError(f"tp_plan={tp_plan!r}: use 'auto', or a dictionary as transformers takes it")
    there = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if there else int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        raise ConfigError(
            f"tp_plan={tp_plan!r}: there is one process; start several with torchrun, or leave tp_plan out"
        )
    from transformers.distributed import DistributedConfig  # an optional part of transformers

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan=tp_plan)}
