"""What a workflow has to compute, counted and not timed: performed by the real scheduler and store, step by step, over
a model that says nothing of its own. Owns the scripts that are forced, in both modes and on a GPU alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from choreograph import CacheConfig, Engine, EngineConfig
from choreograph.api.session import Session
from choreograph.attention.backend import ForwardContext
from choreograph.attention.metadata import AttentionMetadata, AttentionSpec
from choreograph.attention.rope import Rope
from choreograph.events import Event
from choreograph.lab.replay.dry_run import DryRunModel
from choreograph.lab.workflows import WorkflowRun, conditions_of, find
from choreograph.lab.workflows.run import Transcript, parallel_groups
from choreograph.models.info import ModelInfo
from choreograph.outputs import Mode
from choreograph.sampling_params import SamplingParams

from .shape import Flow, Shape


class StepWork(NamedTuple):
    """One step: rows that are computed, pairs of a row and a token that it sees, tokens whose keys and values are read
    (a run that many rows see counts once), rows that a token is drawn from. begun: behind the step before, while the
    host still worked on that."""

    rows: int
    pairs: int
    kv_tokens_read: int
    sampled_rows: int
    overlapped: bool = False


@dataclass(frozen=True)
class CountedRun:
    """A run: its steps, and from which step to which every decode waited for its first token. The decodes of one group
    ran side by side."""

    steps: tuple[StepWork, ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]


def count_step_work(metadata: AttentionMetadata, sampled_rows: int) -> StepWork:
    first, last, _, limit, step, _ = metadata.reads.T.astype(np.int64) if len(metadata.reads) else np.zeros((6, 0))
    rows = last - first
    pairs = rows * limit + step * rows * (rows - 1) // 2
    return StepWork(
        metadata.num_tokens,
        int(pairs.sum()),
        int((metadata.kv_runs[:, 1] - metadata.kv_runs[:, 0]).sum()),
        sampled_rows,
    )


def dummy_model_info(max_positions: int, vocab_size: int) -> ModelInfo:
    """Of a model that computes nothing."""
    kinds, cpu = (AttentionSpec(Rope((1.0,))),), torch.device("cpu")
    return ModelInfo(
        "counted", 1, 1, 1, 2, max_positions, vocab_size, kinds, True, torch.float32, cpu, "counted", parameters=0
    )


class CountingModel(DryRunModel):
    """Notes what every step computes."""

    def __init__(self, tokenizer: Any, max_positions: int, vocab_size: int, max_graph_rows: int) -> None:
        super().__init__(tokenizer, dummy_model_info(max_positions, vocab_size), ())
        self.max_graph_rows = max_graph_rows
        self.steps: list[StepWork] = []

    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        forward_context: ForwardContext,
        logits_indices: list[int],
        models: Sequence[str] = (),
    ) -> torch.Tensor:
        self.steps.append(count_step_work(forward_context.metadata, len(logits_indices)))
        return super().forward(tokens, positions, forward_context, logits_indices, models)

    def launch_graph(
        self, tokens: torch.Tensor, positions: list[int], forward_context: ForwardContext, models: Sequence[str]
    ) -> torch.Tensor | None:
        """As on a GPU, where steps of up to so many rows are graphs."""
        if len(positions) > self.max_graph_rows:
            return None
        self.steps.append(count_step_work(forward_context.metadata, len(positions))._replace(overlapped=True))
        return torch.zeros(len(positions), 1)


def count(tokenizer: Any, shape: Shape, mode: Mode, program: Callable[[Session], Sequence[Any]]) -> CountedRun:
    """The steps of a program on a session up to its last token. It returns the steps of its performance."""
    c, most = shape.config, max(shape.rows, default=0)
    model = CountingModel(tokenizer, c.max_position_embeddings, c.vocab_size, most)
    engine = Engine(model, EngineConfig(CacheConfig(capacity=shape.cache_tokens), backend="reference"))
    engine.core.model_runner.overlaps = True
    at: dict[tuple[str, object], int] = {}  # the steps that were done when something happened to a call first

    def hear(event: Event) -> None:
        at.setdefault((event.kind, event.data.get("request")), engine.core.num_steps)

    def ready(message: Any) -> int:
        """When it was submitted and every decode before it was known, as `Timing.ttft` counts."""
        before = (at["generated", p.id] if p.kind == "decode" else ready(p) for p in message.parents)
        return max([at["submitted", message.id], *before])

    engine.events.subscribe(hear)
    with engine.session(mode=mode, seed=0) as session:
        steps = program(session)
        ended = engine.core.num_steps
        waits = [tuple((ready(m), at["token", m.id]) for _, m in group) for group in parallel_groups(steps)]
    assert len(model.steps) == engine.core.num_steps, "a step was begun in vain"
    return CountedRun(tuple(model.steps[:ended]), tuple(waits))


# -- what is said in a workflow ---------------------------------------------------------------------------------


def words_of(tokenizer: Any) -> list[int]:
    """Tokens that are a word behind a blank, however they are joined; none is a number, "yes" or "no"."""
    known = tokenizer.get_vocab()
    words = sorted(w for w in known if w[0] == "\u0120" and w[1:].isascii() and w[1:].isalpha() and len(w) > 4)
    return [known[w] for w in words[:4000]]


def task_of(tokenizer: Any, shape: Shape, seed: int) -> str:
    picked = np.random.default_rng(seed).choice(words_of(tokenizer), shape.task_words)
    return str(tokenizer.decode(picked.tolist())).strip()


def make_transcript(tokenizer: Any, shape: Shape, flow: Flow, seed: int) -> Transcript:
    """What every decode of a workflow says: random words, as many as the shape wants."""
    chance, words = np.random.default_rng([seed, 1]), words_of(tokenizer)
    no = tokenizer.encode(" no", add_special_tokens=False)

    def say(stage: str) -> list[int]:
        said = chance.choice(words, flow.stage_tokens.get(stage, flow.default_tokens)).tolist()
        return [*no, *said[len(no) :]] if stage == "verdict" else said

    return {
        stage: [say(stage) for _ in range(times)] for stage, times in _decodes_per_stage(tokenizer, shape, flow).items()
    }


def _decodes_per_stage(tokenizer: Any, shape: Shape, flow: Flow) -> dict[str, int]:
    """How often each stage of a workflow decodes."""
    options = {"branches": 8, "voters": 4, "agents": 3, "rounds": 3} | flow.options
    rounds = options["rounds"]
    return {
        "tree_of_thoughts": {"solve": options["branches"], "vote": options["voters"], "answer": 1},
        "debate_iterative": {"affirmative": rounds, "negative": rounds, "verdict": rounds - 1, "answer": 1},
        "debate_parallel": {f"round {i + 1}": options["agents"] for i in range(rounds)},
    }[flow.workflow]


def count_flow(tokenizer: Any, shape: Shape, flow: Flow, seed: int = 0) -> dict[str, CountedRun]:
    """A workflow in both modes, forced to the same script."""
    workflow, content = find(flow.workflow), make_transcript(tokenizer, shape, flow, seed)

    def program(session: Session) -> Sequence[Any]:
        sampling = SamplingParams(max_tokens=shape.config.max_position_embeddings)
        p = WorkflowRun(session, sampling=sampling, replay=content)
        workflow(p, task_of(tokenizer, shape, seed), **flow.options).result()
        return p.calls

    conditions = conditions_of(workflow)
    return {name: count(tokenizer, shape, condition.mode, program) for name, condition in conditions.items()}
