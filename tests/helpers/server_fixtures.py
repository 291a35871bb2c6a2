"""One server over a tiny random model for the tests of a file, and clients of it."""

import openai
import pytest

from .live_server import make_engine, serving


@pytest.fixture(scope="module")
def live(talker_folder):
    """A server without keys."""
    with serving(make_engine(talker_folder)) as server:
        yield server


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as result:
        yield result
