"""What the reuse modes find, by the tokens that the engine computes."""

import json

import httpx
import openai
import pytest
from helpers.inspect_engine import inspect
from helpers.live_server import make_engine, serving

from choreograph import SamplingParams
from choreograph.features.budget import MIN_SAMPLES
from choreograph.namespace import Client
from choreograph.server import engine_thread
from choreograph.server.app import create_app
from choreograph.server.openai.chat_prompt import ChatPrompt, ChatRenderer, Segment, answer_key
from choreograph.server.reuse.answer_plan import Answer
from choreograph.server.reuse.message_store import MessageStore, WorkflowKey
from choreograph.server.server_config import ServerConfig

SYSTEM = {
    "role": "system",
    "content": "You are the chair of a long debate about rivers, bridges and the towns between.",
}
TOPICS = [{"role": "user", "content": f"Topic {n}: {word}, its history and what the town owes to it."} for n, word in
          enumerate(["the old mill", "a stone bridge", "the ferry"])]  # fmt: skip


class Caller:
    """Sends chats of one workflow and counts what the engine computes."""

    def __init__(self, live, client, reuse, workflow):
        self._live, self._client = live, client
        self.options = {"choreography": {"reuse": reuse, "workflow": workflow, "agent": "tester"}}

    def ask(self, messages, max_tokens=8, extra_headers=None, **options):
        """Return (answer, usage by source, prompt tokens that the engine computed)."""
        self._live.wait_until_idle()
        before = self._live.engine.stats().num_batched_tokens
        answer = self._client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            extra_body=self.options | options,
            extra_headers=extra_headers,
        )
        self._live.wait_until_idle()
        self._live.engine.check()
        self._live.app.state.service.planner.store.check()
        found = answer.usage.model_extra["choreography"]
        sources = {name: found[f"{name}_tokens"] for name in ("prefix", "message", "quoted", "computed")}
        assert sum(sources.values()) == answer.usage.prompt_tokens
        num_computed = self._live.engine.stats().num_batched_tokens - before - answer.usage.completion_tokens
        return answer.choices[0].message.content, sources, num_computed


@pytest.fixture
def caller(live, client, request):
    return lambda reuse: Caller(live, client, reuse, request.node.name)


def test_messages_are_found_in_any_order(caller):
    ask = caller("messages").ask
    first = ask([SYSTEM, *TOPICS])
    assert first[1]["computed"] == sum(first[1].values())
    _, sources, num_computed = ask([SYSTEM, TOPICS[2], TOPICS[0]])
    assert sources["prefix"] > 20 and sources["message"] > 30
    assert num_computed <= sources["computed"] + 4  # the header of the answer, and the footer that ends it
    again = ask([SYSTEM, *TOPICS])[1]
    assert again["computed"] == sources["computed"] and again["message"] == 0


@pytest.mark.parametrize("reuse", ["messages", "auto"])
def test_a_full_repair_gives_the_text_of_exact_in_any_order(caller, live, reuse):
    chat = [SYSTEM, TOPICS[2], TOPICS[0]]
    expected = caller("exact").ask(chat, max_tokens=16)[0]
    repairing = caller(reuse)
    repairing.ask([SYSTEM, *TOPICS])
    repairing.options["choreography"]["repair"] = 1.0
    text, sources, num_computed = repairing.ask(chat, max_tokens=16, priority=3)
    assert text == expected
    assert num_computed >= sources["computed"] + sources["message"]


def test_an_edited_chat_computes_only_what_is_new(caller):
    ask = caller("messages").ask
    answer, *_ = ask([SYSTEM, TOPICS[0]], max_tokens=40)
    new = {"role": "user", "content": "And now?"}
    _, sources, num_computed = ask([SYSTEM, {"role": "assistant", "content": answer}, new])
    assert sources["message"] >= 40  # the answer, as it was generated
    assert sources["computed"] < 20 and num_computed <= sources["computed"] + 4


def test_an_equal_message_twice_in_a_chat_is_two_messages(caller):
    ask = caller("messages").ask
    chat = [SYSTEM, TOPICS[0], {"role": "assistant", "content": "Yes."}, TOPICS[0]]
    text, *_ = ask(chat)
    again, sources, _ = ask(chat)
    assert again == text and sources["message"] == 0 and sources["computed"] < 8


def test_messages_in_their_own_order_give_the_text_of_exact(caller):
    chat = [SYSTEM, *TOPICS]
    texts = [caller(reuse).ask(chat, max_tokens=12)[0] for reuse in ("exact", "messages", "auto", "messages", "auto")]
    assert len(set(texts)) == 1


def test_a_quote_is_found_inside_another_text(caller):
    ask = caller("auto").ask
    speech = " ".join(f"{topic['content']} " for topic in TOPICS)
    ask([SYSTEM, {"role": "user", "content": speech}])
    chat = [
        {"role": "system", "content": "You judge."},
        {"role": "user", "content": f"Debater 1 said: {speech} Do you agree with that?"},
    ]
    _, sources, num_computed = ask(chat)
    assert sources["quoted"] >= 40
    assert num_computed <= sources["computed"] + 2
    assert ask(chat)[1]["computed"] < 16


def test_a_generated_answer_is_found_where_others_quote_it(embedded):
    with serving(embedded) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        ask = Caller(live, client, "auto", "debate").ask
        answer, *_ = ask([{"role": "user", "content": "Why do rivers bend?"}], max_tokens=40)
        quote = {"role": "user", "content": f"A debater said:\n{answer}\nIs that right?"}
        text, sources, num_computed = ask([quote], max_tokens=1)
        assert sources["quoted"] >= 36 and num_computed <= sources["computed"] + 2
        assert text


def test_a_conversation_continues_its_own_prefix(caller):
    ask = caller("auto").ask
    answer, first, _ = ask([SYSTEM, TOPICS[0]], max_tokens=30)
    chat = [SYSTEM, TOPICS[0], {"role": "assistant", "content": answer}, TOPICS[1]]
    _, sources, num_computed = ask(chat)
    assert sources["prefix"] >= sum(first.values())
    assert num_computed <= sources["computed"] + 2


@pytest.mark.parametrize("reuse", ["messages", "auto"])
def test_workflows_find_nothing_of_each_other_but_equal_beginnings(live, client, reuse):
    texts = [TOPICS[0] | {"content": f"{reuse}: {TOPICS[0]['content']}"}, TOPICS[1]]
    Caller(live, client, reuse, f"{reuse} one").ask([SYSTEM, *texts])
    _, sources, _ = Caller(live, client, reuse, f"{reuse} two").ask([TOPICS[2], texts[0]])
    assert sources["prefix"] == sources["quoted"] == sources["message"] == 0


def test_headers_choose_the_mode_and_the_workflow(live, client):
    headers = {"x-choreography-reuse": "messages", "x-session-id": "s-1", "x-choreography-agent": "judge"}
    answer = client.chat.completions.create(model="tiny", messages=TOPICS[:1], max_tokens=1, extra_headers=headers)
    found = answer.usage.model_extra["choreography"]
    assert (found["reuse"], found["workflow"], found["agent"]) == ("messages", "s-1", "judge")


def test_a_declared_step_graph_says_which_agent_is_next(talker_folder):
    engine = make_engine(talker_folder, eviction="workflow")
    with serving(engine) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        agents = {"planner": None, "coder": "planner", "tester": {"any_of": ["coder"]}}
        assert httpx.put(f"{live.url}/v1/workflows/w", json={"agents": agents}).json()["agents"] == list(agents)
        assert httpx.put(f"{live.url}/v1/workflows/w", json={"agents": {"a": "missing"}}).status_code == 400
        caller = Caller(live, client, "messages", "w")
        caller.options["choreography"]["agent"] = "planner"
        caller.ask([SYSTEM, TOPICS[0]])
        (workflow,) = live.app.state.service.planner.store.workflows
        assert (workflow.tracker.steps["coder"], workflow.tracker.steps["tester"]) == (1, 2)
        caller.options["choreography"]["agent"] = "stranger"
        with pytest.raises(openai.BadRequestError, match="'stranger' is not declared"):
            caller.ask([SYSTEM])
        assert httpx.delete(f"{live.url}/v1/workflows/w").status_code == 200
        caller.ask([SYSTEM])


def test_stored_messages_are_bounded(talker_folder):
    with serving(make_engine(talker_folder), max_workflow_tokens=150) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        for number in range(4):
            for reuse in ("messages", "auto"):
                Caller(live, client, reuse, f"w{number % 2}").ask([SYSTEM, *TOPICS])
        store = live.app.state.service.planner.store
        assert 0 < store.num_tokens <= 150
        stats = live.engine.stats()
        assert stats.num_referenced_entries <= 8


def test_a_dropped_workflow_closes_its_session(talker):
    store = MessageStore(talker, 10)
    keys = [WorkflowKey(Client("client"), name, "base") for name in "ab"]
    for key in keys:
        session = store.open(key).session
        store.add(key, session.prefill(list(range(5, 14))), 0, [("x", 0)], with_spans=True)
        store.close(key)
        store.check()
    assert store.num_workflows == 1 and store.num_tokens == 9


def test_a_chat_is_cut_at_the_ends_of_its_messages(talker):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        dict(SYSTEM),
        dict(TOPICS[0]),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    prompt = ChatRenderer(talker.chat).prompt(turns, tools, with_segments=True)
    pieces = [token for segment in prompt.segments for token in segment.tokens] + prompt.header
    text = talker.tokenizer.decode(prompt.tokens)
    assert talker.tokenizer.decode(pieces) == text and json.dumps({"name": "f", "arguments": {"a": 1}}) in text
    assert len(prompt.segments) == 4 and prompt.segments[2].answer_key == answer_key("", [call])
    assert talker.tokenizer.decode(prompt.footer) == "<|im_end|>\n"


@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_requests_find_nothing_of_requests_with_other_labels(caller, reuse):
    # a first message of its own: other tests leave no cache for this chat
    chat = [{"role": "system", "content": f"Labels are compared with {reuse}."}, *TOPICS]
    labelled, plain = caller(reuse), caller(reuse)
    labelled.options["choreography"]["labels"] = ["alice"]
    first, repeated = labelled.ask(chat), labelled.ask(chat)
    assert first[1]["computed"] > repeated[1]["computed"]
    text, sources, _ = plain.ask(chat)
    assert text == first[0]
    assert (
        sources["computed"] >= sum(sources.values()) - 4
    )  # other tests' chats begin with the same tokens of the template
    by_header = plain.ask(chat, extra_headers={"x-choreography-labels": "alice,"})
    assert by_header[1] == repeated[1]


def test_labels_of_an_agent_apply_to_requests_that_name_it(caller, live):
    alice, bob = caller("messages"), caller("messages")
    url, workflow = f"{live.url}/v1/workflows/", alice.options["choreography"]["workflow"]
    alice.options["choreography"]["agent"], bob.options["choreography"]["agent"] = "alice", "bob"
    graph = {"agents": {"alice": None, "bob": "alice"}}
    assert httpx.put(url + workflow, json={**graph, "labels": {"alice": ["alice-private"]}}).status_code == 200
    chat = [{"role": "system", "content": "Agents have labels of their own here."}, *TOPICS]
    first = alice.ask(chat)[1]["computed"]
    assert alice.ask(chat)[1]["computed"] < first / 2
    assert bob.ask(chat)[1]["computed"] >= first - 4  # nothing of another's but the first tokens of the template
    named = bob.ask(chat, extra_headers={"x-choreography-labels": "alice-private"})
    assert named[1]["computed"] < first / 2
    for labels in ({"carol": ["a"]}, ["a"], {"alice": "a"}, {"alice": [1]}):
        answer = httpx.put(url + workflow, json={**graph, "labels": labels})
        assert answer.status_code == 400 and "labels" in answer.json()["error"]["message"]
    assert httpx.delete(url + workflow).status_code == 200
    assert not live.app.state.service.planner.store.agent_labels


def test_repaired_tokens_are_counted(caller):
    asker = caller("messages")
    asker.ask([SYSTEM, *TOPICS])
    asker.options["choreography"]["repair"] = 0.5
    answer = asker._client.chat.completions.create(
        model="tiny", messages=[TOPICS[2], TOPICS[0]], max_tokens=4, extra_body=asker.options
    )
    usage = answer.usage.model_extra["choreography"]
    assert 0 < usage["repaired_tokens"] <= usage["message_tokens"]


def test_a_budget_computes_until_its_stage_is_known_then_reuses(talker_folder):
    engine = make_engine(talker_folder)
    options = {"max_kl": 100.0, "shadow_calls": 1.0}
    with serving(engine, **options) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        caller = Caller(live, client, "messages", "w")

        def ask(number):
            """Read stored topics after a new question, which they have not seen."""
            new = {"role": "user", "content": f"Question {number}: which of them is older?"}
            body = {"model": "tiny", "messages": [new, TOPICS[2], TOPICS[0]], "max_tokens": 3, **caller.options}
            usage = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60).json()["usage"]["choreography"]
            live.wait_until_idle()
            return usage["repaired_tokens"]

        caller.ask([SYSTEM, *TOPICS])
        assert ask(0) > 40
        (messages,) = live.app.state.service.planner.store._tenants.values()
        (budget,) = messages.budgets.values()
        assert budget.num_shadow_tokens <= 0.1 * budget.num_tokens
        budget.shadow_tokens = 1e9
        for number in range(MIN_SAMPLES + 1):  # the last may still be measured
            ask(1 + number)
        assert budget.share_for("/tester") == 0 and ask(20) == 0
        caller.options["choreography"] |= {"max_kl": 0.0}
        assert ask(21) > 40  # another limit, of the same expectation
        caller.options["choreography"] |= {"max_kl": 100.0, "agent": "other"}
        assert ask(22) > 40  # another stage
        caller.options["choreography"] |= {"repair": 0.0}
        assert ask(23) == 0  # an explicit share wins
        caller.options["choreography"] |= {"max_kl": -1}
        answer = httpx.post(
            f"{live.url}/v1/chat/completions", json={"model": "tiny", "messages": [SYSTEM], **caller.options}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "choreography.max_kl")


@pytest.mark.parametrize("offsets", [[0, 60, None, 40], [200, None, 90, 90], [None] * 4])
def test_offsets_place_messages_as_a_call_in_process_does(live, caller, offsets):
    messages = [SYSTEM, *TOPICS]
    asker = caller("messages")
    asker.options["choreography"]["offsets"] = offsets
    texts = [asker.ask(messages, max_tokens=10)[0] for _ in range(2)]  # computed, then found
    prompt = live.app.state.service.renderer.prompt(messages, with_segments=True)
    with live.engine.session(client_id="test") as session:
        parents = []
        for number, segment in enumerate(prompt.segments):
            before = offsets[:number]
            parents.append(session.prefill(list(segment.tokens), list(parents), before, offsets[number]))
        same = session.decode(prompt.header, parents, offsets, temperature=0, max_tokens=10, footer=prompt.footer)
        assert texts == [same.text] * 2


def test_messages_at_positions_of_their_own_are_no_prefix(caller):
    asker = caller("messages")
    asker.ask([SYSTEM, *TOPICS])
    asker.options["choreography"]["offsets"] = [0, 100, None, None]
    sources = asker.ask([SYSTEM, *TOPICS])[1]
    assert sources["prefix"] == 0 and sources["message"] > 60


@pytest.mark.parametrize(
    ("path", "choreography", "param", "text"),
    [
        ("chat/completions", {"reuse": "messages", "offsets": [0]}, "offsets", "1 positions for 2 messages"),
        ("chat/completions", {"reuse": "auto", "offsets": [0, 0]}, "offsets", "reuse='messages'"),
        ("chat/completions", {"reuse": "messages", "offsets": [0, -1]}, "choreography.offsets[1]", "greater than"),
        ("chat/completions", {"reuse": "messages", "offsets": [0, 1.5]}, "choreography.offsets[1]", "integer"),
        ("chat/completions", {"reuse": "messages", "offsets": [0, 99999]}, None, "position"),
        ("completions", {"reuse": "messages", "offsets": [0, 1]}, "offsets", "reuse='messages'"),
    ],
)
def test_offsets_that_cannot_be_used_are_refused(live, path, choreography, param, text):
    body = {"model": "tiny", "max_tokens": 2, "choreography": choreography}
    body |= {"messages": [SYSTEM, TOPICS[0]]} if path.startswith("chat") else {"prompt": "Hello"}
    answer = httpx.post(f"{live.url}/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and text in error["message"], error
    live.wait_until_idle()
    live.engine.check()


def test_the_last_tokens_of_an_answer_share_the_first_step_of_the_next_request(live, client, monkeypatch):
    live.wait_until_idle()
    monkeypatch.setattr(engine_thread, "LINGER_SECONDS", 60)
    num_steps = live.engine.stats().num_steps
    options = {"ignore_eos": True, "choreography": {"reuse": "auto", "workflow": "shared steps"}}
    for topic in TOPICS[:2]:
        client.chat.completions.create(model="tiny", messages=[SYSTEM, topic], max_tokens=5, extra_body=options)
    monkeypatch.setattr(engine_thread, "LINGER_SECONDS", 0)
    assert live.engine.stats().num_steps - num_steps == 2 * 5
    httpx.delete(f"{live.url}/v1/workflows/other")  # wakes the engine's thread
    live.wait_until_idle()
    assert live.engine.stats().num_steps - num_steps == 2 * 5 + 1


def test_a_listener_that_raises_leaves_no_request_open(talker_folder):
    engine = make_engine(talker_folder)
    planner = create_app(engine, ServerConfig(max_tokens=16)).state.service.planner
    answer = Answer(SamplingParams(max_tokens=4, temperature=0))
    prompt = ChatPrompt([*range(10, 18), 7], [Segment(tuple(range(10, 18)))], [7])
    plan = planner.plan("messages", WorkflowKey(Client("team"), "w", "base"), prompt, [answer] * 3)

    def fail(event):
        if event.kind == "released":
            raise ValueError("an error of the listener")

    unsubscribe = engine.events.subscribe(fail)
    with pytest.raises(ValueError, match="of the listener"):
        plan.close(False)
    unsubscribe()
    assert all(inspect(message).is_released for message in plan.messages)
    assert [workflow.num_active for workflow in planner.store.workflows] == [0]
    planner.store.check()
    engine.run_until_idle()
    engine.close()
