"""Explanations of a run as one HTML file without external resources."""

from collections.abc import Sequence
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


TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { --ink:#1c2430; --dim:#667085; --line:#e4e7ec; --card:#fff; --page:#f6f7f9; --exact:#4e79a7; --blocked:#f0a04b;
  --leaked:#d1495b; --repaired:#59a14f; --own:#cfd6e1; --shade:209,73,91; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ef; --dim:#98a2b3; --line:#2b3340; --card:#171c24;
  --page:#0f1319; --own:#3a4454; } }
* { box-sizing:border-box } body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:1080px; margin:0 auto; padding:32px 24px 64px } h1 { font-size:24px; margin:0 }
.sub { color:var(--dim); margin:4px 0 24px } .tiles { display:flex; gap:12px; flex-wrap:wrap; margin-bottom:20px }
.tile { flex:1; min-width:140px; background:var(--card); border:1px solid var(--line); border-radius:10px; padding:12px 16px }
.tile b { display:block; font-size:22px; font-variant-numeric:tabular-nums } .tile span { color:var(--dim); font-size:13px }
.legend { display:flex; gap:18px; flex-wrap:wrap; color:var(--dim); font-size:13px; margin-bottom:16px }
.legend i { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:6px; vertical-align:-1px }
details { background:var(--card); border:1px solid var(--line); border-radius:10px; margin-bottom:12px; overflow:hidden }
summary { cursor:pointer; padding:12px 16px; list-style:none; display:grid; gap:16px; align-items:center;
  grid-template-columns:170px 1fr 130px } summary::-webkit-details-marker { display:none }
summary b { overflow:hidden; text-overflow:ellipsis; white-space:nowrap } summary b::before { content:"\\25B8";
  color:var(--dim); margin-right:8px; display:inline-block } details[open] summary b::before { transform:rotate(90deg) }
.kl { text-align:right; font-variant-numeric:tabular-nums; color:var(--dim) } .kl strong { color:var(--ink) }
svg { display:block; width:100%; height:26px } svg text { font-size:12px; fill:#fff } .body { padding:0 16px 16px }
.hint { border-left:3px solid var(--blocked); background:color-mix(in srgb,var(--blocked) 10%,transparent);
  padding:8px 12px; border-radius:0 6px 6px 0; margin:4px 0 12px }
.trials { color:var(--dim); font-size:13.5px; margin:0 0 10px } table { width:100%; border-collapse:collapse; font-size:13.5px }
th { text-align:left; color:var(--dim); font-weight:500 }
th,td { padding:6px 10px 6px 0; border-top:1px solid var(--line); vertical-align:top } tr:first-child th { border-top:0 }
.n { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
.text { font:13px/1.9 ui-monospace,Menlo,Consolas,monospace; white-space:pre-wrap; overflow-wrap:anywhere; margin-top:12px;
  max-height:220px; overflow-y:auto } .text span { border-radius:3px }
.exact { fill:var(--exact); background:var(--exact) } .blocked { fill:var(--blocked); background:var(--blocked) }
.leaked { fill:var(--leaked); background:var(--leaked) } .repaired { fill:var(--repaired); background:var(--repaired) }
.own { fill:var(--own); background:var(--own) }
@media (max-width:640px) { summary { grid-template-columns:1fr auto } summary svg { grid-column:1/-1; grid-row:2 } }
</style></head><body><main>
<h1>{{ title }}</h1><p class="sub">{{ subtitle }}</p>
<div class="tiles">{% for value, label in tiles %}<div class="tile"><b>{{ value }}</b><span>{{ label }}</span></div>{% endfor %}</div>
<div class="legend">{% for state, label in legend %}<span><i class="{{ state }}"></i>{{ label }}</span>{% endfor %}
<span>shade of a token: 0 to {{ scale }} nats</span></div>
{% for message, bars, is_open in messages %}
<details{% if is_open %} open{% endif %}><summary><b title="{{ message.name }}">{{ message.name }}</b>
<svg viewBox="0 0 {{ width }} 26" preserveAspectRatio="none" role="img" aria-label="context of {{ message.name }}">
{% for bar in bars %}<rect x="{{ '%.1f' % bar.x }}" y="{{ bar.y }}" width="{{ '%.1f' % bar.width }}"
 height="{{ bar.height }}" rx="3" class="{{ bar.state }}"><title>{{ bar.label }}</title></rect>{% endfor %}</svg>
<span class="kl">{% if message.explanation.kl is not none %}<strong>{{ '%.3f' % message.explanation.kl }}</strong> nats
{% else %}{{ message.tokens|length }} tokens{% endif %}</span></summary><div class="body">
{% for sentence in message.explanation.recommendations %}<div class="hint">{{ sentence }}</div>{% endfor %}
{% if message.explanation.trials %}<p class="trials">Measured: reuse {{ '%.3f' % message.explanation.kl }} nats a token
{%- for trial in message.explanation.trials %}, repair {{ trial.share }}: {{ '%.3f' % trial.kl }}{% endfor %}</p>{% endif %}
<table><tr><th>parent</th><th>saw besides (leak)</th><th>did not see (blockage)</th><th class="n">moved</th>
<th class="n">reused</th><th class="n">repaired</th><th class="n">computed</th></tr>
{% for name, parent in message.rows %}<tr><td>{{ name }}</td><td>{{ message.describe(parent.leaked) or "\u2013" }}</td>
<td>{{ message.describe(parent.blocked) or "\u2013" }}</td><td class="n">{{ '%+d' % parent.shift if parent.shift else 0 }}</td>
<td class="n">{{ parent.reused }}</td><td class="n">{{ parent.repaired }}</td><td class="n">{{ parent.computed }}</td></tr>
{% endfor %}</table>
<div class="text">{% for token, kl in tokens(message) %}<span{% if kl is not none %} title="{{ '%.4f' % kl }} nats"
 style="background:rgba(var(--shade),{{ '%.2f' % shade(kl) }})"{% endif %}>{{ token }}</span>{% endfor %}</div>
</div></details>{% endfor %}
</main></body></html>
"""

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

    return (
        jinja2.Environment(autoescape=True)
        .from_string(TEMPLATE)
        .render(
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
    )
