"""Which calls a workflow makes under a condition when it says what it said before: performed without computing.

Owns the silent model. Repeating known content decides nothing, so a model that knows a tokenizer and limits, and
nothing else, is enough to find out what is called, what it sees, and where everything stands.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..attention.backend import ForwardContext
from ..attention.metadata import AttentionSpec
from ..attention.rope import Rope
from ..config import CacheConfig, EngineConfig
from ..engine.concurrency import run_concurrently
from ..engine.engine import Engine
from ..errors import DataError
from ..models.hf_model import HFModel
from ..models.info import ModelInfo
from ..sampling_params import SamplingParams
from ..workflows import WorkflowFunction, check_options
from ..workflows.run import Condition, Transcript, WorkflowRun
from .trace import TracedCall, as_full_prompts, trace_calls


class TaskTranscript(NamedTuple):
    """A task, and what every decode says in it: per stage, the generated tokens in order."""

    id: str
    task: Any
    transcript: Transcript


class DryRunModel(HFModel):
    """Knows the words and the limits of another model, and says nothing of its own."""

    def __init__(self, tokenizer: Any, info: ModelInfo, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer, self.compiled = tokenizer, None
        self._eos_token_ids = eos_token_ids
        self.model_info = replace(
            info,
            layers=1,
            query_heads=1,
            kv_heads=1,
            head_dim=2,
            attention_specs=(AttentionSpec(Rope((1.0,))),),
            supports_shift=True,
            fingerprint=f"silent {info.fingerprint}",
        )

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        forward_context: ForwardContext,
        logits_indices: list[int],
        models: Sequence[str] = (),
    ) -> torch.Tensor:
        return torch.zeros(len(logits_indices), 1)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids


class _ReplayRun(WorkflowRun):
    """Repeats what was said. How likely that was it does not know, so nothing may depend on it."""

    def _decode_args(self, stage: str, number: int, /, **options: Any) -> dict[str, Any]:
        made = super()._decode_args(stage, number, **options)
        if made["sampling"].logprobs is not None:
            raise DataError(
                f"stage {stage!r} asks for log-probabilities, which a repetition has none of: leave them out"
            )
        return made


def dry_run(
    hf_model: HFModel,
    workflow: WorkflowFunction,
    transcripts: Iterable[TaskTranscript],
    condition: Condition,
    *,
    sampling: SamplingParams,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, list[TracedCall]]]:
    """Of every script its id and the workflow's calls under a condition, as they come to an end. Under a baseline
    they are the decodes alone, each behind its whole prompt."""
    model = DryRunModel(hf_model.tokenizer, hf_model.model_info, hf_model.eos_token_ids)
    engine = Engine(model, EngineConfig(CacheConfig(capacity=1 << 18), backend="reference"))
    given = {**(options or {}), **condition.options}
    check_options(workflow, given)
    silent = replace(sampling, logprobs=None)

    def program(script: TaskTranscript) -> Callable[[], tuple[str, list[TracedCall]]]:
        def run() -> tuple[str, list[TracedCall]]:
            with engine.session(mode=condition.mode) as session:
                p = _ReplayRun(session, sampling=silent, replay=script.transcript)
                try:
                    workflow(p, script.task, **given).result()
                    calls = trace_calls(p.calls)
                except DataError as exc:
                    raise DataError(f"{script.id}: {exc}") from None
            _check_replayed(script, calls)
            return script.id, calls if condition.mode == "choreographed" else as_full_prompts(calls)

        return run

    for outcome in run_concurrently(engine, map(program, transcripts), max_programs=16):
        if outcome.error is not None:
            raise outcome.error
        yield outcome.value


def _check_replayed(transcript: TaskTranscript, calls: Sequence[TracedCall]) -> None:
    """The calls say all of the script, and nothing else."""
    said = Counter(call.stage for call in calls if call.generated is not None)
    unknown = sorted(stage for stage in said if stage not in transcript.transcript)
    if unknown:
        raise DataError(f"{transcript.id}: the trace does not know what {unknown} said")
    for stage, messages in transcript.transcript.items():
        if said[stage] != len(messages):
            raise DataError(f"{transcript.id}: {stage!r} said {len(messages)} messages in the trace, {said[stage]} now")
