"""Chat templates rendered with bounds on time and output.

Templates come with models from the Hub and are untrusted code. The sandbox of transformers denies
them access to the interpreter, but does not bound loops or memory.

One rendering also says where every message begins: compiled templates report each iteration of a loop
over messages, and the number of characters written before it.
"""

import datetime
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_ITERATIONS = 300_000  # loop iterations and calls of one rendering
MAX_OUTPUT = 1 << 24  # characters of one rendering, and of one repeated or padded string


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
    num_iterations: int = 0  # loop iterations, and ten a call
    num_chars: int = 0  # written so far
    current_message: int | None = None
    # by loop: pairs (message index, characters before it); None for loops that are not in the order of messages
    starts: dict[int, list[tuple[int, int]] | None] = field(default_factory=dict)
    loop_ends: dict[int, int] = field(default_factory=dict)  # by loop: characters before its end

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


class _GenerationTag(Extension):
    """Jinja extension that ignores the tag `{% generation %}`.

    The tag marks the text that the model writes; the rendered text does not change.
    """

    tags = {"generation"}  # noqa: RUF012 - as declared by jinja2

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Environment of transformers' chat templates that counts iterations and calls."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._local = threading.local()  # templates are shared by threads
        self.filters["tojson"] = _to_json
        self.filters |= {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters["bounded_loop"], self.filters["bounded_size"] = self._bounded_loop, _check_size
        self.filters["start_message"], self.filters["end_loop"] = self._start_message, self._end_loop
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template in which every loop and concatenation is checked."""
        tree = self.parse(source)
        for number, loop in enumerate(list(tree.find_all(nodes.For))):
            loop.iter = nodes.Filter(loop.iter, "bounded_loop", [], [], None, None, lineno=loop.lineno)
            if isinstance(loop.target, nodes.Name):
                item = nodes.Name(loop.target.name, "load", lineno=loop.lineno)
                loop.body.insert(0, _statement("start_message", item, number))
                _insert_after(tree, loop, _statement("end_loop", nodes.Const(number, lineno=loop.lineno)))
        for joined in list(tree.find_all(nodes.Concat)):
            inner = nodes.Concat(joined.nodes, lineno=joined.lineno)
            joined.nodes = [nodes.Filter(inner, "bounded_size", [], [], None, None, lineno=joined.lineno)]
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    @property
    def rendering(self) -> _Rendering:
        """State of this thread's rendering."""
        result: _Rendering = self._local.rendering
        return result

    @rendering.setter
    def rendering(self, value: _Rendering) -> None:
        self._local.rendering = value

    def _start_message(self, message: Any, loop: int) -> None:
        self.rendering.start_message(message, loop)

    @jinja2.pass_context  # keeps the call from being evaluated when the template is compiled
    def _end_loop(self, context: Any, loop: int) -> None:
        self.rendering.end_loop(loop)

    def count(self, number: int = 1) -> None:
        rendering = self.rendering
        rendering.num_iterations += number
        if rendering.num_iterations > MAX_ITERATIONS:
            raise TemplateLimitError(f"the chat template runs more than {MAX_ITERATIONS:,} iterations")

    def _bounded_loop(self, iterable: Any) -> Any:
        if isinstance(iterable, jinja2.Undefined):
            return iterable
        if not isinstance(iterable, (list, tuple, str, dict, range)):
            iterable = list(islice(iterable, MAX_ITERATIONS + 1))  # loops may ask for the length
        self.count(len(iterable))
        return iterable

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that would fill the memory."""
        sizes = [len(x) if hasattr(x, "__len__") else 1 for x in (left, right)]
        numbers = [x for x in (left, right) if isinstance(x, int)]
        if operator == "+":
            _check_length(sum(sizes))
        elif operator == "*" and len(numbers) == 1:
            _check_length(max(sizes) * numbers[0])
        elif operator in ("*", "**") and len(numbers) == 2:
            bits = [abs(number).bit_length() for number in numbers]
            _check_length(sum(bits) if operator == "*" else bits[0] * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        """Count the call; refuse arguments and results that would fill the memory."""
        __self.count(10)  # a call costs about as much as ten iterations
        name, method = getattr(__obj, "__name__", ""), getattr(__obj, "__wrapped__", __obj)
        _check_arguments(name, getattr(method, "__self__", None), (*args, *kwargs.values()))
        return _check_size(super().call(__context, __obj, *args, **kwargs))


def _statement(filter_name: str, value: nodes.Expr, *arguments: int) -> nodes.ExprStmt:
    """Return a statement that calls a filter and writes nothing."""
    line = value.lineno
    constants = [nodes.Const(argument, lineno=line) for argument in arguments]
    return nodes.ExprStmt(nodes.Filter(value, filter_name, constants, [], None, None, lineno=line), lineno=line)


def _insert_after(tree: nodes.Template, node: nodes.Node, statement: nodes.Node) -> None:
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for _, children in parent.iter_fields():
            if isinstance(children, list):
                for index, child in enumerate(children):
                    if child is node:
                        children.insert(index + 1, statement)
                        return


def _bounded(name: str, function: Any) -> Any:
    @wraps(function)  # keeps what jinja2 notes on the function: which argument is the context
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(name, args[0] if args else None, (*args, *kwargs.values()))
        return _check_size(function(*args, **kwargs))

    return checked


def _check_arguments(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    if name not in ("range", "safe_range"):
        for argument in arguments:
            if isinstance(argument, int):
                _check_length(argument)
    if name == "format" and isinstance(value, str):
        _check_widths(value)
    if name in ("replace", "join"):
        lengths = [len(x) for x in (value, *arguments) if isinstance(x, (str, list, tuple))]
        _check_length(sorted(lengths)[-1] * max(1, sorted(lengths)[-2]) if len(lengths) > 1 else 0)


def _check_size(value: Any) -> Any:
    """Return a value, or raise if it is too long."""
    if isinstance(value, (str, list, tuple, dict)):
        _check_length(len(value))
    return value


def _check_length(size: int) -> None:
    if size > MAX_OUTPUT:
        raise TemplateLimitError(f"the chat template makes a value of size {size:,}; the limit is {MAX_OUTPUT:,}")


def _check_widths(format: str) -> None:
    """Refuse a width or precision of many digits in a format string."""
    digits = 0
    for character in format:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 6:
            raise TemplateLimitError(f"the chat template formats with a width of {digits} digits")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(64)
def _compile(source: str) -> tuple[_BoundedEnvironment, jinja2.Template]:
    environment = _BoundedEnvironment()
    return environment, environment.compile_bounded(source)


def render_template(source: str, variables: Mapping[str, Any]) -> RenderedChat:
    """Render a chat template.

    Args:
        variables: of the template; the dicts in "messages" differ from each other.

    Raises:
        TemplateLimitError: if it exceeds MAX_ITERATIONS or MAX_OUTPUT.
        ChatRejectedError: if the template is invalid or refuses the conversation.
    """
    messages = variables.get("messages") or ()
    rendering = _Rendering({id(message): index for index, message in enumerate(messages)})
    parts: list[str] = []
    try:
        environment, template = _compile(source)
        environment.rendering = rendering
        for part in template.generate(variables):
            parts.append(part)
            rendering.num_chars += len(part)
            if rendering.num_chars > MAX_OUTPUT:
                raise TemplateLimitError(f"the chat template writes more than {MAX_OUTPUT:,} characters")
    except TemplateLimitError:
        raise
    except (RecursionError, MemoryError) as exc:
        raise TemplateLimitError(f"the chat template raises {type(exc).__name__}") from None
    except Exception as exc:  # of the template's code
        raise ChatRejectedError(str(exc), rendering.current_message) from None
    return RenderedChat("".join(parts), rendering.ends())


def choose_template(tokenizer: Any, has_tools: bool) -> str:
    """Return the template that transformers would choose."""
    template = tokenizer.chat_template
    if isinstance(template, str):
        return template
    names = dict(template or {})
    name = "tool_use" if has_tools and "tool_use" in names else "default"
    if name not in names:
        raise ChatRejectedError(f"the tokenizer has the chat templates {sorted(names)}, and none is 'default'", None)
    return str(names[name])


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
    options = {**getattr(tokenizer, "special_tokens_map", {}), **(variables or {})}
    options |= {"messages": [dict(message) for message in messages], "tools": tools, "documents": None}
    options["add_generation_prompt"] = add_generation_prompt
    return render_template(choose_template(tokenizer, bool(tools)), options)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
    """Return the text of a conversation, see `render_messages`."""
    return render_messages(tokenizer, messages, add_generation_prompt=add_generation_prompt).text
