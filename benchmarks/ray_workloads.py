"""Workloads of the benchmarks of routers: the messages that each request of a workflow reads, and the answer's.

Workflows of a team share messages (they name one `workflow` of the server), and each is a session of its own. What they
have in common is what a team's agents read again and again: the role prompts with instructions and tools, which are equal
in all workflows; the team's handbook, which supervisors and workers read together with the material of their case; the
documents that readers retrieve. Everything else belongs to one workflow: a debate's question, a case, the questions of
a reader, and all answers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from choreograph.cluster.content_keys import ContentKeys


@dataclass(frozen=True)
class Sizes:
    """Tokens of messages, and how many readers share how many documents."""

    system: int = 400  # a role prompt
    question: int = 800  # of a debate; a part of a supervisor's material
    answer: int = 200
    document: int = 1000
    documents: int = 160  # of a team
    readers: int = 96  # workflows of a team
    reader_question: int = 60


Call = tuple[ContentKeys, int]  # tokens by key of what is read, and the key of the answer

ROLE, DOCUMENT, HANDBOOK = range(3)  # kinds of messages that several workflows have in common
QUESTION, PLAN, WORKER, TURN = range(4)  # kinds of a workflow's own; those of later turns follow


def team_key(team: int, kind: int, number: int) -> int:
    """Key of a message that the workflows of a team have in common."""
    return hash((0, team, kind, number))  # of integers: equal in every process; that of -1 is that of -2


def own_key(workflow: int, kind: int, number: int) -> int:
    """Key of a message of one workflow."""
    return hash((1, workflow, kind, number))


def debate(sizes: Sizes, workflow: int, turn: int) -> list[Call]:
    """Three agents over three rounds; each reads its own messages first, so that no two orders are equal."""
    calls: list[Call] = []
    for agent in range(3 if turn < 3 else 0):
        keys = {team_key(0, ROLE, agent): sizes.system, own_key(workflow, QUESTION, 0): sizes.question}
        for speaker in [agent, *(other for other in range(3) if other != agent)]:
            keys |= {own_key(workflow, TURN + earlier, speaker): sizes.answer for earlier in range(turn)}
        calls.append((keys, own_key(workflow, TURN + turn, agent)))
    return calls


def supervisor(sizes: Sizes, workflow: int, turn: int) -> list[Call]:
    """A plan, eight workers, each with its role before the common material, and a summary of their answers."""
    material = {team_key(workflow // sizes.readers, HANDBOOK, 0): sizes.question}
    material |= {own_key(workflow, QUESTION, part): sizes.question for part in range(2)}
    lead, plan = {team_key(0, ROLE, 8): sizes.system}, own_key(workflow, PLAN, 0)
    answers = {own_key(workflow, WORKER, worker): sizes.answer for worker in range(8)}
    if turn == 0:
        return [(lead | material, plan)]
    if turn == 1:
        read = material | {plan: sizes.answer}
        return [({team_key(0, ROLE, worker): sizes.system} | read, key) for worker, key in enumerate(answers)]
    return [(lead | material | {plan: sizes.answer} | answers, own_key(workflow, PLAN, 1))][: turn == 2]


def retrieval(sizes: Sizes, workflow: int, turn: int) -> list[Call]:
    """Four questions of a reader, each over three documents that its team has in common, in any order."""
    if turn == 4:
        return []
    generator, team = random.Random(hash((workflow, turn))), workflow // sizes.readers
    # some documents are read often
    picked = dict.fromkeys(int(sizes.documents * generator.random() ** 2) for _ in range(3))
    keys = {team_key(0, ROLE, 9): sizes.system}
    keys |= {team_key(team, DOCUMENT, document): sizes.document for document in picked}
    return [(keys | {own_key(workflow, QUESTION, turn): sizes.reader_question}, own_key(workflow, TURN, turn))]


WORKLOADS: dict[str, Callable[[Sizes, int, int], list[Call]]] = {
    "debate": debate,
    "supervisor": supervisor,
    "retrieval": retrieval,
}
