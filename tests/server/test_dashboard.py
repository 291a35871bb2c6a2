"""The dashboard: what tenants see, keys, its page over HTTP and in a browser."""

import asyncio
import os
import re
import shutil
import time

import httpx
import openai
import pytest
from helpers.live_server import make_engine, serving

import choreograph
from choreograph import SamplingParams
from choreograph.cli import serve_command
from choreograph.errors import ConfigError, MissingDependencyError
from choreograph.server.app import create_app
from choreograph.server.dashboard import dashboard_panels as panels
from choreograph.server.dashboard.request_log import MAX_RECORDS, MAX_ROWS, ContextBar, _row
from choreograph.server.server_config import ServerConfig

KEYS = ("first-secret", "second-secret")
SYSTEM = {"role": "system", "content": "Answer in one sentence."}
QUESTION = {"role": "user", "content": "Which river flows through Paris?"}
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def test_a_server_without_keys_shows_its_page_and_the_whole_cache(talker_folder):
    with serving(make_engine(talker_folder, host_capacity=512), dashboard=True) as server:
        page = httpx.get(f"{server.url}/dashboard", follow_redirects=True)
        assert page.status_code == 200 and "Playground" in page.text and "log out" not in page.text.lower()
        links = set(re.findall(r'(?:src|href)="([^"]+)"|url\("([^"]+)"\)|: ?"(/dashboard[^"]+)"', page.text))
        paths = {path for groups in links for path in groups if path}
        assert paths and all(path.startswith("/dashboard/_nicegui/") for path in paths), paths
        scripts = [path for path in paths if path.endswith(("nicegui.js", "nicegui.css"))]
        assert len(scripts) == 2
        assert all(httpx.get(server.url + path).status_code == 200 for path in scripts)
        ask(server, "none", [QUESTION], reuse="exact")
        _, usage = ask(server, "none", [QUESTION], reuse="exact")
        state = state_of(server, "anonymous")
        stats = server.engine.stats()
        assert [tier[:3] for tier in state.tiers] == [
            ("device", (stats.num_pages - stats.num_free_pages) * 16, stats.num_pages * 16),
            ("host", 0, 512),
        ]
        assert state.sources["prefix"] == usage["choreography"]["prefix_tokens"] > 0
        assert state.ended == {"finished": 2} and state.events["finished"] == 2
        (row, _) = rows_of(server, "anonymous", "trip")
        assert [bar.kind for bar in row.bars] == ["computed", "generated"]


@pytest.fixture(scope="module")
def guarded(talker_folder):
    """A server with two keys and the dashboard."""
    with serving(make_engine(talker_folder, host_capacity=512), api_keys=KEYS, dashboard=True) as server:
        yield server


def ask(server, key, messages, *, workflow="trip", agent="planner", reuse="messages", max_tokens=6):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        options = {"reuse": reuse, "workflow": workflow, "agent": agent}
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=max_tokens,
            extra_body={"choreography": options, "ignore_eos": True},
        )
    return answer.choices[0].message.content, answer.usage.model_dump()


def state_of(server, tenant):
    """What a tenant sees, read while the server runs."""
    service = server.app.state.service
    return asyncio.run(_call(service, lambda: panels.read_state(service, tenant)))


async def _call(service, function):
    return await service.thread.call(function)


def rows_of(server, tenant, workflow):
    log = server.app.state.service.log
    return sorted(asyncio.run(_call(server.app.state.service, lambda: log.tenant(tenant).graphs[workflow].values())))


def test_a_reordered_chat_is_shown_with_its_reused_and_moved_messages(guarded):
    first, _ = ask(guarded, KEYS[0], [SYSTEM, QUESTION])
    answer, more = {"role": "assistant", "content": first}, {"role": "user", "content": "Is that true? Say more."}
    _, usage = ask(guarded, KEYS[0], [SYSTEM, more, answer, QUESTION], agent="judge")
    rows = rows_of(guarded, "tenant-0", "trip")
    assert [row.label for row in rows] == ["prompt", "prompt", "planner", "prompt", "judge"]
    system, question, planner, new, judge = rows
    assert [bar.kind for bar in planner.bars] == ["computed", "computed", "computed", "generated", "computed"]
    assert planner.bars[1] == (question.id, system.bars[0].length, question.bars[-1].length, "computed")
    assert [(bar.source, bar.kind) for bar in judge.bars] == [
        (system.id, "reused"),
        (new.id, "computed"),
        (planner.id, "moved"),
        (question.id, "moved"),
        (judge.id, "computed"),
        (judge.id, "generated"),
        (judge.id, "computed"),  # end of the turn
    ]
    counts = usage["choreography"]
    reused = sum(bar.length for bar in judge.bars if bar.kind in ("reused", "moved"))
    assert reused == counts["prefix_tokens"] + counts["message_tokens"]
    lengths = {bar.source: bar.length for bar in judge.bars[:4]}
    n_system, n_new, n_planner, n_question = (lengths[row.id] for row in (system, new, planner, question))
    assert judge.parents == (  # tokens reused, repaired, computed, leaked, blocked
        (system.id, n_system, 0, 0, 0, 0),
        (new.id, 0, 0, n_new, 0, 0),
        (planner.id, n_planner, 0, 0, n_question, n_new),
        (question.id, n_question, 0, 0, 0, n_new + n_planner),
    )
    html = panels.graph_panel(rows)
    assert f"<td>3</td><td>{n_planner}</td><td>0</td><td>0</td><td>{n_question}</td><td>{n_new}</td>" in html
    assert not system.parents and html.count("<details>") == 2
    ends = [bar.start + bar.length for bar in judge.bars]
    assert [bar.start for bar in judge.bars] == [0, *ends[:-1]]  # positions without gaps


def test_a_message_is_moved_from_the_position_of_its_cached_keys(talker_folder):
    engine, texts = make_engine(talker_folder), [list(range(40, 56)), list(range(60, 70))]
    with engine.session() as session:
        first = session.prefill(texts[0], new_offset=0)
        equal = session.prefill(texts[0], new_offset=32)  # the same entry, whose keys are at 0
        other = session.prefill(texts[1], new_offset=32)
        answers = [
            session.decode([5], [parent], [32], sampling=SamplingParams(max_tokens=1))
            for parent in (first, equal, other)
        ]
        engine.run_until_idle()
        parents = {parent.id for parent in (first, equal, other)}
        rows = [_row(answer, "answer", parents) for answer in answers]
    assert [row.bars[0].kind for row in rows] == ["moved", "moved", "reused"]


def test_quotes_repaired_context_and_several_answers_are_shown(guarded):
    story = {"role": "user", "content": "The mill was built in 1711 and ground rye until the flood of 1954. " * 4}
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEYS[0], max_retries=0) as client:

        def chat(text, **choreography):
            options = {"reuse": "auto", "workflow": "quotes", "agent": "reader", **choreography}
            return client.chat.completions.create(
                model="tiny",
                messages=[SYSTEM, {"role": "user", "content": text}],
                n=2,
                max_tokens=3,
                extra_body={"choreography": options},
            ).usage.choreography

        chat(story["content"])
        quoted = chat("Somebody wrote: " + story["content"] + " Is it true?")
        repaired = chat("And then: " + story["content"] + " Or is it false?", repair=0.3)
    rows = [row for row in rows_of(guarded, "tenant-0", "quotes") if row.label == "reader"]
    assert len(rows) == 6 and state_of(guarded, "tenant-0").timeline[0].status == "finished"
    assert sum(bar.length for bar in rows[2].bars if bar.kind == "moved") == quoted["quoted_tokens"] > 0
    assert 0 < sum(row.repaired for row in rows[4:]) <= repaired["repaired_tokens"]
    assert sum(parent.repaired for row in rows[4:] for parent in row.parents) > 0
    for row in rows:
        ends = [bar.start + bar.length for bar in row.bars]
        assert [bar.start for bar in row.bars] == [0, *ends[:-1]]


def test_no_tenant_sees_requests_messages_or_the_load_of_another(guarded):
    ask(guarded, KEYS[0], [QUESTION], workflow="secret-plan", agent="spy")
    theirs = state_of(guarded, "tenant-0")
    assert "secret-plan" in theirs.workflows and theirs.timeline[0].label == "spy" and theirs.tiers[0].used > 0
    state = state_of(guarded, "tenant-1")
    assert not state.timeline and not state.workflows and not state.sources and not state.ended
    assert [tier[1:] for tier in state.tiers] == [(0, 8192, None), (0, 512, None)] and state.events is None
    assert "Only the stored messages of your key" in panels.cache_panel(state)


def test_running_and_waiting_requests_have_phases(guarded):
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=[QUESTION], max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(3):
            next(stream)
        row = state_of(guarded, "tenant-0").timeline[0]
        stream.close()
    guarded.wait_until_idle()
    assert (row.status, row.cached, row.reuse, row.label) == ("running", None, "exact", "request")
    assert row.generated >= 2 and sum(row.phases) == pytest.approx(row.age) and row.phases[2] > 0
    ended = state_of(guarded, "tenant-0").timeline[0]
    assert (ended.number, ended.status) == (row.number, "failed")
    assert "failed" in panels.timeline_panel(state_of(guarded, "tenant-0"))


def test_calls_of_remote_sessions_are_shown(guarded):
    with choreograph.connect(guarded.url, api_key=KEYS[1]) as engine, engine.session(seed=0) as session:
        question = session.prefill("A long question of a few words.")
        answer = session.decode("Answer:", [question], sampling=choreograph.SamplingParams(max_tokens=4))
        usage = answer.result().usage
        state = state_of(guarded, "tenant-1")
        assert [row.status for row in state.timeline] == ["finished", "finished"]
        assert (state.timeline[0].cached, state.timeline[0].computed) == (usage.cached_tokens, usage.computed_tokens)
        assert state.sources["remote"] == usage.cached_tokens > 0


def test_the_log_is_bounded_and_text_is_escaped(guarded):
    service = guarded.app.state.service
    log, (record, *_) = service.log, service.log.tenant("tenant-0").records
    for number in range(MAX_RECORDS + 5):
        log.start("tenant-2", f"<b>{number}</b>", "<script>", "exact", [])
    state = panels.read_state(service, "tenant-2")
    assert len(state.timeline) == MAX_RECORDS and record.messages == ()
    html = panels.timeline_panel(state)
    assert "<script>" not in html and f"&lt;b&gt;{MAX_RECORDS + 4}&lt;/b&gt;" in html
    assert all(len(rows) <= MAX_ROWS for rows in log.tenant("tenant-0").graphs.values())
    row = panels.MessageRow(7, "a<b", (ContextBar(7, 0, 4, "computed"), ContextBar(7, 4, 6, "generated")), 3)
    html = panels.graph_panel([row])
    assert "a&lt;b" in html and "4 computed, 6 generated, 3 repaired" in html
    assert "left:40.00%;width:60.00%" in html and "own: 6 tokens at 4, generated" in html


def test_without_a_key_there_is_a_login_and_nothing_else(guarded):
    url = f"{guarded.url}/dashboard"
    page = httpx.get(url, follow_redirects=True)
    assert page.status_code == 401 and "API key" in page.text and "_nicegui" not in page.text
    for path in ("/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/favicon.ico", "/anything", "/login"):
        assert httpx.get(url + path).status_code == 401, path
    assert httpx.get(f"{url}/", headers={"authorization": "Bearer wrong"}).status_code == 401
    with httpx.Client(follow_redirects=True) as browser:
        wrong = browser.post(f"{url}/login", data={"key": "wrong"})
        assert wrong.status_code == 401 and "No such key" in wrong.text and not browser.cookies
        right = browser.post(f"{url}/login", data={"key": KEYS[0]})
        assert right.status_code == 200 and "Playground" in right.text
        assert KEYS[0] not in str(browser.cookies.jar)
        (header,) = right.history[0].headers.get_list("set-cookie")
        assert all(part in header for part in ("HttpOnly", "SameSite=strict", "Path=/dashboard"))
        assert browser.get(f"{url}/logout").status_code == 401
    assert httpx.get(f"{url}/", headers={"authorization": f"Bearer {KEYS[0]}"}).status_code == 200


def test_pages_of_other_sites_are_refused(guarded):
    url, key = f"{guarded.url}/dashboard/", {"authorization": f"Bearer {KEYS[0]}"}
    assert httpx.get(url, headers=key | {"origin": "https://evil.example"}).status_code == 403
    assert httpx.get(url, headers=key | {"origin": guarded.url}).status_code == 200


async def test_a_second_dashboard_in_one_process_is_refused(guarded, talker_folder):
    app = create_app(make_engine(talker_folder), ServerConfig(dashboard=True))
    with pytest.raises(ConfigError, match="another server of this process"):
        async with app.router.lifespan_context(app):
            pass


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nicegui", None)
    with pytest.raises(
        MissingDependencyError, match=r"nicegui is not installed: run pip install 'choreograph\[dashboard\]'"
    ):
        serve_command.serve(dashboard=True)


@pytest.fixture
def browser(tmp_path):
    """Headless Chromium."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium: run apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    result = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield result
    result.quit()


def test_a_browser_logs_in_and_runs_the_playground(guarded, browser):
    from selenium.webdriver.common.keys import Keys

    def find(selector):
        return browser.find_element("css selector", selector)

    def text_of(selector, number=0):
        script = (
            "return [...document.querySelectorAll(arguments[0])].map(element => element.innerText)[arguments[1]] || ''"
        )
        return browser.execute_script(script, selector, number)  # at once: panels are replaced while they are read

    def wait(condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, text_of("body")
            time.sleep(0.1)

    def click(text):
        (element,) = [e for e in browser.find_elements("css selector", ".q-tab, button") if text in e.text]
        element.click()

    def select(workflow):
        wait(lambda: text_of(".q-field__native"))  # another test's workflow may be the latest
        find(".q-select").click()
        # Found and clicked at once: items of the menu are replaced when a refresh brings other workflows.
        script = """
            const items = [...document.querySelectorAll(".q-menu .q-item")];
            const item = items.find(element => element.innerText.trim() === arguments[0]);
            item?.click();
            return Boolean(item);
        """
        wait(lambda: browser.execute_script(script, workflow))
        wait(lambda: text_of(".q-field__native") == workflow)

    def fits(width):
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False},
        )
        return browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")

    ask(guarded, KEYS[1], [QUESTION], workflow="mine")
    browser.get(f"{guarded.url}/dashboard/")
    find("#key").send_keys(KEYS[1])
    find("button").click()
    wait(lambda: browser.find_elements("css selector", ".request"))
    text = text_of("body")
    assert "mine · messages" in text and "Only the stored messages of your key" in text and "secret-plan" not in text
    assert fits(1280) and fits(400)
    click("Messages")
    select("mine")
    wait(lambda: "planner" in text_of("body") and browser.find_elements("css selector", ".message .generated"))
    assert fits(400)
    find(".message summary").click()
    wait(lambda: "Blocked" in text_of(".message table"))
    for width in (1280, 400):
        assert fits(width)
        if folder := os.environ.get("SCREENSHOTS"):
            browser.save_screenshot(f"{folder}/messages-{width}.png")
    click("Playground")
    wait(lambda: "No run yet" in text_of("body"))
    limit = find("input[type=number]")
    limit.send_keys(Keys.CONTROL, "a", Keys.NULL, "4")
    click("Run both modes")
    assert limit.get_attribute("value") == "4"
    wait(lambda: "Both runs have ended" in text_of(".status"), 120)
    assert len(browser.find_elements("css selector", ".answer")) == 2 and fits(1280) and fits(400)
    assert text_of("body").count("Time to first token") == 2
    numbers = text_of(".tiles.two", 1)
    click("Messages")
    wait(lambda: ", choreographed" in text_of(".q-field__native") and "vote" in text_of("body"))
    problems = [
        entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE" and "401" not in entry["message"]
    ]
    assert not problems
    addresses = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert addresses and all(address.startswith(guarded.url) for address in addresses)
    state = state_of(guarded, "tenant-1")
    rows = rows_of(guarded, "tenant-1", state.workflows[0])
    computed = sum(bar.length for row in rows for bar in row.bars if bar.kind == "computed")
    shown = [row.computed for row in state.timeline if row.workflow == state.workflows[0]]
    assert computed == sum(shown) and f"{computed:,}" in numbers
    assert {row.label for row in rows} >= {"problem", "solve", "vote", "answer"}
    guarded.wait_until_idle()
