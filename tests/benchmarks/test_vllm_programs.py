"""Programs of the benchmark `vllm`: prompts and spans that the driver sends."""

import pytest

from benchmarks import vllm as benchmark
from benchmarks.peer_engines import Generated
from benchmarks.peer_programs import PROGRAMS, Concatenated

ALL_PROGRAMS = {**PROGRAMS, "retrieval": benchmark.retrieval, "chat": benchmark.chat}


class FakeVLLM:
    """Answers with one token, and reports that all spans were reused."""

    def __init__(self):
        self.requests = []  # prompt, number of tokens, kv_transfer_params

    def generate(self, prompts, count, transfers=()):
        transfers = list(transfers) or [None] * len(prompts)
        self.requests += [(prompt, count, transfer) for prompt, transfer in zip(prompts, transfers, strict=True)]
        reports = []
        for transfer in transfers:
            spans = (transfer or {}).get("choreograph", {}).get("spans", [])
            reports.append({"choreograph": {"reused_tokens": sum(span["stop"] - span["start"] for span in spans)}})
        return Generated([[7] * count for _ in prompts], [[0.1] * count for _ in prompts], reports)

    def reset(self):
        pass


@pytest.mark.parametrize("name", ALL_PROGRAMS)
def test_spans_send_the_prompts_of_the_plain_side_and_one_more_token(name):
    plain, connector = FakeVLLM(), FakeVLLM()
    ALL_PROGRAMS[name](Concatenated(plain))
    ALL_PROGRAMS[name](benchmark.Spans(connector))
    calls = [
        (prompt, count - 1) for prompt, count, transfer in connector.requests if "spans" in transfer["choreograph"]
    ]
    assert calls == [(prompt, count) for prompt, count, _ in plain.requests]


@pytest.mark.parametrize("name", ALL_PROGRAMS)
def test_spans_name_what_was_stored_before(name):
    connector = FakeVLLM()
    ALL_PROGRAMS[name](benchmark.Spans(connector))
    stored = {}
    for prompt, count, transfer in connector.requests:
        spans = transfer["choreograph"].get("spans", [])
        ends = [span["at"] + span["stop"] - span["start"] for span in spans]
        assert [span["at"] for span in spans] == [0, *ends][: len(spans)]
        for span in spans:
            start, stop = span["at"], span["at"] + span["stop"]
            assert stored[span["entry"]] == prompt[start:stop]
        tokens = prompt + [7] * (count - 1)  # the last one has no keys
        for store in transfer["choreograph"]["store"]:
            assert 0 <= store["start"] < store["stop"] <= max(len(tokens), len(prompt))
            stored[store["entry"]] = tokens[store["start"] : store["stop"]]


def test_a_call_that_was_not_reused_stops_the_benchmark():
    class Forgetful(FakeVLLM):
        def generate(self, *arguments):
            return super().generate(*arguments)._replace(reports=[{"choreograph": {"reused_tokens": 3}}] * 9)

    side = benchmark.Spans(Forgetful())
    with pytest.raises(RuntimeError, match="reused other than"):
        side.ask([([1], [side.text([2, 3])])], 1)


def test_questions_read_the_passages_in_other_orders():
    plain = FakeVLLM()
    benchmark.retrieval(Concatenated(plain))
    prompts = [prompt for prompt, _, _ in plain.requests]
    assert len({tuple(prompt[:500]) for prompt in prompts}) > len(prompts) // 2
    assert {len(prompt) for prompt in prompts} == {len(prompts[0])}


def test_rows_hold_ratios_against_goals():
    taken = {benchmark.PLAIN: [(4.0, 1.0), (6.0, 2.0)], benchmark.SPANS: [(2.0, 0.5), (3.0, 0.5)]}
    rows = benchmark.rows_of("retrieval", taken, benchmark.GOALS["retrieval"])
    ratios = {row.measure: (row.value, row.required) for row in rows if row.peer}
    assert ratios == {
        "retrieval: end to end, connector, spans": (2.0, 2.0),
        "retrieval: first token, connector, spans": (3.0, 5.0),
    }
