"""Prometheus metrics, with vLLM's names under `choreograph:`."""

from collections.abc import Iterator
from typing import Any

from ..outputs import EngineStats, Timing
from ..utils import require
from .reuse.answer_plan import SOURCES, SourceCounts

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class ServerMetrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self._client = require("prometheus_client", "serve")
        self.registry = self._client.CollectorRegistry(auto_describe=True)
        self._model_name = model_name
        self._requests = self._counter(
            "request_success", "Answers by finish reason; abort: the client left.", "finished_reason"
        )
        self._errors = self._counter("request_errors", "Failed requests by HTTP status.", "status")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._source_tokens = self._counter("prompt_tokens_by_source", "Prompt tokens by source.", "source")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found as a prefix.")
        self._latencies = {
            name: self._histogram(f"{name}_seconds", text)
            for name, text in (
                ("time_to_first_token", "Time to the first token."),
                ("inter_token_latency", "Mean time between tokens of an answer."),
                ("e2e_request_latency", "Time to the last token."),
                ("request_queue_time", "Time until the first step."),
                ("request_inference_time", "Time from the first step to the last token."),
                ("request_prefill_time", "Time from the first step to the first token."),
                ("request_decode_time", "Time from the first to the last token."),
            )
        }
        self.stats: EngineStats | None = None  # of the latest scrape
        self.num_workflows = self.num_stored_tokens = 0
        self.registry.register(self)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        counter = self._client.Counter(f"choreograph:{name}", text, ["model_name", *labels], registry=self.registry)
        return counter if labels else counter.labels(self._model_name)

    def _histogram(self, name: str, text: str) -> Any:
        histogram = self._client.Histogram(
            f"choreograph:{name}", text, ["model_name"], registry=self.registry, buckets=LATENCY_BUCKETS
        )
        return histogram.labels(self._model_name)

    def observe_error(self, status: int) -> None:
        self._errors.labels(self._model_name, str(status)).inc()

    def observe_aborted(self, num_answers: int) -> None:
        """Record answers whose client left; their tokens are in `computed_tokens` alone."""
        self._requests.labels(self._model_name, "abort").inc(num_answers)

    def observe_answer(self, finish_reason: str, num_tokens: int, timing: Timing) -> None:
        """Record one complete answer."""
        self._requests.labels(self._model_name, finish_reason).inc()
        self._generation_tokens.inc(num_tokens)
        queue_time, ttft, e2e = timing.queue_time, timing.ttft, timing.e2e
        values = {
            "time_to_first_token": ttft,
            "e2e_request_latency": e2e,
            "request_queue_time": queue_time,
            "request_inference_time": _between(queue_time, e2e),
            "request_prefill_time": _between(queue_time, ttft),
            "request_decode_time": _between(ttft, e2e),
        }
        if num_tokens > 1 and (decode_time := values["request_decode_time"]) is not None:
            values["inter_token_latency"] = decode_time / (num_tokens - 1)
        for name, value in values.items():
            if value is not None:  # an unknown time is not 0
                self._latencies[name].observe(max(0.0, value))

    def observe_prompt(self, counts: SourceCounts) -> None:
        """Record where the tokens of one prompt came from."""
        self._prompt_tokens.inc(counts.total)
        self._queries.inc(counts.total)
        self._hits.inc(counts.prefix)
        for source in SOURCES:
            self._source_tokens.labels(self._model_name, source).inc(getattr(counts, source))

    def render(self, stats: EngineStats | None) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.stats = stats
        text: bytes = self._client.generate_latest(self.registry)
        return text

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of the engine's state; called by the registry."""
        if self.stats is None:
            return
        stats, core = self.stats, require("prometheus_client.core", "serve")
        values: dict[str, tuple[str, float]] = {
            "num_requests_running": ("Admitted requests.", stats.num_running),
            "num_requests_waiting": ("Requests that wait for capacity or other messages.", stats.num_waiting),
            "num_workflows": ("Workflows with stored messages.", self.num_workflows),
            "stored_message_tokens": ("Tokens of stored messages.", self.num_stored_tokens),
        }
        if stats.num_pages:  # of several replicas, none may answer
            used = 1 - stats.num_free_pages / stats.num_pages
            values["kv_cache_usage_perc"] = "Used share of the device's KV cache, 0 to 1.", used
        events = {"num_preemptions": "preempted", "kv_cache_evictions": "evicted"}
        events |= {"kv_cache_recomputations": "recomputing", "kv_cache_prefetches": "prefetch"}
        counters = {name: (f"Events {event!r}.", stats.events.get(event, 0)) for name, event in events.items()}
        counters["computed_tokens"] = "Tokens computed by the model.", stats.num_batched_tokens
        for family, metrics in ((core.GaugeMetricFamily, values), (core.CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                metric = family(f"choreograph:{name}", text, labels=["model_name"])
                metric.add_metric([self._model_name], value)
                yield metric
        tiers = core.GaugeMetricFamily("choreograph:kv_cache_tokens", "Tokens by tier.", labels=["model_name", "tier"])
        for tier, tokens in stats.tier_tokens.items():
            tiers.add_metric([self._model_name, tier], tokens)
        yield tiers


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
