"""Answer loop that chats, completions and responses share.

The loop reads the engine's updates, parses them and gives events, which the encoder of a route writes in its own
JSON. What is true of every answer is decided here: reasoning, calls, where an answer was cut, and which tokens its
text keeps.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from ..engine_thread import ChoiceUpdate
from ..running_request import GenerationSpec, RunningRequest
from ..service import InferenceService
from ..structured.output_parser import FunctionCall, OutputDelta, OutputParser, ParserOptions
from .chat_prompt import ChatPrompt, answer_key
from .event_stream import TextEvents
from .token_text import PlacedToken, TokenBytes, TokenPlacer

T = TypeVar("T")

SCORE_BYTES = 64  # of a prompt token's log-probability in a response, about

MAX_HEADER_TOKENS = 256  # before an answer, more than its text depends on


def tool_call_dict(call: FunctionCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclass(frozen=True)
class AnswerOptions(ParserOptions):
    """How the answers of a request are parsed, and which of their tokens are kept."""

    continued: str = ""  # text of the message that the answer continues
    returns_ids: bool = False  # token ids are kept for `ParsedAnswer.take_token_ids`
    keeps_end: bool = False  # log-probabilities include tokens that the text leaves out, and the one that ends it

    def keys_of(self, text: str) -> list[str]:
        """Return what a client may send back of an answer."""
        parser = OutputParser(self)
        deltas = parser.feed(text) + parser.finish()
        content = "".join(delta.text for delta in deltas if delta.kind == "content")
        calls = [tool_call_dict(delta.call) for delta in deltas if delta.call is not None]
        contents = (answer_key(self.continued + content, calls), answer_key(self.continued + text, []))
        return list(dict.fromkeys(contents))


class AnswerEvent(NamedTuple):
    """Next part of an answer."""

    kind: Literal["reasoning", "content", "call", "end"]
    text: str = ""  # of reasoning or content
    call: FunctionCall | None = None  # complete
    tokens: Sequence[PlacedToken] = ()  # of the content, if log-probabilities are requested


class ParsedAnswer:
    """State of one answer.

    Args:
        placer: finds which tokens the text keeps; None: not needed.
    """

    def __init__(
        self,
        index: int,
        spec: GenerationSpec,
        token_bytes: TokenBytes,
        options: AnswerOptions,
        placer: TokenPlacer | None,
    ) -> None:
        self.index = index
        self.calls: list[FunctionCall] = []
        self.tokens: list[PlacedToken] = []  # of the content, if log-probabilities are requested
        self.num_generated = 0  # tokens
        self.num_reasoning = 0  # tokens between the tags of reasoning
        self.finish_reason: str | None = None
        self._parser, self._placer, self._keeps_end = OutputParser(options), placer, options.keeps_end
        self._has_logprobs = spec.sampling.logprobs is not None
        # a stop string, which the text loses, is known only when it is complete
        self._ids = ("with text" if spec.sampling.stop else "at once") if options.returns_ids else "never"
        self._token_bytes, self._stop_token_ids = token_bytes, spec.sampling.stop_token_ids
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._num_chars = 0  # received, tags included
        self._placed: deque[PlacedToken] = deque()  # tokens whose text no event has yet
        self._unsent_ids: deque[PlacedToken] = deque()  # tokens whose text has not been received
        self._token_ids: list[int] = []  # not taken yet

    @property
    def content(self) -> str:
        return "".join(self._texts["content"])

    @property
    def reasoning(self) -> str:
        return "".join(self._texts["reasoning"])

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls as messages of a chat have them."""
        return [tool_call_dict(call) for call in self.calls]

    def take_token_ids(self) -> list[int]:
        """Return the new token ids of the text that was received."""
        result, self._token_ids = self._token_ids, []
        return result

    def feed(self, update: ChoiceUpdate) -> Sequence[AnswerEvent]:
        """Read what a step added to the answer."""
        self.num_generated += len(update.token_ids)
        if self._ids == "at once":
            self._token_ids += update.token_ids
        is_last = update.finish_reason is not None
        if self._placer is None and not is_last and self._parser.is_transparent:
            if not update.text:
                return ()
            self._texts["content"].append(update.text)
            return (AnswerEvent("content", update.text),)
        if self._placer is not None:
            self._num_chars += len(update.text)
            self._place(self._placer, update)
        events = [self._event(delta) for delta in self._parser.feed(update.text)]
        if is_last:
            events += map(self._event, self._parser.finish())
            # an answer that was cut says so, whatever it has called
            is_called = bool(self.calls) and update.finish_reason == "stop"
            self.finish_reason = "tool_calls" if is_called else update.finish_reason
            events.append(AnswerEvent("end", tokens=self._end_tokens(update)))
        if not (self._has_logprobs or self._ids == "with text" or self._parser.may_reason):
            self._placer = None
        return events

    def _place(self, placer: TokenPlacer, update: ChoiceUpdate) -> None:
        """Find the places of new tokens."""
        is_last = update.finish_reason is not None
        logprobs: Sequence[Any] = update.logprobs or [None] * len(update.token_ids)
        placed = [item for pair in zip(update.token_ids, logprobs, strict=True) for item in placer.add(*pair)]
        if is_last:
            placed += placer.finish()
        self._placed += placed
        if self._ids != "with text":
            return
        self._unsent_ids += placed
        while self._unsent_ids and self._unsent_ids[0].start < self._num_chars:
            self._token_ids.append(self._unsent_ids.popleft().id)
        if is_last:
            self._token_ids += [token.id for token in self._rest(self._unsent_ids, update)]

    def _event(self, delta: OutputDelta) -> AnswerEvent:
        if delta.call is not None:
            self.calls.append(delta.call)
            return AnswerEvent("call", call=delta.call)
        kind: Any = delta.kind
        self._texts[kind].append(delta.text)
        tokens = self._tokens_of(delta)
        if kind == "reasoning":
            self.num_reasoning += sum(token.start >= delta.start for token in tokens)
            return AnswerEvent(kind, delta.text)
        tokens = tokens if self._has_logprobs else []
        self.tokens += tokens
        return AnswerEvent(kind, delta.text, tokens=tokens)

    def _end_tokens(self, update: ChoiceUpdate) -> list[PlacedToken]:
        """Return the tokens behind the text, without text, if they are kept."""
        rest = self._rest(self._placed, update) if self._keeps_end else []
        tokens = [replace(token, data=b"", end=token.start) for token in rest]
        self.tokens += tokens
        return tokens

    def _rest(self, tokens: Sequence[PlacedToken], update: ChoiceUpdate) -> list[PlacedToken]:
        """Return the tokens behind a text that no stop string ends."""
        last = tokens[-1].id if tokens else None
        is_end = last in self._stop_token_ids or last in self._token_bytes.special_ids
        return list(tokens) if is_end or update.finish_reason != "stop" else []

    def _tokens_of(self, delta: OutputDelta) -> list[PlacedToken]:
        """Return the tokens that wrote a part of the text.

        Tokens of tags before it are dropped.
        """
        end, result = delta.start + len(delta.text), list[PlacedToken]()
        while self._placed and self._placed[0].start < end:
            token = self._placed.popleft()
            is_inside = token.end > delta.start or token.start == delta.start
            is_left_out = not token.data and token.id in self._token_bytes.special_ids
            if is_inside and (self._keeps_end or not is_left_out):
                result.append(token)
        return result


class AnswerEncoder(Protocol):
    """Writes the answers of one request in the JSON of its route."""

    id: str  # of the response
    is_plain: bool  # events of content differ in their text alone, except the first one of an answer

    def start(self) -> str:
        """Return the events of a stream before the first answer begins."""

    def write(self, answer: ParsedAnswer, event: AnswerEvent, *, is_first: bool) -> str:
        """Return the events of a stream for a part of an answer; "" for none.

        Args:
            is_first: it is the first part of this answer.
        """

    def end(self) -> str:
        """Return the events of a stream after all answers are complete."""

    def whole(self, events: Sequence[tuple[ParsedAnswer, AnswerEvent]]) -> dict[str, Any]:
        """Return the response of a request that does not stream.

        Args:
            events: all parts of all answers.
        """


class AnswerLoop:
    """Answers of one running request."""

    def __init__(self, service: InferenceService, running: RunningRequest, options: AnswerOptions) -> None:
        spec = running.spec
        self.token_bytes, self.running, self._pool = service.token_bytes, running, service.pool
        self.has_logprobs = spec.sampling.logprobs is not None
        needs_places = self.has_logprobs or (options.returns_ids and bool(spec.sampling.stop)) or options.thinks
        self.answers = [
            ParsedAnswer(index, spec, self.token_bytes, options, self._placer(index) if needs_places else None)
            for index in range(running.num_choices)
        ]

    def prompt_of(self, answer: ParsedAnswer) -> ChatPrompt:
        """Return the prompt of an answer."""
        return self.running.spec.prompts[answer.index // self.running.spec.num_answers]

    def _placer(self, index: int) -> TokenPlacer:
        spec = self.running.spec
        prompt = spec.prompts[index // spec.num_answers]
        header = prompt.header if spec.reuse == "messages" else prompt.tokens[-MAX_HEADER_TOKENS:]
        sent = spec.sent[index].token_ids if spec.sent else ()
        return TokenPlacer(self.token_bytes, [*header, *sent], skip_special=spec.sampling.skip_special_tokens)

    async def events(self, encoder: AnswerEncoder) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed request, those of a step at once."""

        def content_event(index: int, text: str) -> str:
            return encoder.write(self.answers[index], AnswerEvent("content", text), is_first=False)

        text_events, started, is_first_step = TextEvents(content_event), set[int](), True
        async for events in self._steps():
            chunks = [encoder.start()] if is_first_step else []
            is_first_step = False
            for answer, event in events:
                if answer.index not in started:
                    started.add(answer.index)
                    chunks.append(await self._encode(partial(encoder.write, answer, event, is_first=True)))
                elif encoder.is_plain and event.kind == "content":
                    chunks.append(text_events.event(answer.index, event.text))
                else:
                    chunks.append(encoder.write(answer, event, is_first=False))
            if text := "".join(chunks):
                yield text
        yield encoder.end()

    async def whole(self, encoder: AnswerEncoder) -> dict[str, Any]:
        """Return the response of a request that does not stream."""
        parts = [part async for events in self._steps() for part in events]
        return await self._encode(partial(encoder.whole, parts))

    async def _steps(self) -> AsyncIterator[Iterator[tuple[ParsedAnswer, AnswerEvent]]]:
        """Yield the events of every step until all answers are complete."""
        async with aclosing(self.running.updates()) as steps:
            async for updates in steps:
                yield self._events(updates)

    def _events(self, updates: Sequence[ChoiceUpdate]) -> Iterator[tuple[ParsedAnswer, AnswerEvent]]:
        for update in updates:
            answer = self.answers[update.index]
            for event in answer.feed(update):
                if event.kind == "end":
                    self.running.finish_reasons[update.index] = answer.finish_reason
                yield answer, event

    async def _encode(self, function: Callable[[], T]) -> T:
        """Run a function that writes what may have the scores of prompts.

        Many scores are written in a worker thread: the event loop would wait for them.
        """
        spec = self.running.spec
        if spec.sampling.prompt_logprobs is None:
            return function()
        num_scores = sum(len(prompt.tokens) for prompt in spec.prompts) * (1 + spec.sampling.prompt_logprobs)
        return await self._pool.run(spec.key.tenant, num_scores * SCORE_BYTES, function)

    def usage(self) -> dict[str, Any]:
        """Return the token counts of a request whose answers are complete."""
        details = {"reasoning_tokens": sum(answer.num_reasoning for answer in self.answers)}
        return {**self.running.usage(), "completion_tokens_details": details}
