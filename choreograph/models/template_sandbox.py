"""Chat templates rendered with bounds on time and memory.

Templates come with models from the Hub and are untrusted code. The environment of transformers denies them access
to the interpreter, but bounds neither loops nor values: here loops, calls and filters look at the time, and values
at their size.

One rendering also says where every message begins: compiled templates report each iteration of a loop
over messages, and the number of characters written before it.
"""

import re
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 3.0  # of one rendering, on the processor
MAX_SIZE = 1 << 24  # characters of one rendering, and length of one value

_WIDE = re.compile(r"\d{7}|%[^%a-zA-Z]*\*")  # width or precision of many digits, or from an argument, in a format


class TemplateLimitError(jinja2.TemplateError):
    """Chat template that exceeds the bounds on time or output."""


class ChatRejectedError(jinja2.TemplateError):
    """Chat that the template refuses or fails on."""

    def __init__(self, reason: str, message_index: int | None) -> None:
        super().__init__(reason)
        self.message_index = message_index  # message that was being rendered; None: outside of a loop over messages


@dataclass(frozen=True)
class RenderedChat:
    """Text of a chat, and where its messages begin."""

    text: str
    # ascending pairs (number of messages, characters they take); messages that the template merges have no own pair
    ends: tuple[tuple[int, int], ...] = ()


@dataclass
class _Rendering:
    """State of one rendering."""

    message_index: dict[int, int] = field(default_factory=dict)  # by id of the message's dict
    deadline: float = field(default_factory=lambda: time.thread_time() + MAX_SECONDS)
    num_chars: int = 0  # of the text so far
    num_written: int = 0  # characters, also those of macros and blocks, whose text is written again
    current_message: int | None = None
    # by loop: pairs (message index, characters before it); None for loops that are not in the order of messages
    starts: dict[int, list[tuple[int, int]] | None] = field(default_factory=dict)
    loop_ends: dict[int, int] = field(default_factory=dict)  # by loop: characters before its end

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise TemplateLimitError(f"the chat template runs longer than {MAX_SECONDS:g} s")

    def write(self, text: str) -> str:
        """Count a part of the text."""
        self.num_written += len(text)
        if self.num_written > 4 * MAX_SIZE:
            raise TemplateLimitError(f"the chat template writes more than {MAX_SIZE:,} characters")
        return text

    def start_message(self, message: Any, loop: int) -> None:
        index = self.message_index.get(id(message))
        if index is None:
            return
        self.current_message, starts = index, self.starts.setdefault(loop, [])
        if starts is not None and starts and starts[-1][0] >= index:
            self.starts[loop] = None
        elif starts is not None:
            starts.append((index, self.num_chars))

    def end_loop(self, loop: int) -> None:
        if loop in self.starts:
            self.current_message, self.loop_ends[loop] = None, self.num_chars

    def ends(self) -> tuple[tuple[int, int], ...]:
        """Return the ends of messages in the loop that separates most."""
        result: list[tuple[int, int]] = []
        for loop, starts in self.starts.items():
            if starts:
                ends = [*starts, (starts[-1][0] + 1, self.loop_ends.get(loop, self.num_chars))]
                if len({end for _, end in ends}) > len({end for _, end in result}):
                    result = ends
        return tuple(result)


_RENDERING: ContextVar[_Rendering] = ContextVar("rendering")  # of this thread


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment of transformers' chat templates in which all that repeats or grows is checked."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        theirs = _compile_jinja_template("").environment
        extensions = [type(extension) for extension in theirs.extensions.values()]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.globals = theirs.globals
        self.filters = {name: _bounded(name, function) for name, function in theirs.filters.items()}
        self.filters |= {"start_message": _start_message, "end_loop": _end_loop}
        self.filters |= {"bounded_size": _check_size, "written": _write}

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template in which every loop, text and concatenation is checked."""
        tree = _Instrumentation().visit(self.parse(source)).set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that would fill the memory."""
        if operator == "*":
            for value, number in ((left, right), (right, left)):
                if isinstance(number, int) and hasattr(value, "__len__"):
                    _check_length(len(value) * number)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _check_size(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        """Refuse arguments and results that would fill the memory."""
        _RENDERING.get().check_time()
        name, method = getattr(__obj, "__name__", ""), getattr(__obj, "__wrapped__", __obj)
        if not isinstance(__obj, LoopContext):  # whose iterations are checked
            _check_arguments(name, getattr(method, "__self__", None), (*args, *kwargs.values()))
        return _check_size(super().call(__context, __obj, *args, **kwargs))


class _Instrumentation(NodeTransformer):
    """Adds filters to a parsed template: to loops, texts and concatenations."""

    def __init__(self) -> None:
        self._num_loops = 0

    def visit_For(self, loop: nodes.For) -> list[nodes.Node]:  # noqa: N802 - as in jinja2
        """Report the start of each iteration, and the end of the loop."""
        self.generic_visit(loop)
        number, self._num_loops, line = self._num_loops, self._num_loops + 1, loop.lineno
        item: nodes.Expr = nodes.Const(None, lineno=line)
        if isinstance(loop.target, nodes.Name):
            item = nodes.Name(loop.target.name, "load", lineno=line)
        loop.body.insert(0, nodes.ExprStmt(_filter("start_message", item, number), lineno=line))
        return [loop, nodes.ExprStmt(_filter("end_loop", nodes.Const(number, lineno=line)), lineno=line)]

    def visit_Concat(self, joined: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Check the size of the result."""
        self.generic_visit(joined)
        return _filter("bounded_size", joined)

    def visit_Output(self, output: nodes.Output) -> nodes.Node:  # noqa: N802
        """Count the characters of each part."""
        self.generic_visit(output)
        output.nodes = [_filter("written", node) for node in output.nodes]
        return output


def _filter(name: str, value: nodes.Expr, *arguments: int) -> nodes.Filter:
    constants = [nodes.Const(argument, lineno=value.lineno) for argument in arguments]
    return nodes.Filter(value, name, constants, [], None, None, lineno=value.lineno)


# the context keeps the calls from being evaluated when the template is compiled


@jinja2.pass_context
def _start_message(context: Any, message: Any, loop: int) -> None:
    _RENDERING.get().check_time()
    _RENDERING.get().start_message(message, loop)


@jinja2.pass_context
def _end_loop(context: Any, loop: int) -> None:
    _RENDERING.get().end_loop(loop)


@jinja2.pass_context
def _write(context: Any, value: Any) -> str:
    return _RENDERING.get().write(str(value))


def _bounded(name: str, function: Any) -> Any:
    @wraps(function)  # keeps what jinja2 notes on the function: which argument is the context
    def checked(*args: Any, **kwargs: Any) -> Any:
        _RENDERING.get().check_time()
        _check_arguments(name, args[0] if args else None, (*args, *kwargs.values()))
        return _check_size(function(*args, **kwargs))

    return checked


def _check_arguments(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        if isinstance(argument, int):
            _check_length(argument)
    if name == "format" and isinstance(value, str):
        _check_format(value)
    if name in ("replace", "join"):
        lengths = sorted(len(x) for x in (value, *arguments) if isinstance(x, (str, list, tuple)))
        _check_length(lengths[-1] * lengths[-2] if len(lengths) > 1 else 0)


def _check_size(value: Any) -> Any:
    """Return a value, or raise if it is too long."""
    if isinstance(value, (str, list, tuple, dict)):
        _check_length(len(value))
    elif isinstance(value, int):
        _check_length(value.bit_length())
    return value


def _check_length(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"the chat template makes a value of size {size:,}; the limit is {MAX_SIZE:,}")


def _check_format(format: str) -> None:
    if _WIDE.search(format):
        raise TemplateLimitError(f"the chat template formats with a width of many digits: {format!r:.60}")


@lru_cache(64)
def _compile(source: str) -> jinja2.Template:
    return _BoundedEnvironment().compile_bounded(source)


def render_template(source: str, variables: Mapping[str, Any]) -> RenderedChat:
    """Render a chat template.

    Args:
        variables: of the template; the dicts in "messages" differ from each other.

    Raises:
        TemplateLimitError: if it exceeds MAX_SECONDS or MAX_SIZE.
        ChatRejectedError: if the template is invalid or refuses the conversation.
    """
    messages = variables.get("messages") or ()
    rendering = _Rendering({id(message): index for index, message in enumerate(messages)})
    _RENDERING.set(rendering)
    parts: list[str] = []
    try:
        for part in _compile(source).generate(variables):
            parts.append(part)
            rendering.num_chars += len(part)
            _check_length(rendering.num_chars)
    except TemplateLimitError:
        raise
    except (RecursionError, MemoryError) as exc:
        raise TemplateLimitError(f"the chat template raises {type(exc).__name__}") from None
    except Exception as exc:  # of the template's code
        raise ChatRejectedError(str(exc), rendering.current_message) from None
    return RenderedChat("".join(parts), rendering.ends())


def render_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> RenderedChat:
    """Render a conversation as `tokenizer.apply_chat_template` does, within the bounds.

    Args:
        messages: turns with `role` and `content`.
        tools: JSON schemas of the functions that the model may call.
        variables: further variables of the template, as `enable_thinking`.

    Raises:
        TemplateLimitError, ChatRejectedError: see `render_template`.
    """
    try:
        source = tokenizer.get_chat_template(tools=tools)
    except ValueError as exc:  # several templates, none of which is the default
        raise ChatRejectedError(str(exc), None) from None
    options = {**getattr(tokenizer, "special_tokens_map", {}), **(variables or {})}
    options |= {"messages": [dict(message) for message in messages], "tools": tools, "documents": None}
    options["add_generation_prompt"] = add_generation_prompt
    return render_template(source, options)
