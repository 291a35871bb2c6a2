"""Tensor parallelism: each process (rank) computes part of a model's heads.

transformers shards the weights and reduces the partial results. This module keeps the ranks in step:
every step must be the same on all of them, and rank 0 decides tokens, seeds and sizes.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ConfigError, ModelError, RequestFailedError

TP_LABEL = "tensor parallelism (tp_plan)"

FUSED_QKV_NAMES = ("qkv_proj", "query_key_value")


class TPGroup:
    """Ranks that share a model; unusable after a failed exchange or step."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.name = f"rank{self.rank}of{self.world_size}"  # part of the fingerprint: KV entries hold a rank's heads
        self._process_group = dist.new_group(backend="gloo")  # host messages, separate from the model's reductions
        self._failed_reason: str | None = None

    def all_gather(self, label: str, value: Any) -> list[Any]:
        """Gather JSON-serializable values of all ranks, in rank order.

        Raises:
            RequestFailedError: if a rank is gone or calls with another label.
        """
        if self._failed_reason is not None:
            raise RequestFailedError(f"{self.name} failed before ({self._failed_reason}): start all processes again")
        messages: list[Any] = [None] * self.world_size
        with self._failing_together("no answer from the others", RuntimeError):
            dist.all_gather_object(messages, json.dumps([label, value]), group=self._process_group)
        labels, values = zip(*map(json.loads, messages), strict=True)
        others = sorted({f"rank {rank}: {other}" for rank, other in enumerate(labels) if other != label})
        if others:
            raise self._mark_failed(f"it does {label!r}, {'; '.join(others)}; all have to run the same program")
        return list(values)

    def broadcast(self, label: str, value: Any) -> Any:
        """Return the value of rank 0."""
        return self.all_gather(label, value)[0]

    def shared_clock(self) -> float:
        """Return the monotonic clock of rank 0 in seconds."""
        return float(self.broadcast("clock", time.monotonic()))

    def ensure_equal(self, label: str, value: object) -> None:
        """Raise ConfigError on all ranks unless their values have equal representations."""
        values = self.all_gather(label, repr(value))
        if len(set(values)) > 1:
            raise ConfigError(f"{label} differ between processes: {'; '.join(values)}; give all of them the same")

    @contextmanager
    def synchronized_step(self, step_inputs: object) -> Iterator[None]:
        """Run the same step on all ranks; an error stops all."""
        hashes = self.all_gather("step", hashlib.sha256(repr(step_inputs).encode()).hexdigest())
        if len(set(hashes)) > 1:
            raise self._mark_failed("the steps of the processes differ; all have to run the same program")
        with self._failing_together("a step broke", Exception):
            yield

    @contextmanager
    def _failing_together(self, description: str, error: type[Exception]) -> Iterator[None]:
        """Mark the group failed after an exception; convert `error` to RequestFailedError."""
        try:
            yield
        except error as exc:
            raise self._mark_failed(f"{description}: {exc}") from exc
        except BaseException:
            self._mark_failed("interrupted")
            raise

    def _mark_failed(self, reason: str) -> RequestFailedError:
        self._failed_reason = reason.splitlines()[0][:300]
        return RequestFailedError(f"{self.name}: {self._failed_reason}")


def tp_group(model: PreTrainedModel, name: str) -> TPGroup | None:
    """Return the ranks of a sharded model; None if not sharded."""
    size = getattr(model, "_tp_size", None) or 1
    if size == 1:
        if any(local_shard(parameter) is not parameter for parameter in model.parameters()):
            raise ModelError(f"{name}: its weights are sharded, but not by a tensor parallel plan; use tp_plan='auto'")
        return None
    if size != dist.get_world_size():
        raise ModelError(f"{name}: {size} of {dist.get_world_size()} processes share it; tp_plan needs all of them")
    query_heads, kv_heads = _total_heads(model)
    split = {path.rpartition(".")[2] for path, style in (model.tp_plan or {}).items() if style == "colwise"}
    for kind, heads, projection in (("query", query_heads, "q_proj"), ("key-value", kv_heads, "k_proj")):
        if heads % size and split & {projection, *FUSED_QKV_NAMES}:
            hint = f"start a number of processes that divides {heads}"
            if heads == 1:
                hint = "use one, or a tp_plan that says 'replicate' of k_proj and v_proj"
            raise ModelError(f"{name}: its {heads} {kind} heads cannot be divided among {size} processes: {hint}")
    return TPGroup()


def check_heads(model: PreTrainedModel, name: str, query_heads: int, kv_heads: int) -> None:
    """Raise ModelError if this rank's query and KV heads do not match."""
    all_query_heads, all_kv_heads = _total_heads(model)
    if all_kv_heads > 1 and query_heads * all_kv_heads != kv_heads * all_query_heads:
        raise ModelError(
            f"{name}: the plan gives a process {query_heads} of {all_query_heads} query heads and {kv_heads} of "
            f"{all_kv_heads} key-value heads; shard both alike, as tp_plan='auto' does"
        )


def _total_heads(model: PreTrainedModel) -> tuple[int, int]:
    """Return the total numbers of query and KV heads over all ranks."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor, else not sharded


def tp_kwargs(tp_plan: Any) -> dict[str, Any]:
    """Return transformers' sharding arguments; empty without a plan.

    Raises:
        ConfigError: if the plan is invalid, or there is only one process.
    """
    if tp_plan is None:
        return {}
    if tp_plan != "auto" and not isinstance(tp_plan, dict):
        raise ConfigError(f"tp_plan={tp_plan!r}: use 'auto', or a dictionary as transformers takes it")
    is_initialized = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if is_initialized else int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        raise ConfigError(f"tp_plan={tp_plan!r}: only one process: start several with torchrun, or leave tp_plan out")
    from transformers.distributed import DistributedConfig  # an optional part of transformers

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan=tp_plan)}
