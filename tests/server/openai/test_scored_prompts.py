"""Log-probabilities of prompts through clients, as lm-evaluation-harness and vLLM's clients ask for them."""

import json
from types import SimpleNamespace

import httpx
import pytest
import torch
from helpers.inspect_engine import inspect
from transformers import LlamaForCausalLM

from choreograph import connect
from choreograph.server.openai.scored_prompts import num_added_characters

TEXT = "One two three, red green blue. Four five six"
CHAT = [
    {"role": "system", "content": "You count the ships that come in at noon."},
    {"role": "user", "content": "Seven ships came in today, two of them at noon."},
    {"role": "assistant", "content": "Two ships."},
    {"role": "user", "content": "And how many came in later than that?"},
]
GREEDY = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def plain_scores(talker_folder):
    """Log-probabilities of tokens after the first one, by one forward pass of transformers."""
    model = LlamaForCausalLM.from_pretrained(talker_folder).eval()

    def score(tokens):
        with torch.no_grad():
            rows = model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
        return rows.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    return score


def post(live, path, body):
    return httpx.post(f"{live.url}/v1/{path}", json=GREEDY | body, timeout=60)


def tokens_of(live, **body):
    return httpx.post(f"{live.url}/tokenize", json=body).json()["tokens"]


def values(items):
    """Log-probabilities of vLLM's field after the first token, which has none."""
    assert items[0] is None
    return [next(iter(item.values()))["logprob"] for item in items[1:]]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("reuse", ["exact", "messages", "auto"])
def test_an_echoed_prompt_has_log_probabilities(live, client, plain_scores, reuse, max_tokens):
    tokens = tokens_of(live, prompt=TEXT)
    extra = {"choreography": {"reuse": reuse, "workflow": f"echo-{max_tokens}"}}
    for prompt in (TEXT, tokens, TEXT):
        answer = client.completions.create(
            **GREEDY, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, extra_body=extra
        )
        (choice,), n = answer.choices, len(tokens) + max_tokens
        logprobs = choice.logprobs
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", max_tokens)
        assert "".join(logprobs.tokens) == choice.text and choice.text.startswith(TEXT)
        assert (choice.text == TEXT) == (max_tokens == 0)
        assert [len(part) for part in (logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)] == [n] * 3
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(plain_scores(tokens), abs=1e-3)
        pairs = list(zip(logprobs.tokens, logprobs.text_offset, strict=True))
        assert all(choice.text[offset : offset + len(token)] == token for token, offset in pairs)
        for token, value, top in zip(
            logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
        ):
            assert top[token] == value and len(top) in (2, 3)


def test_several_prompts_and_answers_have_their_own_prompts(live, client, plain_scores):
    prompts = ["Red green blue", "One two three four five"]
    answer = client.completions.create(
        **GREEDY, prompt=prompts, n=2, echo=True, logprobs=1, max_tokens=2, extra_body={"prompt_logprobs": 0}
    )
    for index, choice in enumerate(answer.choices):
        tokens = tokens_of(live, prompt=prompts[index // 2])
        wanted = plain_scores(tokens)
        assert choice.logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(wanted, abs=1e-3)
        assert len(choice.logprobs.tokens) == len(tokens) + 2
        assert values(choice.prompt_logprobs) == pytest.approx(wanted, abs=1e-3)
        assert [list(item) for item in choice.prompt_logprobs[1:]] == [[str(token)] for token in tokens[1:]]
    none = client.completions.create(**GREEDY, prompt=prompts, n=2, echo=True, logprobs=1, max_tokens=0)
    assert [choice.text for choice in none.choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert none.choices[3].logprobs.token_logprobs[1:] == pytest.approx(plain_scores(tokens), abs=1e-3)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_stream_begins_with_the_scored_prompt(client, n, max_tokens):
    options = GREEDY | {"prompt": [TEXT, "Red"], "n": n, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    whole = client.completions.create(**options).choices
    parts = [[] for _ in whole]
    for event in client.completions.create(**options, stream=True):
        for choice in event.choices:
            parts[choice.index].append(choice)
    for choice, own in zip(whole, parts, strict=True):
        assert own[0].text.startswith(TEXT if choice.index < n else "Red")
        assert "".join(part.text for part in own) == choice.text
        for name in ("tokens", "text_offset", "top_logprobs", "token_logprobs"):
            joined = [item for part in own for item in getattr(part.logprobs, name)]
            if name in ("tokens", "text_offset"):
                assert joined == getattr(choice.logprobs, name)
            assert len(joined) == len(choice.logprobs.tokens)


def test_a_generated_end_token_keeps_its_entry(live, client):
    """lm-evaluation-harness drops the last entry as that of the one generated token."""
    end = inspect(live.engine).hf_model.eos_token_ids[0]
    answer = client.completions.create(
        **GREEDY, prompt=TEXT, echo=True, logprobs=1, max_tokens=1, logit_bias={str(end): 100}
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (TEXT, "stop")
    assert len(choice.logprobs.token_logprobs) == len(tokens_of(live, prompt=TEXT)) + 1


def test_prompt_logprobs_have_the_form_of_vllm(live, client):
    tokens = tokens_of(live, prompt=TEXT)
    answer = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=1, extra_body={"prompt_logprobs": 2})
    items = answer.choices[0].prompt_logprobs
    assert answer.choices[0].logprobs is None and answer.choices[0].text
    assert [item and next(iter(item)) for item in items] == [None, *map(str, tokens[1:])]
    for item in items[1:]:
        assert len(item) in (2, 3) and {entry["rank"] for entry in item.values()} >= {1, 2}
        for token, entry in item.items():
            assert entry["decoded_token"] == live.engine.tokenizer.decode([int(token)])
        by_rank = sorted(item.values(), key=lambda entry: entry["rank"])
        assert by_rank == sorted(item.values(), key=lambda entry: -entry["logprob"])


def test_chats_are_scored_in_every_reuse_mode(live, client, plain_scores):
    tokens = tokens_of(live, messages=CHAT, add_generation_prompt=True)
    wanted = plain_scores(tokens)

    def ask(messages, **choreography):
        extra = {"prompt_logprobs": 0, "choreography": {"workflow": "chats"} | choreography}
        answer = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=0, extra_body=extra)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
        assert answer.usage.completion_tokens == 0
        return answer

    exact = ask(CHAT, reuse="exact")
    assert values(exact.prompt_logprobs) == pytest.approx(wanted, abs=1e-3)
    assert [item and int(next(iter(item))) for item in exact.prompt_logprobs] == [None, *tokens[1:]]
    first = ask(CHAT, reuse="messages")
    assert values(first.prompt_logprobs) == pytest.approx(wanted, abs=1e-3), "every message saw all before it"

    # without the first question, the later messages are reused as they were encoded: after it
    shorter = [CHAT[0], *CHAT[2:]]
    wanted = plain_scores(tokens_of(live, messages=shorter, add_generation_prompt=True))
    reused = ask(shorter, reuse="messages")
    assert reused.usage.choreography["message_tokens"] > 0
    assert len(values(reused.prompt_logprobs)) == len(wanted)
    assert values(reused.prompt_logprobs) != pytest.approx(wanted, abs=1e-3)
    repaired = ask(shorter, reuse="messages", repair=1)
    assert repaired.usage.choreography["repaired_tokens"] > 0
    assert values(repaired.prompt_logprobs) == pytest.approx(wanted, abs=1e-3)
    partly = ask(shorter, reuse="messages", repair=0.5)
    assert values(partly.prompt_logprobs) != pytest.approx(values(reused.prompt_logprobs), abs=1e-3)
    auto = ask(shorter, reuse="auto")
    assert len(values(auto.prompt_logprobs)) == len(wanted)
    live.wait_until_idle()
    live.engine.check()


def test_the_continuation_is_scored_over_the_reused_context(live, client):
    """What a quality harness measures: the same continuation, after a context that is reused in place."""
    story = "The ships came in at noon, and the harbour master wrote down seven names, one after the other, in red ink."
    extra = {"choreography": {"reuse": "auto", "workflow": "harness"}}
    client.completions.create(**GREEDY, prompt="Before noon nothing. " + story, max_tokens=1, extra_body=extra)
    scores = {}
    for reuse in ("exact", "auto"):
        body = {"prompt": story + " He was tired.", "echo": True, "logprobs": 1, "max_tokens": 0}
        extra = {"choreography": {"reuse": reuse, "workflow": "harness"}}
        answer = client.completions.create(**GREEDY, **body, extra_body=extra)
        scores[reuse] = answer.choices[0].logprobs.token_logprobs
        if reuse == "auto":
            assert answer.usage.choreography["quoted_tokens"] > 10
    assert len(scores["auto"]) == len(scores["exact"])
    assert scores["auto"][1:] != pytest.approx(scores["exact"][1:], abs=1e-3)


def test_prompts_of_a_schema_are_scored(live, client):
    pml = '<schema name="score"><module name="a">Seven ships came in at noon.</module></schema>'
    assert httpx.put(f"{live.url}/v1/schemas/score", json={"pml": pml}).status_code == 200
    prompt, extra = '<prompt schema="score"><a/> Later:</prompt>', {"choreography": {"schema": "score"}}
    answer = client.completions.create(**GREEDY, prompt=prompt, max_tokens=0, extra_body=extra | {"prompt_logprobs": 0})
    assert len(answer.choices[0].prompt_logprobs) == answer.usage.prompt_tokens
    assert httpx.delete(f"{live.url}/v1/schemas/score").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens"),
        ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ("chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"messages": CHAT, "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ("responses", {"input": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_wrong_options_are_refused(live, path, body, param):
    answer = httpx.post(f"{live.url}/v1/{path}", json={"model": "tiny"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_an_echo_without_log_probabilities_generates_nothing_either(client):
    answer = client.completions.create(**GREEDY, prompt=TEXT, echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].logprobs, answer.usage.completion_tokens) == (TEXT, None, 0)
    assert answer.choices[0].finish_reason == "length"


def test_numbers_of_a_scored_prompt_are_json(live):
    """A bias of the sampler changes no score, and no value leaves the range of JSON."""
    body = {"prompt": TEXT, "echo": True, "logprobs": 20, "prompt_logprobs": 20, "max_tokens": 1}
    body |= {"logit_bias": {"5": -100}, "temperature": 2, "repetition_penalty": 1.5}
    answer = post(live, "completions", body)
    assert "NaN" not in answer.text and "Infinity" not in answer.text
    plain = post(live, "completions", {"prompt": TEXT, "echo": True, "logprobs": 0, "max_tokens": 0})
    choices = [json.loads(result.text)["choices"][0]["logprobs"]["token_logprobs"] for result in (answer, plain)]
    assert choices[0][1 : len(choices[1])] == pytest.approx(choices[1][1:], abs=1e-4)


def test_remote_sessions_return_scored_prompts(live, plain_scores):
    tokens = tokens_of(live, prompt=TEXT)
    with connect(live.url) as engine, engine.session() as session:
        parent = session.prefill(tokens[:6])
        message = session.decode(tokens[6:], [parent], max_tokens=0, prompt_logprobs=1)
        assert message.prompt_logprobs[0] is None
        assert [item.logprob for item in message.prompt_logprobs[1:]] == pytest.approx(plain_scores(tokens), abs=1e-3)
        assert {len(item.top) for item in message.prompt_logprobs[1:]} == {1} and message.prompt_logprobs[1].rank > 0
        assert session.decode(tokens, max_tokens=1).prompt_logprobs is None


def test_a_response_has_a_bounded_number_of_log_probabilities(live):
    tokens = [5] * 200
    body = {"prompt": [tokens] * 20, "echo": True, "logprobs": 20, "max_tokens": 0}
    for change, name in (({}, "logprobs"), ({"prompt_logprobs": 20, "logprobs": None}, "prompt_logprobs")):
        answer = post(live, "completions", body | change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert "4000 tokens" in answer.json()["error"]["message"]
    assert post(live, "completions", body | {"logprobs": None}).status_code == 200, "an echo has none"
    long = [5, 6] * (live.app.state.service.max_model_len // 4)
    answer = post(live, "completions", {"prompt": long, "echo": True, "logprobs": 1, "max_tokens": 1})
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == len(long) + 1


def test_several_chat_answers_share_the_scores_of_their_prompt(client):
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    for max_tokens in (0, 2):
        answer = client.chat.completions.create(
            **GREEDY, messages=CHAT, n=3, max_completion_tokens=max_tokens, extra_body=extra
        )
        assert [len(choice.token_ids) for choice in answer.choices] == [max_tokens] * 3
        assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)


def test_a_grammar_forbids_nothing_where_nothing_is_generated(client):
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(
        **GREEDY, prompt=TEXT, echo=True, logprobs=0, max_tokens=0, stop=["two"], extra_body=extra
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "length")


def test_a_streamed_echo_without_log_probabilities_has_one_text(client):
    events = list(client.completions.create(**GREEDY, prompt=TEXT, echo=True, max_tokens=0, stream=True))
    assert "".join(choice.text for event in events for choice in event.choices) == TEXT


def test_stored_messages_keep_no_scores(live, client):
    extra = {"choreography": {"reuse": "auto", "workflow": "kept"}, "prompt_logprobs": 1}
    client.completions.create(**GREEDY, prompt=TEXT, max_tokens=2, extra_body=extra)
    live.wait_until_idle()
    workflows = live.app.state.service.planner.store._workflows
    messages = [m for key, w in workflows.items() if key.workflow == "kept" for m in w.session.messages]
    assert messages and not any(message.prompt_logprobs for message in messages)


def test_a_token_that_a_tokenizer_adds_has_no_place_in_the_text():
    tokenizer = SimpleNamespace(all_special_ids=[1], decode=lambda ids: "<s>" if ids == [1] else "One")
    assert num_added_characters(tokenizer, "One two", 1) == 3
    assert num_added_characters(tokenizer, "<s>One two", 1) == 0
    assert num_added_characters(tokenizer, "One two", 7) == 0
    assert num_added_characters(tokenizer, [1, 7], 1) == 0


@pytest.mark.parametrize("as_ids", [False, True])
def test_parts_of_characters_in_an_echoed_prompt_join_to_it(live, client, as_ids):
    text = "😀é 日本 👨‍👩 ok"
    prompt = tokens_of(live, prompt=text) if as_ids else text
    (choice,) = client.completions.create(**GREEDY, prompt=prompt, echo=True, logprobs=2, max_tokens=0).choices
    parts = choice.logprobs.tokens
    data = [
        bytes.fromhex(part.removeprefix("bytes:").replace("\\x", "")) if part.startswith("bytes:") else part.encode()
        for part in parts
    ]
    assert choice.text == text and b"".join(data).decode() == text
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets) and 0 == offsets[0] <= offsets[-1] < len(text)
    assert {len(top) for top in choice.logprobs.top_logprobs[1:]} <= {2, 3}
