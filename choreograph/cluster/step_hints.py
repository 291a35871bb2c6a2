"""Requests that declared step graphs let expect (KVFlow §3.2).

The gateway sends what is known of them ahead, as requests that only load messages. The router chooses their
replica, which from then on holds the messages: so the real request goes there too, unless its load is too high.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..agents import StepGraph
from ..agents.step_graph import Progress
from ..namespace import Client
from ..server.chat_prompt import ChatPrompt, Segment
from ..server.service import GenerationSpec

MAX_RUNS = 4096  # workflows that are followed; the least recently used are forgotten


@dataclass
class WorkflowProgress:
    """What the gateway has seen of one workflow."""

    progress: Progress = field(default_factory=Progress)
    specs: dict[str, GenerationSpec] = field(default_factory=dict)  # last request of each agent
    answers: dict[str, list[Segment]] = field(default_factory=dict)  # to that request
    sent: dict[str, list[Segment]] = field(default_factory=dict)  # last hint of each agent


class StepHints:
    """Follows workflows, and expects requests of the agents that run next."""

    def __init__(self) -> None:
        # by client, workflow and session
        self._runs: OrderedDict[tuple[Client, str, str | None], WorkflowProgress] = OrderedDict()

    def start(self, spec: GenerationSpec, graph: StepGraph | None, session: str | None = None) -> list[GenerationSpec]:
        """Note that a request was sent; return those that may follow it.

        Args:
            session: one of several of the workflow, each with its own steps.
        """
        if graph is None or spec.reuse != "messages" or spec.agent not in graph.dependencies:
            return []
        key = spec.key.client, spec.key.workflow, session
        run = self._runs[key] = self._runs.pop(key) if key in self._runs else WorkflowProgress()
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        run.progress.start(spec.agent)
        run.specs[spec.agent] = spec
        return self._expected(run, graph)

    def end(
        self,
        spec: GenerationSpec,
        graph: StepGraph | None,
        answers: Iterable[tuple[str, Sequence[int]]],
        session: str | None = None,
    ) -> list[GenerationSpec]:
        """Note that a request has ended; return those that may follow it.

        Args:
            answers: text and tokens; none if it failed.
            session: that of its start.
        """
        run = self._runs.get((spec.key.client, spec.key.workflow, session))
        if run is None or spec.agent is None or spec.agent not in run.progress.running:
            return []
        run.progress.end(spec.agent)
        run.answers[spec.agent] = [
            Segment(tuple(tokens), key) for text, tokens in answers for key in spec.keys_of(text)[:1]
        ]
        return [] if graph is None else self._expected(run, graph)

    def _expected(self, run: WorkflowProgress, graph: StepGraph) -> list[GenerationSpec]:
        result = []
        for agent, steps in graph.steps(run.progress).items():
            if steps != 1:
                continue
            known, spec = run.specs.get(agent), run.specs.get(agent) or next(reversed(run.specs.values()))
            segments = [segment for prompt in known.prompts for segment in prompt.segments] if known else []
            for before, reader in graph.edges:
                segments += run.answers.get(before, ()) if reader == agent else ()
            if segments and segments != run.sent.get(agent):
                run.sent[agent] = segments
                prompts = [ChatPrompt([], segments)]
                result.append(replace(spec, prompts=prompts, agent=agent, constraint=None, schema_prompt=None, sent=()))
        return result
