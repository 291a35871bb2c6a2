"""Public reports on clients that leave, metrics of what they left, and tenants that guess."""

import re
import threading
import time

import httpx
import openai
import pytest
import torch
from helpers.forced_answers import ASK
from helpers.live_server import make_engine, serving
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

KEYS = ("first-secret", "second-secret")
LONG = {"model": "tiny", "messages": ASK, "max_tokens": 4000, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def live(talker_folder, tmp_path_factory):
    """A server with two adapters."""
    engine = make_engine(talker_folder)
    for seed, name in enumerate(("alpha", "beta")):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(talker_folder)
        config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        folder = tmp_path_factory.mktemp(name)
        get_peft_model(base, config).save_pretrained(str(folder))
        engine.add_adapter(name, folder)
    with serving(engine) as server:
        yield server


def leave(live, after=2, **options):
    """Read some events of a stream, and close the connection."""
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=LONG | options, timeout=60) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        for _ in range(2 * after):
            next(lines)


def metrics(live):
    text = httpx.get(f"{live.url}/metrics").text
    return {match[1]: float(match[2]) for match in re.finditer(r"^(choreograph:\S+) (\S+)$", text, re.MULTILINE)}


def complete(live, **options):
    body = {"model": "tiny", "messages": ASK, "max_tokens": 8, "temperature": 0} | options
    reply = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("count", [1, 4])
def test_all_answers_of_a_request_end_with_its_client(live, count):
    before = live.engine.stats().events.get("token", 0)
    leave(live, n=count, temperature=1, seed=1)
    live.wait_until_idle()
    assert live.engine.stats().events["token"] - before < 2000 * count


def test_metrics_of_requests_that_were_left_return_to_zero_and_count_them(live):
    def num_aborted(values):
        keys = [key for key in values if "request_success_total" in key and 'finished_reason="abort"' in key]
        return sum(values[key] for key in keys)

    before = metrics(live)
    for _ in range(3):
        leave(live)
    live.wait_until_idle()
    after, end = metrics(live), time.monotonic() + 20
    while num_aborted(after) < num_aborted(before) + 3 and time.monotonic() < end:  # the handlers end after the engine
        time.sleep(0.05)
        after = metrics(live)
    for name in ("num_requests_running", "num_requests_waiting"):
        assert [value for key, value in after.items() if key.startswith(f"choreograph:{name}")] == [0.0]
    assert num_aborted(after) - num_aborted(before) == 3
    computed = next(key for key in after if key.startswith("choreograph:computed_tokens"))
    assert after[computed] > before[computed]


def test_clients_that_leave_together_change_nothing_for_one_that_stays(live):
    quiet = complete(live, cache_salt="quiet", max_tokens=40)["choices"][0]["message"]
    threads = [threading.Thread(target=leave, args=(live, 1 + i % 3)) for i in range(12)]
    for thread in threads:
        thread.start()
    kept = complete(live, cache_salt="kept", max_tokens=40)["choices"][0]["message"]
    for thread in threads:
        thread.join()
    live.wait_until_idle()
    live.engine.check()
    assert kept == quiet and httpx.get(f"{live.url}/health").status_code == 200


def test_requests_that_are_left_while_they_wait_are_dropped(live):
    before = live.engine.stats().num_batched_tokens
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=0.2) as client:
        for number in range(5):
            messages = [{"role": "user", "content": f"{number} " * 500}]
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=4000, extra_body={"ignore_eos": True}
                )
    live.wait_until_idle()
    assert live.engine.stats().num_batched_tokens - before < 5 * 4000


def test_a_turn_that_is_left_or_refused_does_not_change_the_conversation(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="tiny", input="Begin. " * 30, max_output_tokens=4)
        options = {"model": "tiny", "previous_response_id": first.id, "temperature": 0}
        expected = client.responses.create(**options, input="Go on", max_output_tokens=4)
        stream = client.responses.create(
            **options, input="Tell", stream=True, max_output_tokens=3000, extra_body={"ignore_eos": True}
        )
        for _ in range(6):
            next(stream)
        stream.close()
        with pytest.raises(openai.BadRequestError):  # longer than the context
            client.responses.create(**options, input="word " * 20_000, max_output_tokens=4)
        again = client.responses.create(**options, input="Go on", max_output_tokens=4)
    assert again.output_text == expected.output_text
    assert again.usage.input_tokens == expected.usage.input_tokens
    live.wait_until_idle()
    live.engine.check()


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_no_salt_of_a_request_names_the_cache_of_an_adapter(live, field):
    """The names and fingerprints of an adapter as a salt: the base model finds nothing that the adapter made."""
    messages = [{"role": "user", "content": f"A long prompt of {field}. " * 20}]
    fingerprint = live.engine.core.hf_model.lora_manager.adapters["alpha"].fingerprint
    complete(live, model="alpha", messages=messages)
    expected = complete(live, messages=messages, cache_salt="fresh")
    for salt in ("alpha", fingerprint, f"lora:{fingerprint}", f"('lora', '{fingerprint}')"):
        answer = complete(live, messages=messages, **{field: salt})
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 40  # the template's own turn at most


@pytest.mark.parametrize("reuse", ["exact", "messages"])
def test_a_tenant_that_supplies_the_salt_of_another_finds_nothing_in_any_tier(talker_folder, reuse):
    engine = make_engine(talker_folder, tokens=512, host_capacity=8192)
    with serving(engine, api_keys=KEYS) as server:

        def cached(key, content):
            body = {"model": "tiny", "max_tokens": 2, "cache_salt": "known", "choreography": {"reuse": reuse}}
            body["messages"] = [{"role": "user", "content": content}]
            headers = {"authorization": f"Bearer {key}"}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
            assert reply.status_code == 200, reply.text
            server.wait_until_idle()
            return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        secret = "The secret of the first tenant. " * 20
        assert cached(KEYS[0], secret) < 40
        for number in range(4):  # the secret is offloaded to the host
            cached(KEYS[0], f"{number} other words " * 60)
        assert cached(KEYS[1], secret) < 40
        assert cached(KEYS[0], secret) > 100
