"""Requests that are made to stop a server are refused, and nothing is lost: the short form of two benchmarks."""

import asyncio

import httpx
import pytest
from helpers.hypothesis_profile import many
from helpers.live_server import make_engine, serving

from benchmarks.fuzz import run
from benchmarks.hostile import attacks


@pytest.fixture(scope="module")
def attacked(talker_folder):
    """A server without keys whose model is named "model"."""
    with serving(make_engine(talker_folder), served_model_name="model", max_tokens=2) as server:
        yield server


def test_hostile_requests_are_answered(attacked):
    wrong = []
    for attack in attacks():
        headers = {"content-type": "application/json"}
        url = f"{attacked.url}{attack.path}"
        reply = httpx.request(attack.method, url, content=attack.body, headers=headers, timeout=120)
        if reply.status_code not in attack.statuses:
            wrong.append(f"{attack.name}: {reply.status_code} {reply.text[:200]}")
        elif reply.status_code >= 400 and not reply.json()["error"]["message"]:
            wrong.append(f"{attack.name}: no message")
    assert not wrong
    assert httpx.get(f"{attacked.url}/health").status_code == 200
    attacked.wait_until_idle()
    attacked.engine.check()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mutated_requests_are_no_server_errors(attacked, seed):
    statuses, wrong = asyncio.run(run(attacked.url, many(1200, minimum=450), seed, key=None))
    assert not wrong
    assert statuses[200] > 60 and statuses[400] > 200
    attacked.wait_until_idle()
    attacked.engine.check()
    attacked.app.state.service.planner.store.check()
