"""A model of an architecture that nobody has proved, checked by numbers when it is loaded.

Two things have to hold: messages that see each other whole in order are the model's own forward pass, and so are the
same messages where every other one stands elsewhere and is seen by a shift. What computes them is the slow reference,
so that only the model is in question.
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
    refusal = f"{facts.name}: architecture {config.model_type!r} is not proved, and "
    for name in ("sliding_window", "attention_chunk_size"):
        if _active(config, name, facts.max_positions) not in (None, *(kind.window for kind in facts.kinds)):
            raise ModelError(f"{refusal}its layers do not hand its {name} of {getattr(config, name)} to attention")
    count = min(MESSAGE * MESSAGES, facts.max_positions // 2)
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, facts.vocab_size, (count,), generator=noise).tolist()
    with torch.no_grad(), adapter.frozen.applied():
        ids = torch.tensor([tokens], device=facts.device)
        wanted = adapter.model(input_ids=ids, use_cache=False).logits[0].float()
    for what, home in _homes(count, facts.movable, facts.max_positions):
        off = _distance(_chained(adapter, tokens, home), wanted)
        if not off <= _tolerance(facts.dtype):  # nor NaN
            raise ModelError(
                f"{refusal}fails the check: {what} differ from its own forward pass by {off:.2g} of its largest logit; "
                "served for sure: `choreograph models`"
            )


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
    reads: list[Read] = []
    positions: list[int] = []
    for number, (first, end) in enumerate(messages):
        mine = home if number % 2 else 0
        for earlier, (lo, hi) in enumerate(messages[:number]):
            theirs = home if earlier % 2 else 0
            reads.append(Read(lo, first, end, mine - theirs, hi - lo, 0, lo + mine))
        reads.append(Read(first, first, end, 0, 1, 1, first + mine))
        positions += range(first + mine, end + mine)
    plan = make_plan(list(range(count)), reads, positions)
    shape = (facts.layers, count, facts.kv_heads, facts.head_dim)
    keys, values = (list(torch.zeros(shape, dtype=facts.dtype, device=facts.device)) for _ in range(2))
    step = Step(plan, keys, values, facts.kinds, WriteThenRead("reference", attend))
    return adapter.forward(tokens, positions, step, list(range(count)))


def _distance(got: Tensor, wanted: Tensor) -> float:
    """Of three rows in four: in low precision a few may choose other experts. A wrong model is wrong in two of three,
    in all messages but the first."""
    return float((got - wanted).abs().amax(-1).quantile(0.75) / wanted.abs().max())


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-3, torch.float64: 1e-6}.get(dtype, 0.08)
