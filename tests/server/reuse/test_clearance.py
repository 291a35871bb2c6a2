"""Clearances of plain requests: what a reader may not see does not move its log-probabilities."""

import httpx
import pytest
from helpers.inspect_engine import inspect
from helpers.live_server import make_engine, serving

SECRETS = (  # of one length
    "The key is under the mat, and the door has two locks.",
    "The safe is behind a sea, and its dial has ten marks.",
)
SPEECH = (
    "A town that owns a bridge must also paint it, guard it, light it and count those who cross it every single day. "
    "Who pays for the paint and the light when the ferry is cheaper, and who counts on a Sunday?"
)
QUESTION = "Do you agree with that?"
SPEECH_TOKENS = 40  # the speech has more, the other texts fewer


class Asker:
    """Sends chats of one guarded workflow, one after the other."""

    def __init__(self, live, reuse):
        self._live, self._reuse = live, reuse

    def post(self, *texts, path="chat/completions", **choreography):
        """Return the reply to user messages."""
        body = {"model": "tiny", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": True}
        body |= {"top_logprobs": 20, "choreography": {"reuse": self._reuse, "workflow": "w", **choreography}}
        body["messages"] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        reply = httpx.post(f"{self._live.url}/v1/{path}", json=body, timeout=60)
        self._live.wait_until_idle()
        self._live.engine.check()
        self._live.app.state.service.planner.store.check()
        return reply

    def ask(self, *texts, **choreography):
        """Return (log-probabilities, reused tokens)."""
        reply = self.post(*texts, **choreography)
        assert reply.status_code == 200, reply.text
        answer, usage = reply.json()["choices"][0], reply.json()["usage"]["choreography"]
        rows = [[item["logprob"] for item in token["top_logprobs"]] for token in answer["logprobs"]["content"]]
        return (answer["message"]["content"], rows), usage["prefix_tokens"] + usage["message_tokens"] + usage[
            "quoted_tokens"
        ]


def chats(reuse):
    """Alice's chat but for the secret, and that of its reader; they share the speech."""
    if reuse == "messages":
        return [SPEECH], [QUESTION, SPEECH]
    return [f"Alice said: {SPEECH} That was all."], [f"Somebody said: {SPEECH} {QUESTION}"]


@pytest.mark.parametrize("reuse", ["messages", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_reader_without_the_clearance_is_independent_of_the_secret_bit_for_bit(talker_folder, reuse):
    said, reading = chats(reuse)

    def run(secret, clearance):
        with serving(make_engine(talker_folder)) as live:
            asker = Asker(live, reuse)
            asker.ask(secret, *said, labels=["alice"], clearance=[])
            first = asker.ask(*reading, clearance=clearance)
            between = asker.ask(
                "And you?", "Me?", *reading, labels=["bob"], clearance=["alice"]
            )  # reads what Alice said
            return first, asker.ask("Well?", "Yes.", *reading, clearance=clearance), between

    cleared, others = [run(secret, ["alice"]) for secret in SECRETS], [run(secret, []) for secret in SECRETS]
    assert cleared[0][0][1] > SPEECH_TOKENS  # reused, and the secret moves them
    assert cleared[0][0][0] != cleared[1][0][0]
    for (first, num_first), (again, num_again), _ in others:
        assert num_first < SPEECH_TOKENS < num_again  # encoded again, and found by the next reader of this clearance
        assert (first, again) == (others[0][0][0], others[0][1][0])


@pytest.mark.parametrize("reuse", ["messages", "auto"])
def test_a_leak_is_refused_on_demand(talker_folder, reuse):
    said, reading = chats(reuse)
    with serving(make_engine(talker_folder)) as live:
        asker = Asker(live, reuse)
        asker.ask(SECRETS[0], *said, labels=["alice"], clearance=[])
        reply = asker.post(*reading, clearance=["bob"], on_leak="error")
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "clearance") and "['bob']" in error["message"]
        assert asker.ask(*reading, clearance=["alice", "bob"], on_leak="error")[1] > SPEECH_TOKENS
        assert asker.ask(*reading, clearance=["bob"])[1] < SPEECH_TOKENS
        assert asker.ask(*reading, clearance=["bob"], on_leak="error")[1] > SPEECH_TOKENS  # without the secret


@pytest.mark.parametrize("reuse", ["messages", "auto"])
def test_an_answer_has_the_labels_of_what_it_read(talker_folder, reuse):
    said, reading = chats(reuse)
    with serving(make_engine(talker_folder)) as live:
        asker = Asker(live, reuse)
        asker.ask(SECRETS[0], *said, labels=["alice"], clearance=[])
        asker.ask(*reading, clearance=["alice"])
        (workflow,) = live.app.state.service.planner.store.workflows
        labels = {message.labels for message in workflow.session.messages}
        assert frozenset({"alice"}) in labels and workflow.session.messages[-1].labels == {"alice"}
        assert inspect(workflow.session.messages[-1]).text_labels == frozenset()
        assert asker.ask(*reading, labels=["bob"], clearance=[])[1] < SPEECH_TOKENS


def test_requests_without_a_clearance_share_nothing_with_those_that_have_one(talker_folder):
    with serving(make_engine(talker_folder)) as live:
        asker = Asker(live, "messages")
        asker.ask(SECRETS[0], SPEECH, clearance=[])
        assert asker.ask(QUESTION, SPEECH)[1] < SPEECH_TOKENS
        assert asker.ask(QUESTION, SPEECH, clearance=[])[1] > SPEECH_TOKENS


def test_exact_mode_finds_prefixes_of_equal_labels_alone(talker_folder):
    with serving(make_engine(talker_folder)) as live:
        asker = Asker(live, "exact")

        def cached(**choreography):
            return asker.post(SPEECH, **choreography).json()["usage"]["choreography"]["prefix_tokens"]

        cached(labels=["alice"])
        assert cached(clearance=["alice"]) < SPEECH_TOKENS < cached(labels=["alice"], clearance=[])


@pytest.mark.parametrize(
    ("choreography", "param"),
    [
        ({"on_leak": "error"}, "on_leak"),
        ({"clearance": [], "on_leak": "ignore"}, "choreography.on_leak"),
        ({"clearance": "alice"}, "choreography.clearance"),
        ({"clearance": [""]}, "choreography.clearance[0]"),
    ],
)
def test_invalid_clearances_are_refused(live, choreography, param):
    reply = Asker(live, "messages").post("Hello", **choreography)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
