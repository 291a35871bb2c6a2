"""What a workflow has to compute, counted and not timed: performed by the real scheduler and store, step by step, over
a model that says nothing of its own. Owns the scripts that are forced, in both modes and on a GPU alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.choreographies import Performance, conditions_of, find
from choreograph.choreographies.performance import Content
from choreograph.events import Event
from choreograph.measure import side_by_side
from choreograph.models.facts import ModelFacts
from choreograph.onepass.rehearsal import SilentModel
from choreograph.ops.attend import Step
from choreograph.ops.kind import Kind
from choreograph.ops.plan import Plan
from choreograph.ops.rope import Rotary
from choreograph.session import Session
from choreograph.types import Mode, SamplingParams

from .shape import Flow, Shape


class Work(NamedTuple):
    """One step: rows that are computed, pairs of a row and a token that it sees, tokens whose keys and values are read
    (a run that many rows see counts once), rows that a token is drawn from. begun: behind the step before, while the
    host still worked on that."""

    rows: int
    pairs: int
    seen: int
    drawn: int
    begun: bool = False


@dataclass(frozen=True)
class Counted:
    """A run: its steps, and from which step to which every decode waited for its first token. The decodes of one group
    ran side by side."""

    steps: tuple[Work, ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]


def work_of(plan: Plan, drawn: int) -> Work:
    first, last, _, limit, step, _ = plan.readers.T.astype(np.int64) if len(plan.readers) else np.zeros((6, 0))
    rows = last - first
    pairs = rows * limit + step * rows * (rows - 1) // 2
    return Work(plan.rows, int(pairs.sum()), int((plan.segments[:, 1] - plan.segments[:, 0]).sum()), drawn)


def facts_of(positions: int, vocabulary: int) -> ModelFacts:
    """Of a model that computes nothing."""
    kinds, cpu = (Kind(Rotary((1.0,))),), torch.device("cpu")
    return ModelFacts(
        "counted", 1, 1, 1, 2, positions, vocabulary, kinds, True, torch.float32, cpu, "counted", parameters=0
    )


class Counting(SilentModel):
    """Notes what every step computes."""

    def __init__(self, tokenizer: Any, positions: int, vocabulary: int, most: int) -> None:
        super().__init__(tokenizer, facts_of(positions, vocabulary), ())
        self.most = most
        self.steps: list[Work] = []

    def forward(
        self, tokens: list[int], positions: list[int], step: Step, rows: list[int], models: Sequence[str] = ()
    ) -> torch.Tensor:
        self.steps.append(work_of(step.plan, len(rows)))
        return super().forward(tokens, positions, step, rows, models)

    def begin(
        self, tokens: torch.Tensor, positions: list[int], step: Step, models: Sequence[str]
    ) -> torch.Tensor | None:
        """As on a GPU, where steps of up to so many rows are graphs."""
        if len(positions) > self.most:
            return None
        self.steps.append(work_of(step.plan, len(positions))._replace(begun=True))
        return torch.zeros(len(positions), 1)


def count(tokenizer: Any, shape: Shape, mode: Mode, program: Callable[[Session], Sequence[Any]]) -> Counted:
    """The steps of a program on a session up to its last token. It returns the steps of its performance."""
    c, most = shape.config, max(shape.rows, default=0)
    model = Counting(tokenizer, c.max_position_embeddings, c.vocab_size, most)
    engine = Engine(model, EngineConfig(CacheConfig(tokens=shape.room), backend="reference"))
    engine.runner.computer.goes_ahead = True
    at: dict[tuple[str, object], int] = {}  # the steps that were done when something happened to a call first

    def hear(event: Event) -> None:
        at.setdefault((event.kind, event.facts.get("call")), engine.runner.steps)

    def ready(message: Any) -> int:
        """When it was submitted and every decode before it was known, as `Timing.ttft` counts."""
        before = (at["known", p.id] if p.kind == "decode" else ready(p) for p in message.parents)
        return max([at["submitted", message.id], *before])

    engine.events.listen(hear)
    with engine.session(mode=mode, seed=0) as session:
        steps = program(session)
        ended = engine.runner.steps
        waits = [tuple((ready(m), at["token", m.id]) for _, m in group) for group in side_by_side(steps)]
    assert len(model.steps) == engine.runner.steps, "a step was begun in vain"
    return Counted(tuple(model.steps[:ended]), tuple(waits))


# -- what is said in a workflow ---------------------------------------------------------------------------------


def words_of(tokenizer: Any) -> list[int]:
    """Tokens that are a word behind a blank, however they are joined; none is a number, "yes" or "no"."""
    known = tokenizer.get_vocab()
    words = sorted(w for w in known if w[0] == "\u0120" and w[1:].isascii() and w[1:].isalpha() and len(w) > 4)
    return [known[w] for w in words[:4000]]


def task_of(tokenizer: Any, shape: Shape, seed: int) -> str:
    picked = np.random.default_rng(seed).choice(words_of(tokenizer), shape.task)
    return str(tokenizer.decode(picked.tolist())).strip()


def script(tokenizer: Any, shape: Shape, flow: Flow, seed: int) -> Content:
    """What every decode of a workflow says: random words, as many as the shape wants."""
    chance, words = np.random.default_rng([seed, 1]), words_of(tokenizer)
    no = tokenizer.encode(" no", add_special_tokens=False)

    def say(stage: str) -> list[int]:
        said = chance.choice(words, flow.said.get(stage, flow.short)).tolist()
        return [*no, *said[len(no) :]] if stage == "verdict" else said

    return {stage: [say(stage) for _ in range(times)] for stage, times in _calls(tokenizer, shape, flow).items()}


def _calls(tokenizer: Any, shape: Shape, flow: Flow) -> dict[str, int]:
    """How often each stage of a workflow decodes."""
    options = {"branches": 8, "voters": 4, "agents": 3, "rounds": 3} | flow.options
    rounds = options["rounds"]
    return {
        "tree_of_thoughts": {"solve": options["branches"], "vote": options["voters"], "answer": 1},
        "mad_iter": {"affirmative": rounds, "negative": rounds, "verdict": rounds - 1, "answer": 1},
        "mad_par": {f"round {i + 1}": options["agents"] for i in range(rounds)},
    }[flow.workflow]


def count_flow(tokenizer: Any, shape: Shape, flow: Flow, seed: int = 0) -> dict[str, Counted]:
    """A workflow in both modes, forced to the same script."""
    workflow, content = find(flow.workflow), script(tokenizer, shape, flow, seed)

    def program(session: Session) -> Sequence[Any]:
        sampling = SamplingParams(max_tokens=shape.config.max_position_embeddings)
        p = Performance(session, sampling=sampling, forced=content)
        workflow(p, task_of(tokenizer, shape, seed), **flow.options).result()
        return p.steps

    conditions = conditions_of(workflow)
    return {name: count(tokenizer, shape, condition.mode, program) for name, condition in conditions.items()}
