"""OpenTelemetry spans of requests, with the GenAI semantic conventions (extra `otel`)."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ..outputs import Timing
from ..utils import require
from .api_errors import ApiError
from .reuse.answer_plan import SourceCounts

SERVICE_NAME = "choreograph"

REQUEST_ATTRIBUTES = {  # attribute -> field of the request
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.stream": "stream",
    "gen_ai.request.choice.count": "n",
    "gen_ai.conversation.id": "session_id",
}


class RequestSpan:
    """Span of one request; `end` has an effect once."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self.timing: Timing | None = None  # of the first answer that is complete
        self._is_first_token_seen = False

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes that are not None."""
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def first_token(self) -> None:
        """Record the first token as an event."""
        if not self._is_first_token_seen:
            self._is_first_token_seen = True
            self._span.add_event("gen_ai.first_token")

    def end(
        self,
        exc: BaseException | None = None,
        counts: SourceCounts | None = None,
        num_generated: int = 0,
        finish_reasons: Sequence[str | None] = (),
    ) -> None:
        """End the span.

        Args:
            exc: error of the request, if any.
            counts: prompt tokens by source.
            num_generated: tokens of all answers.
            finish_reasons: of every answer; None: it did not end.
        """
        if not self._span.is_recording():
            return
        if finish_reasons:
            ended = [reason for reason in finish_reasons if reason is not None]
            self.set({"gen_ai.response.finish_reasons": ended or None, "gen_ai.usage.output_tokens": num_generated})
        if counts is not None:
            usage = {"gen_ai.usage.input_tokens": counts.total, "gen_ai.usage.cache_read.input_tokens": counts.cached}
            self.set(usage | {f"choreograph.usage.{name}": number for name, number in counts.fields().items()})
        if self.timing is not None:
            self.set(
                {
                    "gen_ai.response.time_to_first_chunk": self.timing.ttft,
                    "choreograph.queue_time": self.timing.queue_time,
                    "choreograph.e2e_time": self.timing.e2e,
                }
            )
        if exc is not None:
            self._fail(exc)
        self._span.end()

    def _fail(self, exc: BaseException) -> None:
        trace: Any = require("opentelemetry.trace", "otel")
        is_cancelled = isinstance(exc, (asyncio.CancelledError, GeneratorExit))
        kind, text = ("cancelled", "the client disconnected") if is_cancelled else (type(exc).__qualname__, str(exc))
        if isinstance(exc, ApiError):
            kind = exc.body["error"]["code"] or str(exc.status)
        self.set({"error.type": kind})
        self._span.set_status(trace.StatusCode.ERROR, text)


class Tracing:
    """Tracer of a server."""

    def __init__(self, provider: Any) -> None:
        self._propagate: Any = require("opentelemetry.propagate", "otel")
        self._kind: Any = require("opentelemetry.trace", "otel").SpanKind.SERVER
        self._tracer = provider.get_tracer("choreograph.server")

    def start(self, headers: Mapping[str, str], operation: str, body: Any) -> RequestSpan:
        """Start the span of a request.

        It is a child of the span that a `traceparent` header names.

        Args:
            operation: name of the GenAI operation.
            body: validated request.
        """
        context = self._propagate.extract(headers)
        span = self._tracer.start_span(f"{operation} {body.model}", context, kind=self._kind)
        result = RequestSpan(span)
        limits = ("max_completion_tokens", "max_output_tokens", "max_tokens")
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        result.set({name: getattr(body, field, None) for name, field in REQUEST_ATTRIBUTES.items()})
        result.set(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": SERVICE_NAME,
                "gen_ai.request.model": body.model,
                "gen_ai.request.max_tokens": next(filter(None, (getattr(body, name, None) for name in limits)), None),
                "gen_ai.request.stop_sequences": stop,
            }
        )
        return result


def otlp_provider(endpoint: str) -> Any:
    """Return a tracer provider that exports by OTLP over HTTP.

    The `OTEL_*` variables of the SDK apply.

    Args:
        endpoint: address that takes traces, as http://localhost:4318/v1/traces.
    """
    sdk: Any = require("opentelemetry.sdk.trace", "otel")
    export: Any = require("opentelemetry.sdk.trace.export", "otel")
    resources: Any = require("opentelemetry.sdk.resources", "otel")
    otlp: Any = require("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel")
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": SERVICE_NAME}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
    return provider
