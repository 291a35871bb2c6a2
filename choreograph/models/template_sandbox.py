"""Chat templates rendered with bounds on time and output.

Templates come with models from the Hub and are untrusted code. The sandbox of transformers denies
them access to the interpreter, but does not bound loops or memory.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
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
        self.num_iterations = 0  # of the current rendering
        self.filters["tojson"] = _to_json
        self.filters |= {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters["bounded_loop"], self.filters["bounded_size"] = self._bounded_loop, _check_size
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template in which every loop and concatenation is checked."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "bounded_loop", [], [], None, None, lineno=loop.lineno)
        for joined in list(tree.find_all(nodes.Concat)):
            inner = nodes.Concat(joined.nodes, lineno=joined.lineno)
            joined.nodes = [nodes.Filter(inner, "bounded_size", [], [], None, None, lineno=joined.lineno)]
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def count(self, number: int = 1) -> None:
        self.num_iterations += number
        if self.num_iterations > MAX_ITERATIONS:
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


def render_template(source: str, **variables: Any) -> str:
    """Render a chat template.

    Raises:
        TemplateLimitError: if it exceeds MAX_ITERATIONS or MAX_OUTPUT.
        jinja2.TemplateError: if the template is invalid or refuses the conversation.
    """
    environment, template = _compile(source)
    environment.num_iterations, parts, size = 0, list[str](), 0
    try:
        for part in template.generate(**variables):
            parts.append(part)
            size += len(part)
            if size > MAX_OUTPUT:
                raise TemplateLimitError(f"the chat template writes more than {MAX_OUTPUT:,} characters")
    except (RecursionError, MemoryError) as exc:
        raise TemplateLimitError(f"the chat template raises {type(exc).__name__}") from None
    return "".join(parts)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Render a conversation as `tokenizer.apply_chat_template` does, within the bounds.

    Args:
        messages: turns with `role` and `content`.
        tools: JSON schemas of the functions that the model may call.
        variables: further variables of the template, as `enable_thinking`.
    """
    if not isinstance(tokenizer.chat_template, str):  # several templates: the tokenizer chooses
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
        return text
    options = getattr(tokenizer, "special_tokens_map", {}) | variables
    options |= {"messages": messages, "tools": tools, "documents": None}
    return render_template(tokenizer.chat_template, add_generation_prompt=add_generation_prompt, **options)
