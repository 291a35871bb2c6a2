"""Reuse mode `exact`: the engine's prefix mode, with turns of agents.

Without an agent, every request has a session of its own. The requests of a workflow's agents share one, whose tracker
gives the fixed parts of their prompts steps to the next execution.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...agents import Agent
from ...api.engine import Engine
from ...api.message import Message
from ...api.session import Session
from ...utils import call_all
from ..openai.chat_prompt import ChatPrompt
from .agent_tracking import AgentStep
from .answer_plan import Answer, Plan, SourceCounts, decode_prompt
from .message_store import MessageStore, WorkflowKey


def plan_exact(
    engine: Engine,
    store: MessageStore,
    key: WorkflowKey,
    prompt: ChatPrompt,
    answers: Sequence[Answer],
    step: AgentStep,
) -> Plan:
    """Submit a prompt in prefix mode, which reuses its longest cached prefix."""
    tracked = None if step.agent is None else store.agent_sessions.open(key)
    if tracked is None:
        options: dict[str, Any] = {"client_id": key.client, "model": key.model, "labels": key.labels}
        session = engine.session(mode="prefix", seed=0, **options)
    else:
        session = tracked.session
    counts, messages, parents = SourceCounts(), list[Message](), list[Message]()

    def close(is_complete: bool) -> None:
        if is_complete:
            usage = messages[0].usage
            counts.prefix = min(usage.cached_tokens, len(prompt.tokens))
            counts.computed = len(prompt.tokens) - counts.prefix
        if tracked is None:
            session.close()
            return
        releases = [message.release for message in (*messages, *parents)]
        if errors := call_all([*releases, partial(store.agent_sessions.close, key)]):
            raise errors[0]

    try:
        if tracked is None:
            messages += decode_prompt(session, prompt.tokens, (), (), answers)
        else:
            with tracked.tracker.agent(step.agent or "", steps=step.steps) as agent:
                messages += _decode_turn(session, key, prompt.tokens, answers, step, agent, parents)
    except BaseException:
        close(False)
        raise
    return Plan(messages, counts, close)


def _decode_turn(
    session: Session,
    key: WorkflowKey,
    tokens: list[int],
    answers: Sequence[Answer],
    step: AgentStep,
    agent: Agent,
    parents: list[Message],
) -> list[Message]:
    """Submit an agent's prompt in prefix mode, cut where it is marked.

    Args:
        parents: gets all of the prompt but its last token, which is decoded.
    """
    guard: dict[str, Any] = {"model": key.model} | ({"labels": key.labels} if key.labels else {})
    limit = len(tokens) - 1
    end = min(step.fixed_tokens or 0, limit)
    for part in filter(None, (tokens[:end], tokens[end:limit])):
        parents.append(session.prefill(part, **guard))
    if step.fixed_tokens is not None:
        agent.mark_fixed(*parents[: end > 0])
    return decode_prompt(session, tokens[limit:], parents, (), answers, guard=guard)
