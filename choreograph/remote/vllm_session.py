"""Sessions on a vLLM server that runs `ChoreographConnector` (extra `remote`).

A session is that of the library: arguments, checks, seeds and values are the same. Only where messages are computed
differs: each is one request to `/v1/completions`, which names its parents as spans of stored entries.

>>> from choreograph import connect
>>> engine = connect("http://127.0.0.1:8000", engine="vllm")
>>> with engine.session(seed=0) as session:
...     print(session.decode(session.assistant("The sky is"), max_tokens=8).text)
"""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, Unpack

from ..api.call import FeatureOptions
from ..api.chat import ChatTemplate
from ..api.message import Message
from ..api.session import Session
from ..config import as_int
from ..context.feature import ContextFeature, FeatureSet, RequestDraft
from ..errors import ChoreographError, ConfigError
from ..features.agent_tags import AgentTags
from ..features.blocked_turns import BlockedTurns
from ..features.guard import Guard, LabelFlow
from ..features.other_models import OtherModels, kv_reuse_of
from ..features.repair.planner import ContextRepair
from ..models.loader import Vocabulary, load_vocabulary
from ..namespace import Client
from ..outputs import BASE_MODEL, MODES, Mode
from ..utils import call_all
from ..vllm.reuse_params import NO_ALIGNMENT
from .vllm_client import VllmClient
from .vllm_core import VllmCore


class ServedModels(NamedTuple):
    """Names of the models that a server has loaded."""

    names: tuple[str, ...]
    remote: tuple[str, ...] = ()

    def weights_key(self, model: str) -> tuple[str, ...]:
        return (model,)

    def weights_group(self, model: str) -> str:
        return model

    def fingerprint(self, model: str) -> str:
        return model


class VllmEngine:
    """Engine whose messages a vLLM server computes.

    Args:
        tokenizer: a tokenizer, a folder or a Hub id; None for the `root` of the served model.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float, tokenizer: Any = None) -> None:
        self._client = VllmClient(url, api_key, timeout)
        try:
            base, *adapters = self._client.call(self._client.models())
            self._vocabulary = _vocabulary_of(tokenizer, base.get("root"))
        except BaseException:
            self._client.close()
            raise
        self.tokenizer = self._vocabulary.tokenizer
        self.chat = None if self.tokenizer is None else ChatTemplate(self.tokenizer)
        self.model_info = SimpleNamespace(
            name=base.get("root") or base["id"],
            fingerprint=base["id"],
            vocab_size=self._vocabulary.size,
            max_positions=base["max_model_len"],
        )
        self.models = (BASE_MODEL, *(model["id"] for model in adapters))
        hf_model = SimpleNamespace(
            tokenizer=self.tokenizer, model_info=self.model_info, eos_token_ids=self._vocabulary.eos_token_ids
        )
        guard = Guard()
        first = AgentTags(), BlockedTurns(), guard
        features = FeatureSet((*first, OtherModels(), VllmLimits(), ContextRepair(), LabelFlow(guard)))
        self.core = VllmCore(self._client, hf_model, ServedModels(self.models), base["id"], features)

    def session(
        self,
        *,
        mode: Mode = "choreographed",
        seed: int | None = None,
        client_id: str | Client = "default",
        model: str = BASE_MODEL,
        **options: Unpack[FeatureOptions],
    ) -> "VllmSession":
        """Open a session, as `Engine.session`.

        Args:
            mode: "choreographed", or "prefix": plain requests, which reuse what vLLM's prefix cache has.
            client_id: sent as `cache_salt`, unless it is "default".
            model: "base" or a LoRA adapter that the server has loaded.
            options: defaults of calls; a repair computes the first tokens of every reused parent again.
        """
        if mode not in MODES or mode == "naive":
            raise ConfigError(f"mode={mode!r}: on vLLM use 'choreographed' or 'prefix'")
        number = as_int(seed)
        if number is None and seed is not None:
            raise ConfigError(f"seed={seed!r}: use a whole number or None")
        if mode == "choreographed":
            self.core.check_connector()
        session = VllmSession(
            self.core,  # type: ignore[arg-type]  # it has what a session uses
            self.chat,
            mode=mode,
            seed=number,
            client_id=client_id,
            model=model,
            options=options,
        )
        session.engine = self  # type: ignore[assignment]
        return session

    def describe(self) -> dict[str, Any]:
        """Return what of the engine determines a result."""
        return {"model": self.model_info.name, "engine": {"backend": "vllm"}}

    def clear_cache(self) -> None:
        """Do nothing: closed sessions have released their entries."""

    def run_until_idle(self) -> None:
        """Wait until every submitted request is finished."""
        self.core.wait_until_idle()

    def close(self) -> None:
        """Cancel all requests and disconnect."""
        self.core.close()

    def __enter__(self) -> "VllmEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _vocabulary_of(tokenizer: Any, root: str | None) -> Vocabulary:
    is_loaded = tokenizer is not None and not isinstance(tokenizer, str)
    source = tokenizer if isinstance(tokenizer, str) else root
    try:
        return load_vocabulary(source, tokenizer if is_loaded else None)
    except ChoreographError as exc:
        if is_loaded:  # the root is a folder of the server's machine
            return load_vocabulary(None, tokenizer)
        raise ConfigError(f"tokenizer={tokenizer!r}: {exc}: give a tokenizer, a folder or a Hub id") from None


def _needs_engine(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise ConfigError: the KV cache is vLLM's."""
        raise ConfigError(f"{name}: vLLM owns the KV cache of this message: use an Engine")

    return refuse


class VllmMessage(Message):
    """Handle of one message that vLLM computes."""

    export_kv, explain, pin, unpin = map(_needs_engine, ("export_kv", "explain", "pin", "unpin"))
    constrain, on_logprobs = map(_needs_engine, ("constrain", "on_logprobs"))

    def wait_encoded(self) -> Self:
        """Wait for the message; its last tokens are computed for readers."""
        return self.result()

    async def _await_result(self) -> Self:
        return await asyncio.to_thread(self.result)


class VllmLimits(ContextFeature):
    """Refuses options that vLLM cannot serve."""

    def prepare(self, draft: RequestDraft) -> None:
        """Check a call.

        Raises:
            ConfigError: if it needs an engine of this process.
        """
        request = draft.request
        kv_reuse, state = kv_reuse_of(request), request.decode_state
        reuses = request.parents and request.mode == "choreographed"  # elsewhere a repair is ignored
        repair = draft.options.get("repair") if reuses else None
        if kv_reuse != "recompute":
            raise ConfigError(
                f"kv_reuse={kv_reuse!r}: vLLM reuses KV of the same model alone: use 'recompute', or an Engine"
            )
        if repair is not None and repair.alignment is not None:
            raise ConfigError(f"repair alignment={repair.alignment!r}: {NO_ALIGNMENT}")
        if repair is not None and repair.changes and repair.strategy != "first":
            raise ConfigError(
                f"repair strategy={repair.strategy!r}: vLLM has 'first': use a share from 0 to 1, or an Engine"
            )
        if state is not None and state.sampling.prompt_logprobs is not None:
            raise ConfigError("prompt_logprobs: vLLM turns its connector off for them: use an Engine, or logprobs")


class VllmSession(Session):
    """Messages of one workflow on vLLM, with the calls of `Session`."""

    message_type = VllmMessage
    import_message, import_kv, partial_prefill = map(_needs_engine, ("import_message", "import_kv", "partial_prefill"))

    def close(self) -> None:
        """Release every message; tell the server. Final values stay readable."""
        self.closed = True
        errors = call_all([*self.on_close, *(message._release_quietly for message in reversed(self.messages))])
        errors += call_all([partial(self.core.end_session, self.id)])  # type: ignore[attr-defined]
        for exc in errors:
            raise exc
