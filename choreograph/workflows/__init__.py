"""The papers' workflows, one file each. A workflow is a function `run(run, task, **options)`.

`find` looks a workflow up by the name of its file here, or by the path of a user's own file: adding one needs no
registry. Beside `run`, a file may hold `CONDITIONS`, the ways in which it is compared (by default prefix mode with
choreographed), and `TASK_KIND = "pair"` if a task is two examples.
"""

from .registry import conditions_of, find, names, source_modules, takes_pairs
from .run import Condition, StageCall, WorkflowFunction, WorkflowRun, check_options, options_of

__all__ = [
    "Condition",
    "StageCall",
    "WorkflowFunction",
    "WorkflowRun",
    "check_options",
    "conditions_of",
    "find",
    "names",
    "options_of",
    "source_modules",
    "takes_pairs",
]
