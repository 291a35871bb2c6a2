"""OpenTelemetry spans of requests: GenAI attributes, parents, streams, aborts and errors."""

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import openai
import pytest
from helpers.live_server import make_engine, serving
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from choreograph.errors import MissingDependencyError
from choreograph.server.tracing import otlp_provider

ASK = [{"role": "user", "content": "Which river flows through Paris, and which one through Rome?"}]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def live(talker_folder, exporter):
    """A server that exports spans into memory."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(make_engine(talker_folder), tracer_provider=provider) as server:
        yield server


@pytest.fixture
def only_span(exporter):
    """Returns the only span since the start of the test."""
    exporter.clear()

    def wait():
        end = time.monotonic() + 20
        while not (spans := exporter.get_finished_spans()):
            assert time.monotonic() < end, "no span has ended"
            time.sleep(0.01)
        (span,) = spans
        assert span.kind is SpanKind.SERVER
        return span

    return wait


def test_a_chat_has_one_span_with_the_attributes_of_its_request_and_answer(client, only_span):
    options = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": "never written", "n": 2}
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=5, **options, extra_headers={"traceparent": PARENT}
    )
    span = only_span()
    got = dict(span.attributes)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "choreograph",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.stop_sequences": ("never written",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": answer.id,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": answer.usage.prompt_tokens_details.cached_tokens,
        "gen_ai.workflow.name": "default",
        "choreograph.reuse": "exact",
    }
    assert {name: got.get(name) for name in expected} == expected
    assert (span.name, span.status.status_code) == ("chat tiny", StatusCode.UNSET)
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3] and span.parent.is_remote
    assert [event.name for event in span.events] == ["gen_ai.first_token"]
    assert 0 <= got["choreograph.queue_time"] <= got["gen_ai.response.time_to_first_chunk"]
    assert got["gen_ai.response.time_to_first_chunk"] <= got["choreograph.e2e_time"]
    assert span.start_time <= span.events[0].timestamp <= span.end_time


def test_reused_tokens_are_counted_by_source(live, client, only_span, exporter):
    body = {"choreography": {"reuse": "messages", "workflow": "w", "agent": "judge"}}
    for _ in range(2):
        exporter.clear()
        answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=3, extra_body=body)
        live.wait_until_idle()
    got, usage = only_span().attributes, answer.usage.choreography
    assert usage["prefix_tokens"] > 0
    for source in ("prefix", "message", "quoted", "computed", "repaired"):
        assert got[f"choreograph.usage.{source}_tokens"] == usage[f"{source}_tokens"]
    names = [got[name] for name in ("gen_ai.workflow.name", "gen_ai.agent.name", "choreograph.reuse")]
    assert names == ["w", "judge", "messages"]


@pytest.mark.parametrize("route", ["chat", "completions", "responses"])
def test_the_span_of_a_stream_ends_with_its_last_event(client, only_span, route):
    if route == "chat":
        events = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=4, stream=True)
    elif route == "completions":
        events = client.completions.create(model="tiny", prompt=["One two", "Red"], max_tokens=4, stream=True)
    else:
        events = client.responses.create(model="tiny", input="Hello", max_output_tokens=4, stream=True)
    event = list(events)[-1]
    span = only_span()
    num_answers = 2 if route == "completions" else 1
    assert span.attributes["gen_ai.response.id"] == (event.response.id if route == "responses" else event.id)
    assert span.attributes["gen_ai.usage.output_tokens"] == 4 * num_answers
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",) * num_answers
    assert span.attributes["gen_ai.request.max_tokens"] == 4 and span.attributes["gen_ai.request.stream"]
    assert span.name == ("text_completion tiny" if route == "completions" else "chat tiny") and span.parent is None


def test_a_called_tool_is_the_finish_reason(client, only_span):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    client.chat.completions.create(model="tiny", messages=ASK, tools=[tool], tool_choice="required", max_tokens=60)
    assert only_span().attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)


@pytest.mark.parametrize("stream", [True, False])
def test_the_span_of_an_aborted_request_ends_as_cancelled(live, client, only_span, stream):
    body = {"model": "tiny", "messages": ASK, "max_tokens": 3000, "ignore_eos": True}
    if stream:
        chunks = client.post("/chat/completions", body=body | {"stream": True}, cast_to=object, stream=True,
                             stream_cls=openai.Stream[object])  # fmt: skip
        next(iter(chunks))
        chunks.close()
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=0.3)
    live.wait_until_idle()
    span = only_span()
    assert (span.attributes["error.type"], span.status.status_code) == ("cancelled", StatusCode.ERROR)
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 3000
    assert "gen_ai.response.finish_reasons" not in span.attributes


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"model": "other"}, "model_not_found"), ({"temperature": -1}, "SamplingError"), ({"n": 129}, "InvalidRequestError")],
)  # fmt: skip
def test_the_span_of_a_refused_request_names_its_error(live, only_span, change, kind):
    body = {"model": "tiny", "messages": ASK, "max_tokens": 2} | change
    assert httpx.post(f"{live.url}/v1/chat/completions", json=body).status_code >= 400
    assert only_span().attributes["error.type"] == kind


def test_a_request_that_takes_too_long_has_a_span(talker_folder, exporter, only_span):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(make_engine(talker_folder), tracer_provider=provider, request_timeout=0.2) as server:
        body = {"model": "tiny", "messages": ASK, "max_tokens": 3000, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 408
    assert only_span().attributes["error.type"] == "timeout"


def test_spans_are_exported_to_an_endpoint_over_http():
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        provider = otlp_provider(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        provider.get_tracer("test").start_span("chat tiny").end()
        provider.shutdown()
        collector.shutdown()
        thread.join()
    ((path, body),) = bodies
    assert path == "/v1/traces" and b"chat tiny" in body and b"choreograph" in body


def test_a_missing_exporter_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingDependencyError, match=r"choreograph\[otel\]"):
        otlp_provider("http://localhost:4318/v1/traces")
