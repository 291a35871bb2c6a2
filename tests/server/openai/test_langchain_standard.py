"""LangChain's standard tests of chat models against the server, on the bundled model.

The package `langchain-tests` is not among the development dependencies, since it brings pytest plugins along:
install it to run this file. A model of 135M parameters cannot do what `BEYOND_THE_MODEL` lists; `NOT_SERVED` lists
every test that does not apply.
"""

from typing import Any

import httpx
import pytest
from helpers.live_server import serving
from langchain_openai import ChatOpenAI

from choreograph import CacheConfig, Engine, EngineConfig

standard = pytest.importorskip("langchain_tests.integration_tests", reason="langchain-tests is not installed")

pytestmark = pytest.mark.slow

ENDLESS = "a text in the JSON goes on to the token limit"
BEYOND_THE_MODEL = {
    "test_structured_output": ENDLESS,
    "test_structured_output_async": ENDLESS,
    "test_structured_output_optional_param": ENDLESS,
    "test_structured_output_pydantic_2_v1": ENDLESS,
    "test_agent_loop": "calls no tool by itself",
}


@pytest.fixture(scope="module")
def bundled():
    """A server of the bundled model."""
    engine = Engine.from_pretrained(config=EngineConfig(cache=CacheConfig(capacity=16384)), device="cpu")
    with serving(engine) as server:
        yield server


TEXT_ALONE = "the server reads text alone"
ONE_MODEL = "the server of this file has one model"
NOT_SERVED = {
    "test_invoke_with_model_override": ONE_MODEL,
    "test_ainvoke_with_model_override": ONE_MODEL,
    "test_stream_with_model_override": ONE_MODEL,
    "test_astream_with_model_override": ONE_MODEL,
    "test_json_mode": "objects without a schema have keys of the model's choice; test_clients.py has JSON mode",
    "test_pdf_inputs": TEXT_ALONE,
    "test_audio_inputs": TEXT_ALONE,
    "test_image_inputs": TEXT_ALONE,
    "test_image_tool_message": TEXT_ALONE,
    "test_pdf_tool_message": TEXT_ALONE,
    "test_anthropic_inputs": "content blocks of Anthropic's interface, which this server does not have",
    "test_stream_time": "compares with a recorded time",
}


class TestLangChain(standard.ChatModelIntegrationTests):  # type: ignore[name-defined]
    """The standard tests."""

    @pytest.fixture(autouse=True)
    def _server(self, bundled, request) -> None:
        if request.node.originalname in NOT_SERVED:
            pytest.skip(NOT_SERVED[request.node.originalname])
        reason = BEYOND_THE_MODEL.get(request.node.originalname)
        if reason is not None:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        type(self).url = f"{bundled.url}/v1"

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # a client of its own: the shared one belongs to the event loop of an earlier test
        options = {"http_async_client": httpx.AsyncClient(timeout=300), "stream_usage": True}
        return {
            "model": "tiny",
            "base_url": self.url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 160,
            **options,
        }
