"""Workloads of the benchmark of routers, without Ray: what workflows share, what is sent, and its table."""

from itertools import chain, count
from types import SimpleNamespace

import pytest

from benchmarks import results_page, tables  # noqa: F401  the page registers its tables
from benchmarks.common import row_to_record
from benchmarks.ray_routing import SIZES, Measurement, WorkflowRunner, predict, ratio_rows, rows_of, text
from benchmarks.ray_scale import BY_TEAM, TRANSFERS
from benchmarks.ray_workloads import WORKLOADS, Sizes


def calls_of(workload, workflow, sizes=SIZES):
    calls, turn = [], 0
    while turn_calls := WORKLOADS[workload](sizes, workflow, turn):
        calls.append(turn_calls)
        turn += 1
    return calls


def keys_of(workload, workflow, sizes=SIZES):
    return set(chain.from_iterable(keys for calls in calls_of(workload, workflow, sizes) for keys, _ in calls))


@pytest.mark.parametrize(
    ("workload", "shared"),
    [("debate", 3 * SIZES.system), ("supervisor", 9 * SIZES.system + SIZES.question)],
)
def test_workflows_of_a_team_share_roles_and_the_handbook_alone(workload, shared):
    tokens = {key: tokens for calls in calls_of(workload, 0) for keys, _ in calls for key, tokens in keys.items()}
    assert sum(tokens[key] for key in keys_of(workload, 0) & keys_of(workload, 1)) == shared


def test_readers_share_documents_with_their_team_and_their_role_with_all():
    sizes = Sizes(readers=2, documents=2)
    assert len(keys_of("retrieval", 0, sizes) & keys_of("retrieval", 1, sizes)) == 3
    assert len(keys_of("retrieval", 0, sizes) & keys_of("retrieval", 2, sizes)) == 1


def test_texts_have_a_word_for_each_token_and_differ():
    assert len(text(1, 400).split()) == 400 and text(1, 400) == text(1, 400) != text(2, 400)


class Client:
    """Answers each request with its number, and keeps what was asked."""

    def __init__(self):
        self.requests, self.chat, self.numbers = [], SimpleNamespace(completions=self), count(1)

    def create(self, **options):
        self.requests.append(options)
        delta = SimpleNamespace(content=f"answer {next(self.numbers)}")
        yield SimpleNamespace(choices=[SimpleNamespace(delta=delta)], usage=None)
        usage = SimpleNamespace(prompt_tokens=100, choreography={"computed_tokens": 60, "remote_tokens": 30})
        yield SimpleNamespace(choices=[], usage=usage)


@pytest.mark.parametrize(
    ("workload", "num_requests", "num_read"), [("debate", 9, 6), ("supervisor", 10, 9), ("retrieval", 4, 0)]
)
def test_answers_are_read_by_later_requests_of_one_team_and_session(workload, num_requests, num_read):
    client = Client()
    runner = WorkflowRunner(client, "tiny", workload, is_by_team=False)
    runner.run(7)
    assert len(client.requests) == num_requests == len(runner.measurement.ttft)
    messages = list(chain.from_iterable(request["messages"] for request in client.requests))
    assert len({message["content"] for message in messages if message["role"] == "assistant"}) == num_read
    for request in client.requests:
        assert request["messages"][0]["role"] == "system" and request["extra_headers"] == {
            "x-session-id": f"{workload}-7"
        }
        assert request["extra_body"]["choreography"] == {"workflow": "team"}
    runner.measurement.work = [300, 100]
    results = runner.measurement.results()
    assert results["computed tokens"] == 60 * num_requests and results["moved share"] == 0.3
    assert results["imbalance"] == 0.5


def test_predictions_are_balanced_and_message_routing_computes_less_than_readers_with_own_sessions():
    results = {router: predict(router, "retrieval", 12, 4) for router in ("session", BY_TEAM, TRANSFERS)}
    computed = {router: result["computed tokens"] for router, result in results.items()}
    assert computed[BY_TEAM] <= computed[TRANSFERS] < 0.8 * computed["session"]
    assert results[BY_TEAM]["imbalance"] == 1 and results[TRANSFERS]["moved tokens"] > 0


def test_the_table_shows_measurements_with_predictions_and_what_is_not_measured_yet(monkeypatch):
    measured = Measurement(ttft=[0.2, 0.4, 0.3], workflows=[2.0], seconds=5.0, work=[100, 100])
    measured.usages = [SimpleNamespace(prompt_tokens=200, choreography={"computed_tokens": 50, "remote_tokens": 20})]
    predicted = predict(TRANSFERS, "debate", 2, 2)
    results = {TRANSFERS: measured.results(), "session": measured.results() | {"computed tokens": 100.0}}
    rows = rows_of(f"debate, {TRANSFERS}", measured, predicted)
    rows += ratio_rows("debate", results, {TRANSFERS: predicted, "session": predicted})
    made = {"commit": "c", "date": "d", "hardware": "h"}
    record = {"rows": [row_to_record(row) | {"made": made} for row in rows], "model": "m"}
    monkeypatch.setattr(tables, "record", lambda name: record)
    lines = tables.TABLES["ray-routing"]().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| debate | {TRANSFERS} ")]
    assert f"| 50 ({predicted['computed tokens']:,.0f}) | 200 " in line and "| 10.0% (" in line and "| 0.30 s |" in line
    assert "| debate | 50.0% (100.0%) | 50.0%" in "\n".join(lines)
    assert f"| retrieval | {BY_TEAM} | not measured yet |" in "\n".join(lines)
