"""The proxy finds what prompts quote, and its clients see nothing of it but the speed."""

import asyncio
import json
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
import uvicorn
from helpers.command_line import app as cli
from helpers.fake_vllm_chat import MODEL, serving_chats
from helpers.live_proxy import serving_proxy
from helpers.live_server import make_engine
from typer.testing import CliRunner

from choreograph.errors import ConfigError

SPEECH = (
    "The old mill on the river has ground corn for the town since the bridge was built, and nothing that was said "
    "in the council has changed what the miller takes for a sack of flour."
)
REPLY = (
    "A ferry crosses twice a day in summer and once in winter; whoever misses it walks to the stone bridge, which is "
    "two hours along the bank, past the meadows and the chapel."
)
SYSTEM = {"role": "system", "content": "You are the chair of a long debate about rivers, bridges and towns between."}
LEFT = {"role": "user", "content": SPEECH}
RIGHT = {"role": "user", "content": REPLY}


@pytest.fixture(scope="module")
def engine(talker_folder):
    return make_engine(talker_folder, 1 << 15)


class Pair:
    """A server and a proxy of it."""

    def __init__(self, url, proxy, upstream_url, upstream):
        self.url, self.proxy, self.upstream_url, self.upstream = url, proxy, upstream_url, upstream

    def post(self, path="/v1/chat/completions", *, url=None, headers=None, status=200, **body):
        body = {"model": MODEL, "max_tokens": 6, "temperature": 0} | body
        answer = httpx.post(f"{url or self.url}{path}", json=body, headers=headers, timeout=60)
        assert answer.status_code == status, answer.text
        self.proxy.store.check()
        return answer.json()

    def ask(self, *messages, **body):
        """Return (answer, its tokens by source)."""
        answer = self.post(messages=messages, **body)
        usage = answer["usage"]["choreography"]
        sources = {name: usage[f"{name}_tokens"] for name in ("prefix", "message", "quoted", "computed")}
        assert sum(sources.values()) == answer["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(sources.values()) - sources["computed"]
        return answer, sources

    def spans(self):
        """The spans of the last request with entries."""
        asked = [body["kv_transfer_params"]["choreograph"] for body in self.upstream.bodies]
        return [params["spans"] for params in asked if "spans" in params][-1]

    @property
    def last(self):
        """The last completion that the server got."""
        return self.upstream.bodies[-1]

    def tokens(self, text):
        return self.upstream.engine.tokenizer.encode(text)


@contextmanager
def open_pair(engine, *, holes=True, **options):
    with serving_chats(engine, holes=holes) as (upstream_url, upstream), serving_proxy(upstream_url, **options) as pair:
        yield Pair(*pair, upstream_url, upstream)
        upstream.evict()


@pytest.fixture(params=[True, False], ids=["holes", "no holes"])
def pair(engine, request):
    with open_pair(engine, holes=request.param) as result:
        yield result


@pytest.fixture
def holes_pair(engine):
    with open_pair(engine) as result:
        yield result


def test_whole_messages_are_found_in_another_order(pair):
    first, sources = pair.ask(SYSTEM, LEFT, RIGHT)
    assert sources["computed"] == first["usage"]["prompt_tokens"]
    second, sources = pair.ask(SYSTEM, RIGHT, LEFT)
    assert sources["prefix"] > 15 and sources["message"] > 60
    direct = pair.post(url=pair.upstream_url, **pair.last)
    assert direct["choices"][0]["message"] == second["choices"][0]["message"]
    assert direct["kv_transfer_params"]["choreograph"]["reused_tokens"] == sum(sources.values()) - sources["computed"]


def test_quotes_inside_other_texts_are_found(pair):
    pair.ask(SYSTEM, LEFT, RIGHT)
    quote = {"role": "user", "content": f"Ann said: {REPLY}\nBob said: {SPEECH}\nWho is right?"}
    answer, sources = pair.ask(quote)
    assert sources["quoted"] > 60 and sources["computed"] < 50
    num_reused = sum(span["stop"] - span["start"] for span in pair.spans())
    num_filled = sum(len(body["prompt"]) > 1 and body["max_tokens"] == 1 for body in pair.upstream.bodies)
    assert num_filled == (0 if pair.upstream.holes else 2)  # the tokens before each quote
    assert num_reused >= sources["quoted"] and (num_filled or num_reused == sources["quoted"])
    direct = pair.post(url=pair.upstream_url, **pair.last)
    assert direct["choices"][0]["message"] == answer["choices"][0]["message"]
    assert pair.ask(quote)[1]["computed"] < 16  # what is new in it was stored


def test_holes_are_computed_as_by_a_server_that_can(engine):
    texts = []
    for holes in (True, False):
        with open_pair(engine, holes=holes) as pair:
            pair.ask(SYSTEM, LEFT, RIGHT)
            texts.append(pair.ask({"role": "user", "content": f"Ann: {REPLY} Bob: {SPEECH} So?"}, max_tokens=16)[0])
    assert texts[0]["choices"] == texts[1]["choices"] and texts[0]["usage"] == texts[1]["usage"]


def test_a_chat_that_continues_is_answered_as_without_the_proxy(pair):
    chat, plain = [SYSTEM, LEFT], []
    for text in ("And the ferry?", "How long does it take to walk there along the bank, past the meadows?"):
        answer, sources = pair.ask(*chat, max_tokens=12)
        direct = pair.post(url=pair.upstream_url, messages=chat, max_tokens=12)
        assert answer["choices"] == direct["choices"]
        plain.append(sources)
        chat += [answer["choices"][0]["message"], {"role": "user", "content": text}]
    assert plain[1]["prefix"] >= sum(plain[0].values()) and not plain[1]["quoted"] + plain[1]["message"]


def test_an_answer_is_found_where_others_quote_it(holes_pair):
    holes_pair.ask(LEFT, allowed_token_ids=holes_pair.tokens(REPLY), max_tokens=60)
    _, sources = holes_pair.ask({"role": "user", "content": f"They answered:\n{REPLY}\nIs that so?"})
    assert sources["quoted"] > 25


def test_text_prompts_reuse_quotes(holes_pair):
    holes_pair.post("/v1/completions", prompt=f"{SPEECH} {REPLY}")
    for prompt in (f"Again: {REPLY} {SPEECH}", [f"More: {REPLY} {SPEECH}"], holes_pair.tokens(f"x {SPEECH}")):
        usage = holes_pair.post("/v1/completions", prompt=prompt)["usage"]["choreography"]
        assert usage["quoted_tokens"] + usage["message_tokens"] > 25


@pytest.mark.parametrize(
    "other",
    [
        {"headers": {"authorization": "Bearer another"}},
        {"cache_salt": "another"},
        {"choreography": {"workflow": "another"}},
        {"choreography": {"labels": ["secret"]}},
        {"headers": {"x-choreography-labels": "secret"}},
        {"headers": {"x-choreography-workflow": "another"}},
    ],
)
def test_tenants_find_nothing_of_each_other(holes_pair, other):
    holes_pair.ask(LEFT)
    _, sources = holes_pair.ask(LEFT, **other)
    assert sources["computed"] == sum(sources.values())
    assert holes_pair.ask(LEFT, **other)[1]["computed"] < 5
    assert holes_pair.ask(LEFT)[1]["computed"] < 5


@pytest.mark.parametrize("stream", [False, True])
def test_entries_that_are_gone_are_computed_again(pair, stream):
    pair.ask(SYSTEM, LEFT, RIGHT)
    name = next(iter(pair.upstream.names))
    pair.upstream.evict(name)
    chat = [SYSTEM, RIGHT, LEFT]
    if stream:
        assert "error" not in read_stream(pair.url, chat).decode()
    else:
        assert pair.ask(*chat)[1]["message"] > 25
    assert name not in json.dumps(pair.spans())
    pair.upstream.evict()  # the server was restarted
    num_before = len(pair.upstream.bodies)
    assert pair.ask(*chat)[1]["computed"] > 60
    assert len(pair.upstream.bodies) == num_before + 3  # refused, asked for all entries, answered
    assert pair.ask(*chat)[1]["computed"] < 5


def test_a_server_that_fails_gets_the_request_without_reuse(holes_pair):
    holes_pair.ask(LEFT)
    holes_pair.upstream.num_failures = 2  # the completion, and the question for missing entries
    answer = holes_pair.post(messages=[LEFT])
    assert holes_pair.last["kv_transfer_params"] == {"choreograph": {"mode": "exact"}}
    assert answer["choices"][0]["message"]["content"]
    holes_pair.upstream.num_failures = 3
    assert holes_pair.post(messages=[LEFT], status=500)["error"]["message"] == "an error of the server"


def read_stream(url, messages, **body):
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True} | body
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        return answer.read()


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"path": "text"}])
def test_streams_are_byte_for_byte_those_of_the_server(holes_pair, options):
    if options.pop("path", None):
        body = {"model": MODEL, "prompt": SPEECH, "max_tokens": 8, "temperature": 0, "stream": True}
        read = lambda url: httpx.post(f"{url}/v1/completions", json=body, timeout=60).content  # noqa: E731
    else:
        read = lambda url: read_stream(url, [LEFT], **options)  # noqa: E731
    direct = read(holes_pair.upstream_url)
    assert [read(holes_pair.url), read(holes_pair.url)] == [direct, direct]
    assert holes_pair.last["return_token_ids"] is True


def test_token_ids_that_a_client_asks_for_stay(holes_pair):
    stream = read_stream(holes_pair.url, [LEFT], return_token_ids=True)
    assert stream == read_stream(holes_pair.upstream_url, [LEFT], return_token_ids=True)
    answer = holes_pair.post(messages=[LEFT], return_token_ids=True)
    assert answer["prompt_token_ids"] and len(answer["choices"][0]["token_ids"]) == 6
    answer = holes_pair.post(messages=[LEFT])
    assert answer["prompt_token_ids"] is answer["choices"][0]["token_ids"] is answer["kv_transfer_params"] is None


def test_a_stream_reports_reuse_in_its_usage(holes_pair):
    holes_pair.ask(SYSTEM, LEFT, RIGHT)
    stream = read_stream(holes_pair.url, [SYSTEM, RIGHT], stream_options={"include_usage": True})
    usage = json.loads(stream.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
    assert usage["choreography"]["message_tokens"] > 25
    assert (
        usage["prompt_tokens_details"]["cached_tokens"]
        == usage["prompt_tokens"] - usage["choreography"]["computed_tokens"]
    )


async def test_clients_of_openai_work(holes_pair):
    options = {"model": MODEL, "messages": [SYSTEM, LEFT], "max_tokens": 6, "temperature": 0}
    with openai.OpenAI(base_url=f"{holes_pair.url}/v1", api_key="k", max_retries=0) as client:
        text = client.chat.completions.create(**options).choices[0].message.content
        parts = client.chat.completions.create(**options, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        assert [model.id for model in client.models.list()] == [MODEL]
    async with openai.AsyncOpenAI(base_url=f"{holes_pair.url}/v1", api_key="k", max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**options) for _ in range(6)))
        assert {answer.choices[0].message.content for answer in answers} == {text}
        assert {answer.usage.model_extra["choreography"]["computed_tokens"] for answer in answers} <= set(range(5))
        parts = [part async for part in await client.chat.completions.create(**options, stream=True)]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text


def test_several_answers_share_the_prompt(holes_pair):
    holes_pair.ask(LEFT, n=3)
    answer, sources = holes_pair.ask(LEFT, n=3)
    assert len(answer["choices"]) == 3 and sources["computed"] < 5


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"choreography": {"reuse": "exact"}}, "exact"),
        ({"choreography": {"reuse": "messages", "repair": 0.5}}, "messages"),
        ({"headers": {"x-choreography-reuse": "exact"}}, "exact"),
        ({"prompt_logprobs": 0}, "exact"),
        ({"echo": True}, "exact"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "truncate_prompt_tokens": 4}, "exact"),
    ],
)  # fmt: skip
def test_requests_that_cannot_or_must_not_reuse_are_sent_plainly(holes_pair, fields, mode):
    holes_pair.ask(LEFT)
    holes_pair.post(**{"messages": [LEFT]} | fields)
    assert holes_pair.last["kv_transfer_params"]["choreograph"]["mode"] == mode
    assert "spans" not in holes_pair.last["kv_transfer_params"]["choreograph"] and "choreography" not in holes_pair.last


def test_parameters_of_the_connector_that_a_client_sends_are_left_alone(holes_pair):
    given = {"choreograph": {"store": [{"entry": "mine", "start": 0, "stop": 8}]}}
    answer = holes_pair.post(messages=[LEFT], kv_transfer_params=given)
    assert holes_pair.last["kv_transfer_params"] == given
    assert answer["kv_transfer_params"]["choreograph"]["stored"] == ["mine"] and holes_pair.proxy.store.num_tokens == 0


def test_repair_is_passed_on(engine):
    with open_pair(engine, repair=0.25) as pair:
        pair.ask(LEFT)
        assert pair.last["kv_transfer_params"]["choreograph"]["repair"] == 0.25
        pair.ask(LEFT, choreography={"repair": 0.0})
        assert "repair" not in pair.last["kv_transfer_params"]["choreograph"]


def test_other_requests_pass_unchanged(holes_pair):
    headers = {"authorization": "Bearer key", "x-mine": "1", "accept-encoding": "br"}
    for method, path, content in (("POST", "/v1/echo?a=b%20c", b"\x00\xffdata"), ("GET", "/v1/echo", b"")):
        answers = [
            httpx.request(method, f"{url}{path}", content=content, headers=headers)
            for url in (holes_pair.url, holes_pair.upstream_url)
        ]
        assert answers[0].status_code == 418 and answers[0].content == answers[1].content == content[::-1]
        got, direct = (dict(answer.headers) for answer in answers)
        ignored = ("host", "connection", "user-agent", "accept")
        sent, direct_sent = (json.loads(values.pop("x-got")) for values in (got, direct))
        assert {k: v for k, v in sent.items() if k not in ignored} == {
            k: v for k, v in direct_sent.items() if k not in ignored
        }
        direct.pop("date", None), direct.pop("server", None)
        assert got == direct
    assert httpx.get(f"{holes_pair.url}/v1/models").json()["data"][0]["id"] == MODEL
    assert httpx.post(f"{holes_pair.url}/tokenize", json={"prompt": "a b"}).json()["count"] == 2
    assert httpx.get(f"{holes_pair.url}/nothing").status_code == 404


async def test_paths_never_lead_to_another_server(holes_pair):
    port = int(holes_pair.url.rpartition(":")[2])
    for target in (
        b"http://127.0.0.1:1/health",
        b"//127.0.0.1:1/x",
        b"/\xc3\xa9?\xc3\xa9",
        b"/a%20b",
        b"*",
        b"/%ff",
        b"/%00",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET " + target + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        status = int((await asyncio.wait_for(reader.read(), 20)).split()[1])
        writer.close()
        assert status in (400, 404), (target, status)


def test_the_memory_is_bounded_and_evicted_entries_are_released(engine):
    with open_pair(engine, max_stored_tokens=150) as pair:
        for number in range(6):
            pair.ask(
                {"role": "user", "content": f"{number} {SPEECH} {number}"}, choreography={"workflow": str(number % 2)}
            )
            assert pair.proxy.store.num_tokens <= 150
        waiting = {name for _, name in pair.proxy.store._releases}
        known = {name for tenant in pair.proxy.store._tenants.values() for name in tenant.entries}
        assert pair.upstream.names == known | waiting and len(waiting) < 6


def test_a_client_that_leaves_ends_the_request(holes_pair):
    body = {"model": MODEL, "messages": [LEFT], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{holes_pair.url}/v1/chat/completions", json=body, timeout=60) as answer:
        next(answer.iter_raw())
    end = time.monotonic() + 20
    while not holes_pair.upstream.num_aborted:
        assert time.monotonic() < end
        time.sleep(0.02)
    holes_pair.ask(LEFT)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"\xff", 400),
        (b'{"a": NaN}', 400),
        (b"[" * 200, 400),
        (b'{"messages": ' + b"[" * 150 + b"]" * 150 + b"}", 400),
        (b'{"messages": "\\ud800"}', 400),
        (b"[1]", 422),
        (b'{"model": "tiny"}', 400),
        (b'{"model": "tiny", "messages": 5}', 400),
        (b'{"model": "tiny", "messages": [5]}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": 7}]}', 400),
        (b'{"model": "tiny", "prompt": [-1]}', 400),
        (b'{"messages": [], "choreography": {"max_kl": 1}}', 400),
        (b'{"messages": [], "choreography": 5}', 400),
        (b'{"messages": [], "choreography": {"repair": 2}}', 400),
    ],
)
def test_hostile_bodies_are_refused(holes_pair, content, status):
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{holes_pair.url}/v1/chat/completions", content=content, headers=headers, timeout=30)
    assert answer.status_code == status, answer.text
    assert holes_pair.ask(LEFT)[1]["computed"]


def test_bodies_of_many_bytes_are_refused(engine):
    with open_pair(engine, max_body_bytes=100) as pair:
        for path in ("/v1/chat/completions", "/v1/echo"):
            assert httpx.post(f"{pair.url}{path}", content=b"a" * 101).status_code == 413


class TestStart:
    """The command and its check of the server."""

    @staticmethod
    def run(monkeypatch, *arguments):
        """Run the command up to the start of uvicorn; return its options, or the error."""
        options = {}
        monkeypatch.setattr(uvicorn, "run", lambda app, **given: options.update(given, proxy=app.state.proxy))
        try:
            outcome = CliRunner().invoke(cli, ["proxy", *map(str, arguments)], catch_exceptions=False)
        except ConfigError as exc:
            return str(exc)
        return options or outcome.output

    def test_options_reach_the_proxy(self, holes_pair, monkeypatch):
        options = self.run(
            monkeypatch, "--upstream", f"{holes_pair.upstream_url}/v1/", "--port", 9001, "--repair", 0.5,
            "--max-stored-tokens", 7, "--max-body-bytes", 8,
        )  # fmt: skip
        assert (options["host"], options["port"], options["server_header"]) == ("127.0.0.1", 9001, False)
        config = options["proxy"].config
        assert config.upstream == holes_pair.upstream_url
        assert (config.repair, config.max_stored_tokens, config.max_body_bytes) == (0.5, 7, 8)

    def test_a_key_of_the_server_is_sent_by_the_check(self, holes_pair, monkeypatch):
        holes_pair.upstream.key = "secret-key"
        assert "status 401: give --api-key" in self.run(monkeypatch, "--upstream", holes_pair.upstream_url)
        options = self.run(monkeypatch, "--upstream", holes_pair.upstream_url, "--api-key", "secret-key")
        assert options["proxy"].config.api_key == "secret-key"
        holes_pair.post(messages=[LEFT], headers={"authorization": "Bearer secret-key"})
        holes_pair.post(messages=[LEFT], status=401)

    def test_a_server_without_the_connector_is_refused(self, holes_pair, monkeypatch):
        holes_pair.upstream.version = None
        message = self.run(monkeypatch, "--upstream", holes_pair.upstream_url)
        assert "runs no connector" in message and '"kv_connector": "ChoreographConnector"' in message
        holes_pair.upstream.version = 2
        assert "its connector has protocol 2, not protocol 1" in self.run(
            monkeypatch, "--upstream", holes_pair.upstream_url
        )

    def test_other_addresses_are_refused(self, holes_pair, monkeypatch):
        assert "does not answer" in self.run(monkeypatch, "--upstream", "http://127.0.0.1:1")
        assert "use an address like" in self.run(monkeypatch, "--upstream", "127.0.0.1:8000")
        wrong = f"{holes_pair.upstream_url}/v1/echo?"
        assert "give the address of a vLLM server" in self.run(monkeypatch, "--upstream", wrong)


def test_a_server_that_is_down_is_a_bad_gateway(engine):
    with open_pair(engine) as pair:
        upstream, url = pair.upstream_url, pair.url
        pair.proxy.client._base_url = httpx.URL("http://127.0.0.1:1/")
        for path in ("/v1/chat/completions", "/v1/models"):
            answer = httpx.post(f"{url}{path}", json={"messages": [LEFT]}, timeout=30)
            assert answer.status_code == 502 and f"upstream {upstream}" in answer.json()["error"]["message"]
