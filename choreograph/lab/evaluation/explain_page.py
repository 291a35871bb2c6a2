"""Explanations of a run as one HTML file without external resources."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .explain_run import ExplainedMessage

BAR_WIDTH = 1000  # units of the picture of a context
SCALE_KL = 0.5  # nats: darkest shade of a token


class ExplainedBar(NamedTuple):
    """Part of the picture of a context."""

    x: float
    width: float
    y: int
    height: int
    state: str  # "exact", "blocked", "leaked", "repaired" or "own"
    label: str  # shown under the mouse


LEGEND = (
    ("exact", "saw exactly what precedes it"),
    ("blocked", "did not see all that precedes it"),
    ("leaked", "saw messages outside of this context"),
    ("repaired", "repaired"),
    ("own", "the message"),
)


def context_bars(message: ExplainedMessage) -> list[ExplainedBar]:
    """Return the picture of a message's context, in order."""
    own = len(message.tokens)
    scale = BAR_WIDTH / max(1, own + sum(p.num_tokens for p in message.explanation.parents))
    bars, x = [], 0.0

    def append(name: str, count: int, states: Sequence[str]) -> None:
        nonlocal x
        height = 22 // len(states)
        for number, state in enumerate(states):  # one above the other
            label = f"{name}: {count} tokens, {' and '.join(states)}"
            bars.append(ExplainedBar(x, max(1, count * scale - 2), 2 + number * height, height, state, label))
        x += count * scale

    for name, parent in message.rows:
        states = [state for state in ("leaked", "blocked") if getattr(parent, state)]
        if parent.repaired:
            append(name, parent.repaired, ["repaired"])
        if parent.num_tokens > parent.repaired:
            append(name, parent.num_tokens - parent.repaired, states or ["exact"])
    append(message.name, own, ["own"])
    return bars


def render_page(messages: Sequence[ExplainedMessage], title: str, subtitle: str) -> str:
    """Return the page; the message with the largest divergence is open."""
    import jinja2

    sums = {field: sum(m.sum_of(field) for m in messages) for field in ("reused", "repaired", "computed")}
    tiles = [(f"{len(messages)}", "messages"), (f"{sums['reused']:,}", "context tokens reused")]
    tiles += [(f"{sums['repaired']:,}", "repaired"), (f"{sums['computed']:,}", "computed")]
    values = [kl for m in messages for kl in m.explanation.divergence or ()]
    if values:
        tiles.append((f"{sum(values) / len(values):.3f}", "nats a token from prefix mode"))
    worst = max(range(len(messages)), key=lambda i: messages[i].explanation.kl or 0.0, default=0)

    def tokens(message: ExplainedMessage) -> list[tuple[str, float | None]]:
        divergence = message.explanation.divergence or (None,) * len(message.tokens)
        return list(zip(message.tokens, divergence, strict=True))

    template = Path(__file__).with_name("explain_page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True)
    return environment.from_string(template).render(
        title=title,
        subtitle=subtitle,
        tiles=tiles,
        legend=LEGEND,
        width=BAR_WIDTH,
        scale=SCALE_KL,
        messages=[(m, context_bars(m), i == worst) for i, m in enumerate(messages)],
        tokens=tokens,
        shade=lambda kl: min(0.75, kl / SCALE_KL),
    )
