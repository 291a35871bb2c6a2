"""An answer that goes on in another engine is the one that the first engine would have given."""

from dataclasses import replace

import httpx
import pytest
from helpers.live_server import make_engine, serving

from choreograph.server.running_request import ForcedPrefix, SentAnswer
from choreograph.server.service import InferenceService


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.9, "seed": 4, "n": 2, "frequency_penalty": 0.4, "top_p": 0.9},
        {"temperature": 1.0, "seed": 5, "min_tokens": 6, "stop": ["e"]},
        {"temperature": 1.0, "seed": 6, "response_format": {"type": "json_object"}},
    ],
)
def test_forced_tokens_are_followed_by_what_would_have_come(live, talker_folder, monkeypatch, options):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20} | options
    body |= {"return_token_ids": True, "choreography": {"reuse": "messages"}}
    whole = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    submit = InferenceService.submit

    def resume(service, request, spec):
        tokens = [choice["token_ids"] for choice in whole]
        sent = [SentAnswer(ids[: len(ids) // 2]) for ids in tokens]
        return submit(service, request, replace(spec, sent=sent))

    with serving(make_engine(talker_folder)) as other:
        monkeypatch.setattr(InferenceService, "submit", resume)
        resumed = httpx.post(f"{other.url}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    for choice, original in zip(resumed, whole, strict=True):
        ids = original["token_ids"]
        assert choice["token_ids"] == ids[len(ids) // 2 :]
        assert original["message"]["content"].endswith(choice["message"]["content"])
        assert choice["finish_reason"] == original["finish_reason"]


def test_a_forced_prefix_allows_its_tokens_one_by_one():
    mask = ForcedPrefix([3, 1], 5)
    allowed = []
    for token in (3, 1, 4):
        allowed.append(mask.allowed().nonzero().flatten().tolist())
        mask.advance(token)
    assert allowed == [[3], [1], [0, 1, 2, 3, 4]]
