"""The Prompt Markup Language and its cache (Prompt Cache): declare text once, import it in any prompt."""

from .cache import PromptCache
from .objects import (
    Import,
    Module,
    Parameter,
    Prompt,
    Role,
    Scaffold,
    Schema,
    Union,
    assistant,
    module,
    parameter,
    scaffold,
    schema,
    system,
    union,
    user,
)
from .program import Param, program
from .read import read_prompt, read_schema
from .write import write

__all__ = [
    "Import",
    "Module",
    "Param",
    "Parameter",
    "Prompt",
    "PromptCache",
    "Role",
    "Scaffold",
    "Schema",
    "Union",
    "assistant",
    "module",
    "parameter",
    "program",
    "read_prompt",
    "read_schema",
    "scaffold",
    "schema",
    "system",
    "union",
    "user",
    "write",
]
