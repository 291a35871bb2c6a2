"""`ChoreographConnector`: message reuse as a KV connector of vLLM."""

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from .kv_pages import UnsupportedCacheError
from .reuse_params import ReuseKind
from .reuse_scheduler import ReuseScheduler
from .step_metadata import StepOrders
from .turn_boundaries import TurnBoundaries

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from .reuse_worker import ReuseWorker

logger = init_logger(f"vllm.{__name__}")  # vLLM configures the loggers below its own

TESTED_VERSIONS = ("0.28", "0.29", "0.30", "0.31", "0.32")
ARCHITECTURES = (  # whose layers all share one rotary embedding
    "GraniteForCausalLM", "InternLM2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM",
    "Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "StableLmForCausalLM",
)  # fmt: skip
OPTIONS = {
    "mode": "messages",  # of requests that name none: "messages", "spans" or "exact"
    "store_gib": 4.0,  # memory of each worker for stored keys and values
    "store_device": "cpu",  # or "device": the memory of the GPU
    "min_message_tokens": 8,  # shorter messages are computed
    "min_moved_tokens": 32,  # shorter messages are moved only before longer ones
    "architectures": [],  # more of them, whose layers all share one rotary embedding
    "allow_untested_version": False,
}


class ChoreographConnector(KVConnectorBase_V1, SupportsHMA):
    """Reuses keys and values of messages at any position of requests.

    The scheduler's half plans requests and orders what the worker's half reads and writes; each process has one.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig", **_: Any
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        if unknown := set(given) - set(OPTIONS):
            raise ValueError(f"kv_connector_extra_config: unknown {sorted(unknown)}, options are {sorted(OPTIONS)}")
        self._options = OPTIONS | given
        _check_support(vllm_config, kv_cache_config, self._options)
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._block_size, self._num_blocks = spec.block_size, kv_cache_config.num_blocks
        self._orders: StepOrders | None = None
        self._scheduler: ReuseScheduler | None = None
        self._worker: ReuseWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            num_layers = len(kv_cache_config.kv_cache_groups[0].layer_names)
            token_bytes = spec.page_size_bytes / spec.block_size * num_layers
            can_compute_holes = not getattr(vllm_config, "use_v2_model_runner", False)
            if not can_compute_holes:
                logger.warning(
                    "model runner V2: the reuse of a prompt ends at its first new or repaired message; set "
                    "VLLM_USE_V2_MODEL_RUNNER=0 to reuse what follows it, too"
                )
            mode, boundaries = _reuse_mode(self._options["mode"], vllm_config)
            self._scheduler = ReuseScheduler(
                capacity=int(self._options["store_gib"] * 2**30 / token_bytes),
                block_size=spec.block_size,
                default_mode=mode,
                boundaries=boundaries,
                can_compute_holes=can_compute_holes,
                min_tokens=self._options["min_message_tokens"],
                min_moved=self._options["min_moved_tokens"],
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- the scheduler's half -------------------------------------------------------------------------------

    @property
    def scheduler(self) -> ReuseScheduler:
        assert self._scheduler is not None
        return self._scheduler

    def on_new_request(self, request: "Request") -> None:
        self.scheduler.add(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.count_reused(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self.scheduler.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepOrders:
        return self.scheduler.order_step(scheduler_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finish(request, block_ids)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finish(request, block_ids[0])

    def reset_cache(self) -> bool:
        self.scheduler.reset()
        return True

    # -- the worker's half ----------------------------------------------------------------------------------

    @property
    def worker(self) -> "ReuseWorker":
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        from .reuse_worker import ReuseWorker

        for name, pages in kv_caches.items():
            if len(pages) != self._num_blocks:
                share, rest = divmod(len(pages), self._num_blocks)  # rest: keys and values in pages of their own
                advice = "another attention backend" if rest else f"--block-size {self._block_size // share}"
                raise UnsupportedCacheError(
                    f"ChoreographConnector: pages of {name} have shape {tuple(pages.shape)}, not one page for each of "
                    f"{self._num_blocks} blocks of {self._block_size} tokens: start vLLM with {advice}"
                )
        layers = self._vllm_config.compilation_config.static_forward_context
        self._worker = ReuseWorker(layers, kv_caches, self._block_size, self._options["store_device"])

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Carry out the orders that come before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._orders = connector_metadata
        self.worker.before_forward(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Do nothing: loads are done when the orders are bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are done before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: entries are read after the forward pass."""

    def has_connector_metadata(self) -> bool:
        """Return False, so that vLLM calls no hook in every layer."""
        return False

    def wait_for_save(self) -> None:
        if self._orders is not None:
            self.worker.after_forward(self._orders)
            self._orders = None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self.worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_errors()


def _reuse_mode(mode: str, vllm_config: Any) -> tuple[ReuseKind, TurnBoundaries | None]:
    """Return the mode of plain requests, and the boundaries of turns."""
    if mode not in ("messages", "spans", "exact"):
        raise ValueError(f"kv_connector_extra_config: mode={mode!r}, use 'messages', 'spans' or 'exact'")
    if vllm_config.model_config.skip_tokenizer_init:
        return ("exact" if mode == "messages" else mode), None  # type: ignore[return-value]
    from vllm.tokenizers import cached_tokenizer_from_config

    boundaries = TurnBoundaries.of_tokenizer(cached_tokenizer_from_config(vllm_config.model_config))
    if boundaries is None and mode == "messages":
        logger.warning("the chat template does not mark its turns by special tokens: plain requests reuse nothing")
    return mode, boundaries  # type: ignore[return-value]


def _check_support(vllm_config: Any, kv_cache_config: Any, options: dict[str, Any]) -> None:
    """Raise an error for what the connector cannot do."""

    def refuse(reason: str) -> None:
        raise UnsupportedCacheError(f"ChoreographConnector: {reason}")

    if vllm.__version__.rpartition(".")[0] not in TESTED_VERSIONS and not options["allow_untested_version"]:
        refuse(
            f"vLLM {vllm.__version__} is not among the versions tested ({', '.join(TESTED_VERSIONS)}); "
            'set "allow_untested_version": true in kv_connector_extra_config after running its tests'
        )
    from vllm.v1.request import Request

    if not hasattr(Request, "update_block_hashes"):
        refuse(f"vLLM {vllm.__version__} has no Request.update_block_hashes, which keeps reused blocks to themselves")
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role != "kv_both":
        refuse(f"kv_role={transfer.kv_role!r}: use 'kv_both'")
    if getattr(transfer, "kv_load_failure_policy", "fail") != "fail":
        refuse(
            "kv_load_failure_policy: use 'fail', or a request whose entries are gone is answered as if it named none"
        )
    if getattr(parallel, "data_parallel_size", 1) != 1:
        refuse("data parallelism: each rank would store messages that the others do not find; run a server for each")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            refuse(f"{name}={getattr(parallel, name)}: not supported")
    if vllm_config.speculative_config is not None:
        refuse("speculative decoding: not supported")
    if str(vllm_config.cache_config.cache_dtype) not in ("auto", "bfloat16", "float16", "float32"):
        refuse(f"kv_cache_dtype={vllm_config.cache_config.cache_dtype!r}: quantized keys cannot be rotated; use 'auto'")
    names = set(vllm_config.model_config.architectures or ())
    if not names & {*ARCHITECTURES, *options["architectures"]}:
        refuse(
            f"architecture {sorted(names)}: supported are {', '.join(ARCHITECTURES)}. Learned positions and ALiBi "
            'cannot be moved; for others whose layers all share one rotary embedding set "architectures"'
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        refuse(f"{len(groups)} kinds of attention layers: supported is full attention in all layers")
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
        refuse(f"attention of {type(spec).__name__}: supported is full attention")
    if spec.sliding_window is not None or getattr(spec, "attention_chunk_size", None) is not None:
        refuse("sliding windows count slots, not positions: supported is full attention")
