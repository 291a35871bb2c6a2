"""Plans of requests: decodes of a prompt, and sources of its tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ...api.message import Message
from ...api.session import Session
from ...messages.handle import MessageSlice
from ...request.decode_state import TokenMask
from ...sampling_params import SamplingParams


class Answer(NamedTuple):
    """Sampling of one answer of a request."""

    sampling: SamplingParams
    mask: TokenMask | None = None
    keys_of: Callable[[str], list[str]] = lambda text: []  # what a client sends back of the generated text
    priority: int = 0  # requests with a lower number are admitted first
    repair: float | None = None  # share of reused tokens to compute again, 0 to 1
    max_kl: float | None = None  # divergence from prefix mode to stay within, nats a token; None: unlimited


SOURCES = ("prefix", "message", "quoted", "remote", "other_model", "computed")  # where prompt tokens come from


@dataclass
class SourceCounts:
    """Prompt tokens of one request by source."""

    prefix: int = 0  # cached as the start of an earlier prompt: exact
    message: int = 0  # of a message that was encoded after other messages
    quoted: int = 0  # of a message that is quoted inside another text
    computed: int = 0
    remote: int = 0  # of a message that another replica encoded
    other_model: int = 0  # of a message of another model, some of whose layers are computed again
    repaired: int = 0  # reused tokens that were computed again in this context; also in another count

    @property
    def cached(self) -> int:
        return self.prefix + self.message + self.quoted + self.remote + self.other_model

    @property
    def total(self) -> int:
        return self.cached + self.computed

    def fields(self) -> dict[str, int]:
        """Return the counts under the names that clients read."""
        return {f"{name}_tokens": number for name, number in vars(self).items()}


@dataclass
class Plan:
    """Decodes of one prompt, and what ends them."""

    messages: list[Message]  # one decode an answer
    counts: SourceCounts
    close: Callable[[bool], None]  # called once, with whether all answers are complete
    measure: Callable[[], object] | None = None  # called after it, if they are: measures selected calls


def decode_all(decode: Callable[[Answer], Message], answers: Sequence[Answer]) -> list[Message]:
    """Submit the answers to one prompt, all or none."""
    messages: list[Message] = []
    try:
        for answer in answers:
            messages.append(decode(answer))
            if answer.mask is not None:
                messages[-1].constrain(answer.mask)
    except BaseException:
        for message in messages:
            message.release()
        raise
    return messages


def decode_prompt(
    session: Session,
    header: Sequence[int],
    parents: Sequence[Message | MessageSlice],
    footer: Sequence[int],
    answers: Sequence[Answer],
    offsets: Sequence[int | None] = (),
    guard: Mapping[str, Any] = MappingProxyType({}),
) -> list[Message]:
    def decode(answer: Answer) -> Message:
        return session.decode(
            list(header),
            parents,
            offsets or None,
            sampling=answer.sampling,
            footer=list(footer),
            priority=answer.priority,
            repair=answer.repair,
            **guard,
        )

    return decode_all(decode, answers)
