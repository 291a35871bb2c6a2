"""State that the dashboard shows, and its panels as HTML."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from ...config import parse_capacity
from ..reuse.answer_plan import SOURCES
from ..service import ANONYMOUS, InferenceService
from .request_log import MessageRow

WINDOW, MAX_SHOWN = 60.0, 20  # seconds and requests of the timeline

SOURCE_TEXTS = {
    "prefix": ("Prefix", "the start of an earlier prompt"),
    "message": ("Message", "a message after other messages"),
    "quoted": ("Quoted", "a quote inside another text"),
    "remote": ("Session", "sessions and playground"),
    "other_model": ("Other model", "a message of another model"),
    "computed": ("Computed", "not in the cache"),
}

BAR_TEXTS = {
    "reused": "reused",
    "moved": "reused at other positions",
    "computed": "computed",
    "generated": "generated",
}


class TierUsage(NamedTuple):
    """Tokens in one tier of the cache."""

    name: str
    used: int
    capacity: int
    referenced: int | None = None  # of `used`, those that messages or requests hold; None: unknown


class TimelineRow(NamedTuple):
    """One request; times in seconds."""

    number: int
    label: str
    workflow: str
    reuse: str
    status: str  # "waiting", "running", "finished" or "failed"
    age: float  # since submission
    phases: tuple[float, float, float]  # queue, prefill, decode
    cached: int | None  # prompt tokens; None until the request has ended
    computed: int | None  # likewise
    generated: int


@dataclass(frozen=True)
class DashboardState:
    """What one tenant may see at one moment."""

    tiers: Sequence[TierUsage]
    timeline: Sequence[TimelineRow]  # the latest first
    sources: Mapping[str, int]  # prompt tokens of all requests that have ended
    ended: Mapping[str, int]  # requests by status
    workflows: Sequence[str]  # the latest first
    events: Mapping[str, int] | None  # of the whole engine; None if tenants share it


def read_state(service: InferenceService, tenant: str) -> DashboardState:
    """Read what a tenant may see; runs in the engine's thread.

    With several keys, totals of the engine would show the load of other tenants: then only the tenant's messages count.
    """
    assert service.log is not None
    log, now = service.log.tenant(tenant), time.perf_counter()
    is_alone = tenant == ANONYMOUS or len(service.config.api_keys) == 1
    rows = []
    for record in reversed(log.records):
        status = "waiting" if record.is_waiting else record.status
        has_ended = record.ended is not None
        cached, computed = (record.cached, record.tokens.get("computed", 0)) if has_ended else (None, None)
        rows.append(
            TimelineRow(
                record.number, record.label, record.workflow, record.reuse, status, now - record.submitted,
                record.phases(now), cached, computed, record.generated,
            )
        )  # fmt: skip
    return DashboardState(
        tiers=_engine_tiers(service) if is_alone else _tenant_tiers(service, tenant),
        timeline=rows,
        sources=dict(log.sources),
        ended=dict(log.num_ended),
        workflows=list(reversed(log.graphs)),
        events=dict(service.engine.stats().events) if is_alone else None,
    )


def _capacities(service: InferenceService) -> dict[str, int]:
    """Return the tokens that fit each tier."""
    engine, cache = service.engine, service.engine.core.config.cache
    per_token = engine.core.cache_manager.pool.bytes_per_token
    limits = {"host": cache.host_capacity, "disk": cache.disk_capacity}
    device = engine.stats().num_pages * cache.page_size
    return {"device": device} | {name: parse_capacity(limit, per_token) for name, limit in limits.items() if limit}


def _engine_tiers(service: InferenceService) -> list[TierUsage]:
    stats, page_size = service.engine.stats(), service.engine.core.config.cache.page_size
    used = {"device": (stats.num_pages - stats.num_free_pages) * page_size, **stats.tier_tokens}
    referenced = {"device": stats.num_referenced_pages * page_size}
    capacities = _capacities(service)
    return [TierUsage(name, used.get(name, 0), capacities[name], referenced.get(name)) for name in capacities]


def _tenant_tiers(service: InferenceService, tenant: str) -> list[TierUsage]:
    used: Counter[str] = Counter()
    for workflow in service.planner.store.workflows:
        if workflow.session._client.tenant == tenant:
            for message in workflow.session.messages:
                if message.done:
                    used[message.kv_location] += message.length
    return [TierUsage(name, used[name], capacity) for name, capacity in _capacities(service).items()]


# -- HTML ---------------------------------------------------------------------------------------------------


def count(number: int) -> str:
    return f"{number:,}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def empty(text: str, hint: str) -> str:
    return f'<div class="empty"><b>{escape(text)}</b><span>{escape(hint)}</span></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="{style}"></i>{escape(text)}</span>' for style, text in entries)
    return f'<div class="legend">{items}</div>'


def tiles(state: DashboardState) -> str:
    """Return the row of numbers at the top of the page."""
    statuses = Counter(row.status for row in state.timeline)
    total = sum(state.sources.values())
    rate = f"{1 - state.sources.get('computed', 0) / total:.0%}" if total else "–"
    values = [
        ("Running", count(statuses["running"])),
        ("Waiting", count(statuses["waiting"])),
        ("Finished", count(state.ended.get("finished", 0))),
        ("Failed", count(state.ended.get("failed", 0))),
        ("Prompt tokens", count(total)),
        ("From the cache", rate),
    ]
    return "".join(f'<div class="tile"><span>{name}</span><b>{value}</b></div>' for name, value in values)


def cache_panel(state: DashboardState) -> str:
    """Return a meter per tier, and the cache's events."""
    parts = []
    for tier in state.tiers:
        share = tier.used / max(1, tier.capacity)
        held = min(share, (tier.referenced or 0) / max(1, tier.capacity))
        parts.append(
            f'<div class="meter"><div class="line"><b>{tier.name.capitalize()}</b>'
            f"<span>{count(tier.used)} of {count(tier.capacity)} tokens, {share:.0%}</span></div>"
            f'<div class="track"><i class="held" style="width:{held:.2%}"></i>'
            f'<i class="kept" style="width:{share - held:.2%}"></i></div></div>'
        )
    if state.events is None:
        return "".join(parts) + '<p class="note">Only the stored messages of your key are counted.</p>'
    parts.append(legend([("held", "in use by messages or requests"), ("kept", "kept, may be evicted")]))
    names = {"evicted": "Evicted", "offloaded": "Offloaded", "loaded": "Loaded", "prefetch": "Prefetched"}
    names |= {"recomputing": "Recomputed", "preempted": "Preempted"}
    facts = "".join(f"<span>{text} <b>{count(state.events.get(name, 0))}</b></span>" for name, text in names.items())
    return "".join(parts) + f'<div class="facts">{facts}</div>'


def sources_panel(state: DashboardState) -> str:
    """Return the share of prompt tokens by source."""
    total = sum(state.sources.values())
    if not total:
        return empty("No prompt yet", "Shares appear when the first request has ended.")
    rows = []
    for source in SOURCES:
        tokens, (name, text) = state.sources.get(source, 0), SOURCE_TEXTS[source]
        rows.append(
            f'<div class="meter"><div class="line"><span><b>{name}</b> <small>{text}</small></span>'
            f"<span>{count(tokens)}, {tokens / total:.0%}</span></div>"
            f'<div class="track"><i class="{"computed" if source == "computed" else "reused"}"'
            f' style="width:{tokens / total:.2%}"></i></div></div>'
        )
    return "".join(rows)


def timeline_panel(state: DashboardState) -> str:
    """Return a bar of phases per request over the last minute."""
    if not state.timeline:
        return empty("No request yet", "Send one to /v1/chat/completions, or run the playground.")
    ends = {row.number: row.age - sum(row.phases) for row in state.timeline}  # seconds ago; 0: running
    latest = min(ends.values())
    shown = [row for row in state.timeline if ends[row.number] < latest + WINDOW][:MAX_SHOWN]
    span = max(min(WINDOW, max(row.age for row in shown) - latest), 1e-3)
    parts = []
    for row in shown:
        left, bars = latest + span, []
        start = row.age
        for phase, length in zip(("queue", "prefill", "decode"), row.phases, strict=True):
            first, last = min(start, left), max(start - length, latest)
            start -= length
            if first > last:
                place = f"left:{(left - first) / span:.2%};width:{(first - last) / span:.2%}"
                bars.append(f'<i class="{phase}" style="{place}"></i>')
        times = zip(("queue", "prefill", "decode"), row.phases, strict=True)
        tokens = "" if row.cached is None else f"{count(row.cached)} cached, {count(row.computed or 0)} computed, "
        parts.append(
            f'<div class="request {row.status}"><div class="line"><span class="name"><b>{escape(row.label)}</b> '
            f"<small>{escape(row.workflow)} · {escape(row.reuse)}</small></span>"
            f'<em class="{row.status}">{row.status}</em></div><div class="track">{"".join(bars)}</div>'
            f'<div class="detail"><span>{tokens}{count(row.generated)} generated</span>'
            f"<span>{' · '.join(f'{name} {seconds(length)}' for name, length in times)}</span></div></div>"
        )
    end = "now" if latest < 1 else f"{latest:.0f} s ago"
    axis = f'<div class="axis"><span>{seconds(span)} earlier</span><span>{end}</span></div>'
    return legend((phase, phase) for phase in ("queue", "prefill", "decode")) + axis + "".join(parts)


def graph_panel(rows: Sequence[MessageRow]) -> str:
    """Return a row of bars per message over positions."""
    if not rows:
        return empty("No workflow yet", "Messages appear when a request has ended, each with what it attended to.")
    numbers = {row.id: number for number, row in enumerate(rows, 1)}
    end = max(bar.start + bar.length for row in rows for bar in row.bars)
    parts = []
    for row in rows:
        totals: Counter[str] = Counter()
        bars = []
        for bar in row.bars:
            totals["reused" if bar.kind == "moved" else bar.kind] += bar.length
            is_own = bar.source == row.id
            origin = (
                "own" if is_own else f"of message {numbers[bar.source]}" if bar.source in numbers else "of a prompt"
            )
            text = f"{origin}: {bar.length} tokens at {bar.start}, {BAR_TEXTS[bar.kind]}"
            number = "" if is_own or bar.length < end / 25 else numbers.get(bar.source, "")
            place = f"left:{bar.start / end:.2%};width:{bar.length / end:.2%}"
            bars.append(f'<i class="{bar.kind}" style="{place}" title="{text}">{number}</i>')
        tokens = ", ".join(
            f"{count(totals[kind])} {kind}" for kind in ("reused", "computed", "generated") if totals[kind]
        )
        repaired = f", {count(row.repaired)} repaired" if row.repaired else ""
        parts.append(
            f'<div class="message"><div class="line"><span class="name"><b>{numbers[row.id]}</b> {escape(row.label)}</span>'
            f'<small>{tokens}{repaired}</small></div><div class="track tall">{"".join(bars)}</div>'
            f"{_parents_table(row, numbers)}</div>"
        )
    axis = f'<div class="axis"><span>position 0</span><span>{count(end)}</span></div>'
    return legend(BAR_TEXTS.items()) + axis + "".join(parts)


def _parents_table(row: MessageRow, numbers: Mapping[int, int]) -> str:
    """Return the parents of an answer as a folded table."""
    if not row.parents:
        return ""
    names = ("Message", "Reused", "Repaired", "Computed", "Leaked", "Blocked")
    lines = ["".join(f"<th>{name}</th>" for name in names)]
    for source, *tokens in row.parents:
        lines.append(f"<td>{numbers.get(source, '–')}</td>" + "".join(f"<td>{count(number)}</td>" for number in tokens))
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<details><summary>Parents</summary><div><table>{table}</table></div></details>"
