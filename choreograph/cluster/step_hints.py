"""Requests that declared step graphs let expect (KVFlow §3.2).

The gateway sends what is known of them ahead, as requests that only load messages, or in `exact` the fixed parts of
their agents. The router chooses their replica, which from then on holds the messages: so the real request goes there too,
unless its load is too high. Steps go with requests and hints, since each replica sees only some of a workflow's turns.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..agents import StepGraph
from ..agents.step_graph import Progress
from ..namespace import Client
from ..server.openai.chat_prompt import ChatPrompt, Segment
from ..server.running_request import GenerationSpec

MAX_RUNS_OF_TENANT = 256  # workflows that are followed; the least recently used are forgotten


@dataclass
class WorkflowProgress:
    """What the gateway has seen of one workflow."""

    tenant: str
    progress: Progress = field(default_factory=Progress)
    client_steps: Mapping[str, float | None] | None = None  # that a client sent last; they replace those of the graph
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
        if graph is None or spec.reuse == "auto" or spec.agent not in graph.dependencies:
            return []
        key = spec.key.client, spec.key.workflow, session
        run = self._runs[key] = self._runs.pop(key) if key in self._runs else WorkflowProgress(spec.key.tenant)
        self._drop_oldest(spec.key.tenant)
        run.progress.start(spec.agent)
        run.specs[spec.agent], run.client_steps = spec, spec.steps or run.client_steps
        run.sent.pop(spec.agent, None)  # its next turn needs what it has now
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

    def _drop_oldest(self, tenant: str) -> None:
        """Forget the oldest workflow of a tenant that has too many."""
        if len(self._runs) <= MAX_RUNS_OF_TENANT:
            return
        own = [key for key, run in self._runs.items() if run.tenant == tenant]
        if len(own) > MAX_RUNS_OF_TENANT:
            del self._runs[own[0]]

    def steps(
        self, spec: GenerationSpec, graph: StepGraph | None, session: str | None = None
    ) -> Mapping[str, float | None] | None:
        """Return the steps after a running request; None if not followed."""
        run = self._runs.get((spec.key.client, spec.key.workflow, session))
        if run is None or graph is None or spec.agent is None or spec.agent not in run.progress.running:
            return None
        if run.client_steps is not None:
            return run.client_steps
        progress = copy.deepcopy(run.progress)
        progress.end(spec.agent)
        return graph.steps(progress)

    def _expected(self, run: WorkflowProgress, graph: StepGraph) -> list[GenerationSpec]:
        result, all_steps = [], graph.steps(run.progress)
        for agent, steps in all_steps.items():
            if steps != 1:
                continue
            known, spec = run.specs.get(agent), run.specs.get(agent) or next(reversed(run.specs.values()))
            if spec.reuse == "exact":
                segments = [Segment(tuple(prompt.tokens)) for prompt in known.prompts] if known else []
                prompts = list(known.prompts) if known else []  # whose start is that of the next one
            else:
                segments = [segment for prompt in known.prompts for segment in prompt.segments] if known else []
                for before, reader in graph.edges:
                    segments += run.answers.get(before, ()) if reader == agent else ()
                prompts = [ChatPrompt([], segments)]
            if segments and segments != run.sent.get(agent):
                run.sent[agent] = segments
                spec = replace(spec, prompts=prompts, agent=agent, steps=run.client_steps or all_steps)
                result.append(replace(spec, constraint=None, schema_prompt=None, sent=()))
        return result
