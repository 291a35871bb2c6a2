"""A model of an architecture that nobody has proved, checked by numbers when it is loaded.

Two things have to hold: messages that see each other whole in order are the model's own forward pass, and so are the
same messages where every other one stands elsewhere and is seen by a shift. Each is a pass of its own, so that nothing
but keys and values gets from one to the next. What computes them is the slow reference, so that only the model is in
question.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ModelError
from ..ops.attend import Step, WriteThenRead
from ..ops.plan import Read, make_plan
from ..ops.reference import attend

if TYPE_CHECKING:
    from .adapter import Adapter

MESSAGE, MESSAGES, MOVED = 12, 3, 17


def check_itself(adapter: "Adapter") -> None:
    """Raises ModelError with the difference where chained or moved messages are not what the model computes."""
    facts, config = adapter.facts, adapter.model.config.get_text_config()
    proved = "" if adapter.family is not None else " is not proved, and"
    refusal = f"{facts.name}: architecture {config.model_type!r}{proved} "
    for name in ("sliding_window", "attention_chunk_size"):
        if _active(config, name, facts.max_positions) not in (None, *(kind.window for kind in facts.kinds)):
            limit = getattr(config, name)
            mend = f"use max_positions={limit} or fewer"
            raise ModelError(f"{refusal}its layers do not hand its {name} of {limit} to attention; {mend}")
    if getattr(config, "attn_temperature_tuning", False) and config.floor_scale <= facts.max_positions:
        raise ModelError(
            f"{refusal}its scores grow with a token's place in a pass, from {config.floor_scale} on; "
            f"use max_positions={config.floor_scale - 1} or fewer"
        )
    count = min(MESSAGE * MESSAGES, facts.max_positions // 2)
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, facts.vocab_size, (count,), generator=noise).tolist()
    with torch.no_grad(), adapter.frozen.applied():
        wanted = _own(adapter, tokens, refusal)
    for what, home in _homes(count, facts.movable, facts.max_positions):
        off = _distance(_chained(adapter, tokens, home), wanted)
        if not off <= _tolerance(facts.dtype):  # nor NaN
            raise ModelError(
                f"{refusal}fails the check: {what} differ from its own forward pass by {off:.2g} of its largest logit; "
                "served for sure: `choreograph models`"
            )


def _own(adapter: "Adapter", tokens: list[int], refusal: str) -> Tensor:
    """Logits of the model's own forward pass."""
    ids = torch.tensor([tokens], device=adapter.facts.device)
    try:
        logits: Tensor = adapter.model(input_ids=ids, use_cache=False).logits[0]
    except Exception as problem:  # whatever its code raises
        said = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        raise ModelError(f"{refusal}its own forward pass fails: {said}") from problem
    return logits.float()


def _active(config: Any, name: str, positions: int) -> int | None:
    """A limit of what layers see that the configuration names, if it means anything."""
    limit, kinds = getattr(config, name, None), getattr(config, "layer_types", None)
    if not isinstance(limit, int) or limit >= positions or getattr(config, "use_sliding_window", True) is False:
        return None
    return None if kinds and not any("sliding" in kind or "chunk" in kind for kind in kinds) else limit


def _homes(count: int, movable: bool, most: int) -> Iterator[tuple[str, int]]:
    yield "chained messages", 0
    if movable and most > count + MOVED:
        yield "messages that were encoded elsewhere", MOVED


def _chained(adapter: "Adapter", tokens: list[int], home: int) -> Tensor:
    """Logits of a chain of messages, each of which sees all before it; every other one stands `home` positions behind
    where it is seen."""
    facts, count = adapter.facts, len(tokens)
    size = -(-count // MESSAGES)
    messages = [(first, min(first + size, count)) for first in range(0, count, size)]
    shape = (facts.layers, count, facts.kv_heads, facts.head_dim)
    keys, values = (list(torch.zeros(shape, dtype=facts.dtype, device=facts.device)) for _ in range(2))
    found = []
    for number, (first, end) in enumerate(messages):
        mine, rows = home if number % 2 else 0, end - first
        reads = [Read(first, 0, rows, 0, 1, 1, first + mine)]
        for earlier, (lo, hi) in enumerate(messages[:number]):
            theirs = home if earlier % 2 else 0
            reads.append(Read(lo, 0, rows, mine - theirs, hi - lo, 0, lo + mine))
        positions = list(range(first + mine, end + mine))
        plan = make_plan(list(range(first, end)), reads, positions)
        step = Step(plan, keys, values, facts.kinds, WriteThenRead("reference", attend))
        found.append(adapter.forward(tokens[first:end], positions, step, list(range(rows))))
    return torch.cat(found)


def _distance(got: Tensor, wanted: Tensor) -> float:
    """Of three rows in four: in low precision a few may choose other experts. A wrong model is wrong in two of three,
    in all messages but the first."""
    return float((got - wanted).abs().amax(-1).quantile(0.75) / wanted.abs().max())


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.08  # the reference computes in float32
