"""vLLM in the process of the tests, and requests of the wire protocol to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tiny_models import VOCABULARY
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.layers import rotary_embedding

BLOCK = 32  # tokens; vLLM's CPU backend takes multiples of it
NUM_BLOCKS = 512


@dataclass(frozen=True)
class Request:
    """One request: greedy, with log-probabilities over the vocabulary."""

    tokens: Sequence[int]
    reuse: dict[str, Any] | None = None  # the field `choreograph` of kv_transfer_params
    max_tokens: int = 1
    salt: str | None = None  # cache_salt, the tenant
    lora: Any = None  # a LoRARequest
    options: tuple[tuple[str, Any], ...] = ()  # further options of SamplingParams

    @property
    def prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.tokens)} | ({} if self.salt is None else {"cache_salt": self.salt})

    @property
    def sampling(self) -> SamplingParams:
        extra = None if self.reuse is None else {"kv_transfer_params": {"choreograph": self.reuse}}
        defaults = {"temperature": 0.0, "logprobs": -1, "ignore_eos": True, "detokenize": False}
        return SamplingParams(**defaults | dict(self.options), max_tokens=self.max_tokens, extra_args=extra)


def _without_collections():
    """Skip garbage collections that vLLM asks for: nine tenths of the time in which an engine starts and stops."""
    return mock.patch("gc.collect", return_value=0)


class OfflineEngine:
    """An engine with the connector, unless `connector` is false.

    Args:
        connector_options: kv_connector_extra_config.
        options: arguments of vllm.LLM.
    """

    def __init__(
        self, folder: Path, *, connector: bool = True, connector_options: dict | None = None, **options: Any
    ) -> None:
        defaults = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_logprobs": -1,
            "block_size": BLOCK,
            "max_num_seqs": 16,
            "num_gpu_blocks_override": NUM_BLOCKS,
        }
        if connector:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="ChoreographConnector",
                kv_connector_module_path="choreograph.vllm",
                kv_role="kv_both",
                kv_connector_extra_config=connector_options or {},
            )
        rotary_embedding._ROPE_DICT.clear()  # of other models in this process, which a server does not have
        with _without_collections():
            self.llm = LLM(str(folder), **defaults | options)

    def run(self, *requests: Request) -> list[Any]:
        """Run requests in one batch; returns their outputs."""
        return self.llm.generate(
            [request.prompt for request in requests],
            [request.sampling for request in requests],
            lora_request=[request.lora for request in requests],
            use_tqdm=False,
        )

    def add(self, request: Request, request_id: str) -> str:
        """Add a request without running it; returns the id that aborts it."""
        engine = self.llm.llm_engine
        engine.add_request(request_id, request.prompt, request.sampling, lora_request=request.lora)
        return request_id

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def num_stored_tokens(self) -> int:
        return self.scheduler.connector.scheduler.index.num_tokens

    def check(self) -> None:
        """Raise AssertionError if the connector's index contradicts itself or the live requests."""
        self.scheduler.connector.scheduler.check()

    def check_idle(self) -> None:
        """Raise AssertionError if without requests a page is held, or index and worker hold other entries."""
        self.run(Request([0]))  # a step, which carries out what is ordered
        self.check()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's null block
        index = self.scheduler.connector.scheduler.index
        for uids, num_tokens in self.llm.collective_rpc(_stored_entries):
            assert uids == index.stored_uids()
            assert num_tokens == index.num_tokens

    def close(self) -> None:
        with _without_collections():
            self.llm.llm_engine.engine_core.shutdown()


def count_preemptions(engine: OfflineEngine, monkeypatch) -> list[str]:
    """Return a list to which the ids of preempted requests are added."""
    scheduler, preempted = engine.scheduler, []
    preempt = scheduler._preempt_request

    def note(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", note)
    return preempted


def _stored_entries(worker: Any) -> tuple[set[int], int]:
    """Return what a worker stores; runs in its process."""
    reuse_worker = get_kv_transfer_group().worker
    return reuse_worker.stored_uids, reuse_worker.num_tokens


def tokens_of(output: Any, choice: int = 0) -> list[int]:
    return list(output.outputs[choice].token_ids)


def logprobs_of(output: Any, choice: int = 0) -> np.ndarray:
    """Return the log-probabilities over the vocabulary where each token was sampled: (T, V)."""
    return np.array(
        [[row[token].logprob for token in range(VOCABULARY)] for row in output.outputs[choice].logprobs or []]
    )


def report_of(output: Any) -> dict[str, Any]:
    """Return what the connector says about a request."""
    return output.kv_transfer_params["choreograph"]


def missing_of(outputs: Sequence[Any]) -> list[str]:
    """Return the entries that the answer to a query lists as not stored."""
    (output,) = outputs
    return report_of(output).get("missing", [])


def is_refused(outputs: Sequence[Any]) -> bool:
    """Return whether a request ended with an error, and no token."""
    (output,) = outputs
    return output.outputs[0].finish_reason == "error" and not output.outputs[0].token_ids
