"""Which calls a workflow makes under a condition when it says what it said before: performed without computing.

Owns the silent model. Repeating known content decides nothing, so a model that knows a tokenizer and limits, and
nothing else, is enough to find out what is called, what it sees, and where everything stands.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..choreographies import Performance, Workflow, check_options
from ..choreographies.performance import Condition, Content
from ..config import CacheConfig, EngineConfig
from ..core import Engine
from ..errors import DataError
from ..models.adapter import Adapter
from ..models.facts import ModelFacts
from ..ops.attend import Step
from ..ops.kind import Kind
from ..ops.rope import Rotary
from ..together import together
from ..types import SamplingParams
from .calls import TracedCall, as_prompts, calls_of


class Script(NamedTuple):
    """A task, and what every decode says in it: per stage, the generated tokens in order."""

    id: str
    task: Any
    content: Content


class SilentModel(Adapter):
    """Knows the words and the limits of another model, and says nothing of its own."""

    def __init__(self, tokenizer: Any, facts: ModelFacts, end_tokens: tuple[int, ...]) -> None:
        self.tokenizer, self.compiled = tokenizer, None
        self._ends = end_tokens
        self.facts = replace(
            facts,
            layers=1,
            query_heads=1,
            kv_heads=1,
            head_dim=2,
            kinds=(Kind(Rotary((1.0,))),),
            movable=True,
            fingerprint=f"silent {facts.fingerprint}",
        )

    def forward(
        self, tokens: list[int], positions: list[int], step: Step, rows: list[int], models: Sequence[str] = ()
    ) -> torch.Tensor:
        return torch.zeros(len(rows), 1)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return self._ends


class _Rehearsal(Performance):
    """Repeats what was said. How likely that was it does not know, so nothing may depend on it."""

    def _to_decode(self, stage: str, number: int, /, **call: Any) -> dict[str, Any]:
        made = super()._to_decode(stage, number, **call)
        if made["sampling"].logprobs is not None:
            raise DataError(
                f"stage {stage!r} asks for log-probabilities, which a repetition has none of: leave them out"
            )
        return made


def rehearse(
    like: Adapter,
    workflow: Workflow,
    scripts: Iterable[Script],
    condition: Condition,
    *,
    sampling: SamplingParams,
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, list[TracedCall]]]:
    """Of every script its id and the workflow's calls under a condition, as they come to an end. Under a baseline
    they are the decodes alone, each behind its whole prompt."""
    model = SilentModel(like.tokenizer, like.facts, like.end_tokens)
    engine = Engine(model, EngineConfig(CacheConfig(tokens=1 << 18), backend="reference"))
    given = {**(options or {}), **condition.options}
    check_options(workflow, given)
    silent = replace(sampling, logprobs=None)

    def program(script: Script) -> Callable[[], tuple[str, list[TracedCall]]]:
        def run() -> tuple[str, list[TracedCall]]:
            with engine.session(mode=condition.mode) as session:
                p = _Rehearsal(session, sampling=silent, forced=script.content)
                try:
                    workflow(p, script.task, **given).result()
                    calls = calls_of(p.steps)
                except DataError as problem:
                    raise DataError(f"{script.id}: {problem}") from None
            _check_said(script, calls)
            return script.id, calls if condition.mode == "choreographed" else as_prompts(calls)

        return run

    for outcome in together(engine, map(program, scripts), at_once=16):
        if outcome.error is not None:
            raise outcome.error
        yield outcome.value


def _check_said(script: Script, calls: Sequence[TracedCall]) -> None:
    """The calls say all of the script, and nothing else."""
    said = Counter(call.stage for call in calls if call.generated is not None)
    unknown = sorted(stage for stage in said if stage not in script.content)
    if unknown:
        raise DataError(f"{script.id}: the trace does not know what {unknown} said")
    for stage, messages in script.content.items():
        if said[stage] != len(messages):
            raise DataError(f"{script.id}: {stage!r} said {len(messages)} messages in the trace, {said[stage]} now")
