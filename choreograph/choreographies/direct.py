"""One call, no workflow: what every other choreography is compared with (Prompt Choreography, section 4.1)."""

from ..message import Message
from .performance import Performance

EXAMPLE = (
    "Problem: A box holds 12 pens. Mia buys 3 boxes and gives 8 pens away. Each pen costs 2 dollars. "
    "What are the pens that are left worth?\n"
    "Solution:\n"
    "Mia has 3 boxes of 12 pens: 3 * 12 = 36 pens.\n"
    "She gives 8 away: 36 - 8 = 28 pens are left.\n"
    "Each costs 2 dollars: 28 * 2 = 56 dollars.\n"
    "The answer is \\boxed{{56}}."
)
ASK = f"Solve the problem step by step, with a short line for each step, like this:\n\n{EXAMPLE}\n\nProblem: {{task}}"

NEXT = ("\nProblem", "\nSolution")  # a small model goes on with the example's next problem


def run(p: Performance, task: str) -> Message:
    """The answer, not read yet."""
    problem = p.prefill("problem", p.user(ASK.format(task=task)))
    return p.decode("answer", p.assistant("Solution:\n"), [problem], stop=NEXT)
