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

from ..errors import ConfigError, ModelError, RequestFailedError

FUSED_QKV_NAMES = ("qkv_proj", "query_key_value")

FRAME_BYTES = 1024  # bytes

TP_LABEL = "tensor parallelism (tp_plan)"


class TPGroup:
    """The processes of a model, and this one among them. Once an exchange or a step has failed, nothing more is
    computed: nobody knows what the others did."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._process_group = dist.new_group(
            backend="gloo"
        )  # numbers go from host to host, beside what the model exchanges
        self._failed_reason: str | None = None

    @property
    def name(self) -> str:
        """Part of the fingerprint: an encoding holds the heads of one rank."""
        return f"rank{self.rank}of{self.world_size}"

    def all_gather(self, label: str, value: Any) -> list[Any]:
        """What every rank gave, in order, as JSON gives it back. Raises RequestFailedError where a rank is
        gone, or does
        something else."""
        if self._failed_reason is not None:
            raise RequestFailedError(f"{self.name} failed before ({self._failed_reason}): start all processes again")
        try:
            result = self._exchange(json.dumps([label, value]).encode())
        except RuntimeError as exc:  # the library raises nothing narrower
            raise self._mark_failed(f"no answer from the others: {exc}") from exc
        except BaseException:
            self._mark_failed("interrupted")
            raise
        others = {f"rank {rank}: {other}" for rank, (other, _) in enumerate(result) if other != label}
        if others:
            raise self._mark_failed(f"it does {label!r}, {'; '.join(sorted(others))}; all have to run the same program")
        return [value for _, value in result]

    def _exchange(self, payload: bytes) -> list[Any]:
        """Everybody's JSON: a frame that holds most of them, and a second round for longer ones."""
        result = self._all_gather_bytes(len(payload).to_bytes(4, "little") + payload[: FRAME_BYTES - 4], FRAME_BYTES)
        sizes = [int.from_bytes(one[:4], "little") for one in result]
        most = max(sizes)
        if most > FRAME_BYTES - 4:
            result = [bytes(4) + one for one in self._all_gather_bytes(payload, most)]
        return [json.loads(one[4 : 4 + size]) for one, size in zip(result, sizes, strict=True)]

    def _all_gather_bytes(self, payload: bytes, size: int) -> list[bytes]:
        sent = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)
        result = [torch.empty(size, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(result, sent, group=self._process_group)
        return [bytes(one.tolist()) for one in result]

    def broadcast(self, label: str, value: Any) -> Any:
        """Rank 0's value."""
        return self.all_gather(label, value)[0]

    def all_reduce_min(self, label: str, number: int) -> int:
        return min(self.all_gather(label, number))

    def shared_clock(self) -> float:
        """Rank 0's time, for what ends by itself."""
        return float(self.broadcast("clock", time.monotonic()))

    def ensure_equal(self, label: str, value: object) -> None:
        """Raises ConfigError, on all ranks, unless all were given equal values."""
        result = self.all_gather(label, repr(value))
        if len(set(result)) > 1:
            raise ConfigError(f"{label} differ between processes: {'; '.join(result)}; give all of them the same")

    @contextmanager
    def synchronized_step(self, step_inputs: object) -> Iterator[None]:
        """Computes a step that is the same on all ranks. What breaks in it, breaks all of them."""
        result = self.all_gather("step", hashlib.sha256(repr(step_inputs).encode()).hexdigest())
        if len(set(result)) > 1:
            raise self._mark_failed("the steps of the processes differ; all have to run the same program")
        try:
            yield
        except Exception as exc:
            raise self._mark_failed(f"a step broke: {exc}") from exc
        except BaseException:
            self._mark_failed("interrupted")
            raise

    def _mark_failed(self, reason: str) -> RequestFailedError:
        self._failed_reason = reason.splitlines()[0][:300]
        return RequestFailedError(f"{self.name}: {self._failed_reason}")


def tp_group(model: PreTrainedModel, name: str) -> TPGroup | None:
    """The processes over which transformers has sharded a model; None for one that is whole."""
    size = getattr(model, "_tp_size", None) or 1
    if size == 1:
        if any(local_shard(parameter) is not parameter for parameter in model.parameters()):
            raise ModelError(f"{name}: its weights are sharded, but not by a tensor parallel plan; use tp_plan='auto'")
        return None
    if size != dist.get_world_size():
        raise ModelError(f"{name}: {size} of {dist.get_world_size()} processes share it; tp_plan needs all of them")
    config = model.config.get_text_config()
    query = config.num_attention_heads
    heads = {"query": query, "key-value": getattr(config, "num_key_value_heads", None) or query}
    split = {path.rsplit(".", 1)[-1] for path, style in (model.tp_plan or {}).items() if style == "colwise"}
    for what, projection in (("query", "q_proj"), ("key-value", "k_proj")):
        if heads[what] % size and split & {projection, *FUSED_QKV_NAMES}:
            hint = f"start a number of processes that divides {heads[what]}"
            if heads[what] == 1:
                hint = "use one, or a tp_plan that says 'replicate' of k_proj and v_proj"
            raise ModelError(f"{name}: its {heads[what]} {what} heads cannot be divided among {size} processes: {hint}")
    return TPGroup()


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


def local_shard(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # only sharded ones have it


def tp_kwargs(tp_plan: Any) -> dict[str, Any]:
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
