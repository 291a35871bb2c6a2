"""Prompt Cache: declare text once in a schema, import it in prompts."""

from .cache import PromptCache
from .parser import dumps, load_prompt, load_schema
from .program import Param, program
from .schema import (
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
    "dumps",
    "load_prompt",
    "load_schema",
    "module",
    "parameter",
    "program",
    "scaffold",
    "schema",
    "system",
    "union",
    "user",
]
