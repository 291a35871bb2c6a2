"""Contexts of requests on vLLM: spans of stored entries, and holes."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..context.placement import check_positions, parent_lengths, resolve_offsets
from ..errors import RequestTooLargeError
from ..features.repair.planner import repair_of
from ..outputs import Usage
from ..request.request import Request


class ContextRun(NamedTuple):
    """Consecutive context tokens: part of a parent, reused or computed."""

    source: Request
    start: int  # of the parent's tokens
    stop: int
    at: int  # of the first one in the prompt
    position: int  # where its keys are placed, in slots of the prompt
    entry: str | None  # None: computed with the message
    is_computed: bool = False  # again, by a repair

    @property
    def end(self) -> int:
        return self.at + self.stop - self.start

    def span(self) -> dict[str, Any]:
        """Return the run as the connector reads it."""
        return {"entry": self.entry, "start": self.start, "stop": self.stop, "at": self.at, "position": self.position}


@dataclass(eq=False)
class MessageEntries:
    """Entries of one message, and the tasks that compute them."""

    task: asyncio.Task[None] | None = None  # computes the message
    completion: asyncio.Task[None] | None = None  # stores all of its tokens
    entry: str | None = None  # of all tokens
    partial: str | None = None  # of the first `num_partial` tokens of a decode
    num_partial: int = 0
    holes: dict[int, str] = field(default_factory=dict)  # entries of computed context, by place in the prompt
    holds_parents: bool = False  # the parents are counted as having a reader
    context: list[tuple[int, int, int, int, bool]] = field(default_factory=list)  # runs, relative to the message

    def entry_of(self, num_tokens: int) -> str | None:
        """Return an entry with the first tokens of the message."""
        return self.entry or (self.partial if num_tokens <= self.num_partial else None)

    def names(self) -> list[str]:
        """Return the entries' names."""
        return [name for name in (self.entry, self.partial, *self.holes.values()) if name is not None]

    def forget(self, names: set[str]) -> None:
        """Forget entries that are not stored any more."""
        self.entry = None if self.entry in names else self.entry
        self.partial = None if self.partial in names else self.partial
        self.holes = {at: name for at, name in self.holes.items() if name not in names}


class ContextPlan(NamedTuple):
    """Context of one request."""

    tokens: list[int]  # of all parents, in order
    runs: list[ContextRun]  # the same tokens; empty in prefix mode

    @property
    def lacking(self) -> list[tuple[Request, int]]:
        """Parents whose first so many tokens have to be stored first."""
        return [(run.source, run.stop) for run in self.runs if run.entry is None and not run.is_computed]

    @property
    def holes(self) -> list[ContextRun]:
        """Runs that are computed and not stored."""
        return [run for run in self.runs if run.entry is None and run.is_computed]

    @property
    def inner_holes(self) -> list[int]:
        """Indices of the holes that reused runs follow."""
        last = max((index for index, run in enumerate(self.runs) if run.entry is not None), default=0)
        return [index for index, run in enumerate(self.runs[:last]) if run.entry is None]

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [run.span() for run in self.runs if run.entry is not None]

    @property
    def num_reused(self) -> int:
        return sum(run.stop - run.start for run in self.runs if not run.is_computed)


def filled(run: ContextRun, entry: str | None) -> ContextRun:
    """Return a computed run with its entry, if it has one."""
    return run if entry is None else run._replace(start=0, stop=run.stop - run.start, entry=entry)


def plan_context(request: Request, entries: Mapping[Request, MessageEntries], max_positions: int) -> ContextPlan:
    """Place the parents of a request, whose tokens are final.

    A prompt is the tokens of all parents and of the message. vLLM places its token `i` at position `i`, so positions
    are counted from where the message is in the prompt.

    Args:
        entries: what is stored of the parents and of the message's computed context.
        max_positions: positions of the model, and tokens of a prompt with one generated token.

    Raises:
        InvalidPositionError: if a parent or the message would pass the last position.
        RequestTooLargeError: if the prompt is too long.
    """
    lengths = parent_lengths(request)
    check_positions(request, lengths, max_positions)
    tokens = [token for ids in request.parent_tokens() for token in ids]
    if len(tokens) + len(request.prompt) + 1 > max_positions:
        raise RequestTooLargeError(
            f"message {request.id}: {len(tokens) + len(request.prompt)} tokens of context and message, with one "
            f"more to generate, exceed vLLM's --max-model-len {max_positions}: raise it, or read less"
        )
    repair = repair_of(request)
    is_choreographed, share = request.mode == "choreographed", 0.0 if repair is None else repair.share
    is_free = is_choreographed and not share  # a repaired context is that of prefix mode
    offsets, new_offset = (request.offsets, request.new_offset) if is_free else ((None,) * len(lengths), None)
    request.parent_positions, request.position = resolve_offsets(lengths, offsets, new_offset)
    if not is_choreographed:
        return ContextPlan(tokens, [])
    runs, at, shift = list[ContextRun](), 0, len(tokens) - request.position
    own = entries[request]
    for parent, part, length, position in zip(
        request.parents, request.parent_slices, lengths, request.parent_positions, strict=True
    ):
        start, stored = part[0] if part else 0, entries[parent]
        is_exact = share < 1 and start == 0 and stored.context == [_relative(run, at) for run in runs]
        num_computed = 0 if is_exact else math.ceil(share * length)
        for first, last, is_computed in ((0, num_computed, True), (num_computed, length, False)):
            if first < last:
                entry = None if is_computed else stored.entry_of(start + length)
                place = at + first, position + shift + first
                runs.append(ContextRun(parent, start + first, start + last, *place, entry, is_computed))
        at += length
    own.context = [_relative(run, at) for run in runs]
    return ContextPlan(tokens, [filled(run, own.holes.get(run.at)) if run.is_computed else run for run in runs])


def _relative(run: ContextRun, at: int) -> tuple[int, int, int, int, bool]:
    """Return a run relative to prompt index `at`, for comparisons."""
    return run.source.id, run.start, run.stop, run.position - at, run.is_computed


def usage_of(request: Request, plan: ContextPlan, num_cached: int) -> Usage:
    """Return the usage of a message.

    Args:
        num_cached: tokens of the prompt that the server reports as cached, perhaps more than the spans.
    """
    num_prompt, is_choreographed = len(plan.tokens) + len(request.prompt), request.mode == "choreographed"
    repaired = len(plan.tokens) - plan.num_reused if is_choreographed else 0
    cached = plan.num_reused if repaired else max(plan.num_reused, min(num_cached, num_prompt - 1))
    return Usage(
        cached_tokens=cached,
        computed_tokens=num_prompt - cached + (len(request.footer) if is_choreographed else 0),
        completion_tokens=request.num_generated,
        repaired_tokens=repaired,
    )


_SAME_NAMES = (
    "temperature top_p top_k min_p seed ignore_eos skip_special_tokens min_tokens presence_penalty frequency_penalty "
    "repetition_penalty logprobs"
)


def sampling_body(request: Request) -> dict[str, Any]:
    """Return the sampling parameters of a decode as vLLM names them."""
    state = request.decode_state
    assert state is not None
    sampling = state.sampling
    return {
        **{name: getattr(sampling, name) for name in _SAME_NAMES.split()},
        "max_tokens": state.max_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(state.stop_tokens),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "return_tokens_as_token_ids": True,
    }
