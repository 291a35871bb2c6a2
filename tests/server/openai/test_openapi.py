"""Property-based requests over the OpenAPI document: no answer is a server error."""

import httpx
import pytest
import schemathesis
from helpers.hypothesis_profile import many
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUM_EXAMPLES = many(8)


SESSION = "/v1/choreograph/sessions/{session_id}"
OPERATIONS = [
    "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /tokenize", "POST /detokenize",
    "GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}", "GET /v1/models/{model}", "GET /v1/models",
    "PUT /v1/workflows/{workflow}", "DELETE /v1/workflows/{workflow}", "PUT /v1/schemas/{name}", "GET /v1/schemas",
    "DELETE /v1/schemas/{name}", "POST /v1/choreograph/sessions", f"DELETE {SESSION}", f"POST {SESSION}/calls",
    f"GET {SESSION}/messages/{{message_id}}", f"GET {SESSION}/messages/{{message_id}}/text", f"GET {SESSION}/usage",
    f"DELETE {SESSION}/messages/{{message_id}}", f"POST {SESSION}/messages/{{message_id}}/declassify",
    "GET /health", "GET /ready", "GET /version", "GET /metrics",
]  # fmt: skip


def test_every_operation_of_the_document_is_tested(live):
    paths = httpx.get(f"{live.url}/openapi.json").json()["paths"]
    assert {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} == set(OPERATIONS)


@pytest.mark.parametrize("path", OPERATIONS)
def test_no_request_of_the_document_is_a_server_error(live, path):
    method, _, route = path.partition(" ")
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    operation = schema[route][method]

    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def check(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # other names are refused at once
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if isinstance(case.body.get(name), int) and case.body[name] > 24:
                    case.body[name] = 24  # thousands of tokens take longer than the time limit
        response = case.call(base_url=live.url, timeout=60)
        assert response.status_code < 500, response.text

    check()
    live.wait_until_idle()
    live.engine.check()


@settings(max_examples=many(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_valid_chat_with_odd_options_is_no_server_error(live, data):
    odd = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4)
    )
    value = st.recursive(
        odd, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    )
    names = (
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "logit_bias", "n", "logprobs", "top_logprobs", "tools", "tool_choice",
        "response_format", "structured_outputs", "choreography", "stream", "stream_options", "chat_template_kwargs",
    )  # fmt: skip
    options = data.draw(st.dictionaries(st.sampled_from(names), value, max_size=3))
    reuse = data.draw(st.sampled_from(["exact", "messages", "auto"]))
    contents = data.draw(st.lists(st.text(max_size=6), min_size=1, max_size=3))
    choreography = data.draw(st.dictionaries(st.sampled_from(("labels", "clearance")), st.lists(st.text(max_size=3))))
    fields = ("labels", "clearance", "on_leak", "offsets", "repair", "max_kl", "workflow", "agent", "steps")
    fields = st.sampled_from((*fields, "fixed_messages", "fixed_tokens"))
    choreography |= data.draw(st.dictionaries(fields, value, max_size=2)) | {"reuse": reuse}
    roles = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
    messages = [{"role": data.draw(roles), "content": content} for content in contents]
    body = {"model": "tiny", "max_tokens": 2, "messages": messages, "choreography": choreography} | options
    response = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code < 500, response.text
    live.wait_until_idle()
    live.app.state.service.planner.store.check()
