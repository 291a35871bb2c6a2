"""One call, the baseline of every other workflow (Prompt Choreography §4.1)."""

from ...api.message import Message
from .run import WorkflowRun, check_choices

EXAMPLE = (
    "Problem: A box holds 12 pens. Mia buys 3 boxes and gives 8 pens away. Each pen costs 2 dollars. "
    "What are the pens that are left worth?\n"
    "Solution:\n"
    "Mia has 3 boxes of 12 pens: 3 * 12 = 36 pens.\n"
    "She gives 8 away: 36 - 8 = 28 pens are left.\n"
    "Each costs 2 dollars: 28 * 2 = 56 dollars.\n"
    "The answer is \\boxed{{56}}."
)

FEW_SHOT_PROMPT = (
    f"Solve the problem step by step, with a short line for each step, like this:\n\n{EXAMPLE}\n\nProblem: {{task}}"
)

ZERO_SHOT_PROMPT = (
    "Solve the problem step by step. Explain your reasoning and put the final answer in \\boxed{{}}.\n\nProblem: {task}"
)

TEXT_PROMPT = "Read the text and answer the question that ends it, in one sentence.\n\n{task}"

TEXT_HEADER = "According to the text,"  # small models then quote the text instead of inventing

STOP_STRINGS = ("\nProblem", "\nSolution")  # small models continue with another problem after the example's


def run(wf: WorkflowRun, task: str, *, prompt: str = "worked") -> Message:
    """Solve a problem in one call.

    Args:
        prompt: "worked" shows an example of short steps, "plain" does not; "text" is for a question
            about a text.
    """
    problem = wf.prefill("problem", wf.user(solve_prompt(task, prompt)))
    return wf.decode("answer", wf.assistant("Solution:\n" + solve_header(prompt)), [problem], stop=STOP_STRINGS)


def solve_prompt(task: str, prompt: str) -> str:
    """Return the request for a solution in one of three styles."""
    styles = {"worked": FEW_SHOT_PROMPT, "plain": ZERO_SHOT_PROMPT, "text": TEXT_PROMPT}
    check_choices(prompt=(prompt, styles))
    return styles[prompt].format(task=task)


def solve_header(prompt: str) -> str:
    """Return the text that starts a solution in this style."""
    return TEXT_HEADER if prompt == "text" else ""
