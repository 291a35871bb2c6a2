"""Replay a workflow under a condition to list its calls.

Nothing is computed: replayed content decides every branch, so a model with only a tokenizer and limits is enough to
find the calls, what they attend to and their positions.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...api.concurrency import run_concurrently
from ...api.engine import Engine
from ...attention.backend import ForwardContext
from ...attention.metadata import AttentionSpec
from ...attention.rope import Rope
from ...config import CacheConfig, EngineConfig
from ...errors import DataError
from ...models.hf_model import HFModel
from ...models.info import ModelInfo
from ...sampling_params import SamplingParams
from ..workflows import WorkflowFunction, check_options
from ..workflows.run import Condition, Transcript, WorkflowRun
from .traced_calls import TracedCall, as_full_prompts, trace_calls


class TaskTranscript(NamedTuple):
    """Task of a workflow and the tokens that its decodes generated."""

    id: str
    task: Any
    transcript: Transcript  # by stage: generated tokens of each decode, in order


class DryRunModel(HFModel):
    """Model with the tokenizer and limits of another one; logits are zeros."""

    def __init__(self, tokenizer: Any, info: ModelInfo, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer, self.compiled, self._eos_token_ids = tokenizer, None, eos_token_ids
        self.model_info = replace(
            info,
            layers=1,
            query_heads=1,
            kv_heads=1,
            head_dim=2,
            attention_specs=(AttentionSpec(Rope((1.0,))),),
            supports_shift=True,
            fingerprint=f"dry run of {info.fingerprint}",
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
    """Workflow run that refuses requests for log-probabilities."""

    def _decode_args(self, stage: str, number: int, /, **options: Any) -> dict[str, Any]:
        args = super()._decode_args(stage, number, **options)
        if args["sampling"].logprobs is not None:
            raise DataError(f"stage {stage!r} asks for log-probabilities, which a dry run lacks: leave them out")
        return args


def dry_run(
    hf_model: HFModel,
    workflow: WorkflowFunction,
    transcripts: Iterable[TaskTranscript],
    condition: Condition,
    *,
    sampling: SamplingParams,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, list[TracedCall]]]:
    """Yield (id, calls) of every transcript, in order of completion.

    Unless the condition's mode is choreographed, the calls are only the decodes, each after its full prompt.

    Raises:
        DataError: if the workflow's decodes are not exactly those of the transcript.
    """
    model = DryRunModel(hf_model.tokenizer, hf_model.model_info, hf_model.eos_token_ids)
    engine = Engine(model, EngineConfig(CacheConfig(capacity=1 << 18), backend="reference"))
    options = {**(options or {}), **condition.options}
    check_options(workflow, options)

    def replay(transcript: TaskTranscript) -> tuple[str, list[TracedCall]]:
        with engine.session(mode=condition.mode) as session:
            run = _ReplayRun(session, sampling=replace(sampling, logprobs=None), replay=transcript.transcript)
            try:
                workflow(run, transcript.task, **options).result()
                calls = trace_calls(run.calls)
                _check_replayed(transcript.transcript, calls)
            except DataError as exc:
                raise DataError(f"{transcript.id}: {exc}") from None
        return transcript.id, calls if condition.mode == "choreographed" else as_full_prompts(calls)

    for outcome in run_concurrently(engine, (partial(replay, item) for item in transcripts), max_programs=16):
        if outcome.error is not None:
            raise outcome.error
        yield outcome.value


def _check_replayed(transcript: Transcript, calls: Sequence[TracedCall]) -> None:
    """Raise DataError unless every stage decoded as often as in the transcript."""
    counts = Counter(call.stage for call in calls if call.generated is not None)
    if unknown := sorted(stage for stage in counts if stage not in transcript):
        raise DataError(f"the trace does not know stages {unknown}: make it again")
    for stage, messages in transcript.items():
        if counts[stage] != len(messages):
            raise DataError(f"stage {stage!r} decoded {counts[stage]} messages, {len(messages)} in the trace")
