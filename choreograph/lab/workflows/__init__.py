"""Workflows of the papers, one per file.

Each file defines `run(wf, task, **options)`. `find` returns a workflow by the name of its file here,
or by the path of any Python file. A file may also define `CONDITIONS`, under which it is compared (by
default prefix and choreographed mode), and `TASK_KIND = "pair"` if a task is two examples.
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
