"""Workflows as programs over token ids that every engine runs: the same prompts and token counts, its own tokens.

An engine offers `text`, a part of prompts, and `ask`, one stage of calls that run together. Parts are joined in the
order given: `Choreograph` names them as parents, `Concatenated` writes them into one prompt for a prefix cache.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from choreograph import Engine, Message
from choreograph.outputs import Mode

from .common import greedy, random_tokens
from .peer_engines import VLLM

Calls = Sequence[tuple[list[int], Sequence[Any]]]  # header and parts of every call


class Side(Protocol):
    """One run of a program on an engine, which collects the seconds to the first token of every call."""

    first_tokens: list[float]

    def text(self, tokens: list[int]) -> Any: ...
    def ask(self, calls: Calls, count: int) -> list[Any]: ...
    def close(self) -> None: ...


class Choreograph:
    """A session of ours."""

    def __init__(self, engine: Engine, mode: Mode) -> None:
        self._engine, self._session = engine, engine.session(mode=mode, seed=0)
        self.first_tokens: list[float] = []

    def text(self, tokens: list[int]) -> Message:
        return self._session.prefill(tokens)

    def ask(self, calls: Calls, count: int) -> list[Message]:
        messages = [self._session.decode(header, parts, sampling=greedy(count), footer=[]) for header, parts in calls]
        self.first_tokens += [float(message.result().timing.ttft or 0) for message in messages]
        return messages

    def close(self) -> None:
        """Release the messages, so that the next run finds nothing in the cache."""
        self._session.close()
        self._engine.clear_cache()


class Concatenated:
    """Prompts joined from parts, on vLLM."""

    def __init__(self, engine: VLLM) -> None:
        self._engine = engine
        self.first_tokens: list[float] = []

    def text(self, tokens: list[int]) -> list[int]:
        return tokens

    def ask(self, calls: Calls, count: int) -> list[list[int]]:
        prompts = [[token for part in parts for token in part] + header for header, parts in calls]
        generated = self._engine.generate(prompts, count)
        self.first_tokens += [times[0] for times in generated.times]
        return [[*header, *output] for (header, _), output in zip(calls, generated.tokens, strict=True)]

    def close(self) -> None:
        self._engine.reset()


def tree_of_thoughts(side: Side) -> None:
    """8 branches of 160 tokens, 4 votes, the answer."""
    problem = side.text(random_tokens(200, seed=1))
    solutions = side.ask([(random_tokens(8, seed=10 + i), [problem]) for i in range(8)], 160)
    instructions, question = side.text(random_tokens(90, seed=2)), side.text(random_tokens(90, seed=3))
    side.ask([(random_tokens(8, seed=20 + i), [instructions, *solutions]) for i in range(4)], 16)
    side.ask([(random_tokens(8, seed=30), [question, solutions[0]])], 160)


def iterative_debate(side: Side) -> None:
    """Two debaters in turn, three rounds; a judge."""
    roles = [side.text(random_tokens(120, seed=40 + i)) for i in range(3)]
    history: list[Any] = []
    for turn in range(6):
        history += side.ask([(random_tokens(8, seed=50 + turn), [roles[turn % 2], *history])], 120)
    side.ask([(random_tokens(8, seed=60), [roles[2], *history])], 60)


def parallel_debate(side: Side) -> None:
    """Three agents answer in each of three rounds, behind all answers of the last."""
    question = side.text(random_tokens(160, seed=70))
    answers: list[Any] = []
    for turn in range(3):
        # an agent reads its own answer first
        contexts = [[question, *answers[i:], *answers[:i]] for i in range(3)]
        answers = side.ask([(random_tokens(8, seed=80 + 3 * turn + i), contexts[i]) for i in range(3)], 160)


def supervisor(side: Side) -> None:
    """A plan, eight workers, and a summary of their results."""
    task = side.text(random_tokens(200, seed=90))
    plan = side.ask([(random_tokens(8, seed=91), [task])], 120)
    roles = [side.text(random_tokens(100, seed=100 + i)) for i in range(8)]
    results = side.ask([(random_tokens(8, seed=110 + i), [roles[i], task, *plan]) for i in range(8)], 120)
    side.ask([(random_tokens(8, seed=92), [task, *results])], 160)


PROGRAMS: dict[str, Callable[[Side], None]] = {
    "Tree of Thoughts": tree_of_thoughts,
    "iterative debate": iterative_debate,
    "parallel debate": parallel_debate,
    "supervisor with eight workers": supervisor,
}
