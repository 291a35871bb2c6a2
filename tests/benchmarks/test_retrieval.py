"""The benchmark of retrieval: its questions, prompts, scores, and both parts on a tiny model."""

import json
from argparse import Namespace

import pytest

from benchmarks import common, retrieval
from benchmarks.peer_engines import Generated
from benchmarks.retrieval import NO_REUSE, PLAIN, PREFIX, REUSE, Prompts
from choreograph.api.chat import ChatTemplate

WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "glade", "heath"]
WORDS += ["inlet", "joule", "knoll", "larch", "marsh", "north", "ocean", "pearl"]


@pytest.fixture
def folder(tmp_path):
    def passage(i, j):
        return {"title": f"{i}/{j}", "text": f"{WORDS[i]} {WORDS[j]} {WORDS[(i * j) % 16]} " * (j + 1)}

    single = [
        {"id": f"nq/{i}", "question": f"which {WORDS[i]}", "answers": [WORDS[i]], "documents": [passage(i, i)]}
        for i in range(16)
    ]
    several = [
        {
            "id": f"hotpot/{i}",
            "question": f"{WORDS[i]} {WORDS[i + 1]}",
            "answer": WORDS[i],
            "documents": [passage(i, j) for j in range(10)],
            "supporting_titles": [f"{i}/3", f"{i}/7"],
        }
        for i in range(9)
    ]
    for name, records in (("nq_oracle", single), ("hotpotqa", several)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


@pytest.mark.parametrize("data", ["nq_oracle", "hotpotqa"])
@pytest.mark.parametrize("num_passages", [6, 10])
def test_questions_read_a_shared_pool_with_what_they_need_in_orders_of_their_own(folder, data, num_passages):
    records = [json.loads(line) for line in (folder / f"{data}.jsonl").read_text().splitlines()]
    pools = retrieval.pools_of(data, folder, num_passages)
    questions = [(pool, question) for pool in pools for question in pool.questions]
    assert [question.text for _, question in questions] == [record["question"] for record in records]
    for record, (pool, question) in zip(records, questions, strict=True):
        assert len(set(pool.documents)) == num_passages
        assert sorted(question.reads) == list(range(num_passages))
        titles = {pool.documents[i].splitlines()[0] for i in question.reads}
        assert set(record.get("supporting_titles", [record["documents"][0]["title"]])) <= titles
    assert all(len({tuple(question.reads) for question in pool.questions}) == len(pool.questions) for pool in pools)
    assert len(pools[0].questions) == min(4, num_passages // 2 if data == "hotpotqa" else 4)


def test_relevance_counts_rare_words_of_the_question():
    passages = ["the amber bridge", "the river and the town", "the amber bridge of the town, and much else " * 3]
    scores = retrieval.relevance("The bridge in the town", passages)
    assert scores[2] > 0 and scores[0] > retrieval.relevance("The tree", passages)[0]
    assert retrieval.relevance("zebra", passages) == [0, 0, 0]


def test_scores_read_the_first_line():
    question = retrieval.Question("", ["Oak Street"], [])
    assert retrieval.score(question, " The Oak Street.\nMore") == {"f1": 1.0, "exact": 1.0, "right": 1.0}
    assert retrieval.score(question, "It is Oak Street")["exact"] == 0.0


def test_vllm_gets_the_tokens_of_a_session(talker, folder):
    pool = retrieval.pools_of("nq_oracle", folder, 6)[0]
    prompts = Prompts.of(ChatTemplate(talker.tokenizer), pool)
    with talker.session(mode="prefix") as session:
        encoded = retrieval.encode(session, pool)
        for number, question in enumerate(pool.questions):
            call = retrieval.ask(session, question, encoded, None, temperature=0, max_tokens=1).result()
            tokens = [token for message in (*call.parents, call) for token in message.tokens]
            prompt = prompts.question(number)
            assert tokens[: len(prompt)] == prompt and tokens[len(prompt)] == call.output_token_ids[0]


class FakeVLLM:
    """Answers every prompt with the same tokens; the last one ends a turn."""

    def __init__(self, threads, dtype, connector=None, model=None):
        self.has_connector, self.prompts = connector is not None, []

    def generate(self, prompts, count, transfers=()):
        assert self.has_connector or not any(transfers)
        self.prompts += prompts
        report = {"choreograph": {"computed_tokens": 5}}
        return Generated(
            [[40, 2] * count] * len(prompts),
            [[0.1 * (i + 1) for i in range(count)]] * len(prompts),
            [report] * len(prompts),
        )

    def reset(self):
        pass

    def close(self):
        pass


@pytest.fixture
def arguments(talker, folder, tmp_path, monkeypatch):
    """Run a part on a random model over six passages, with a vLLM that is none."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(retrieval, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(retrieval, "PASSAGES", (6, 10))
    monkeypatch.setattr(retrieval, "MAX_TOKENS", 4)
    monkeypatch.setattr(retrieval, "TIMED_TOKENS", 2)
    monkeypatch.setattr(retrieval, "VLLM", FakeVLLM)
    monkeypatch.setattr(retrieval, "load", lambda model: (talker, "random"))
    monkeypatch.setattr(retrieval, "provenance", lambda: MADE)
    monkeypatch.setitem(retrieval.ALIGNMENTS, "random", (0.9, 1.0))

    def run(part, **options):
        common_options = {
            "model": None,
            "data": folder,
            "sets": ["nq_oracle", "hotpotqa"],
            "sides": list(retrieval.SIDES),
        }
        getattr(retrieval, f"measure_{part}")(Namespace(**common_options, **options))
        return common.last_result("retrieval")

    return run


MADE = {"commit": "this one", "date": "2026-02-02", "hardware": "this machine"}
QUALITY = {"passages": [6], "limit": 4, "fewer": 2, "connector_every": 1}
SPEED = {"passages": [6], "minutes": 60, "rounds": 1, "questions": 2}


def test_quality_goes_on_where_it_stopped_and_pairs_all_sides(arguments, tmp_path, capsys):
    result = arguments("quality", **QUALITY, out=tmp_path / "records")
    assert "nq_oracle/6/0" in capsys.readouterr().out
    part = result["quality"]["random, 6 passages, all sets"]
    rows = {row["side"]: row for row in part["rows"]}
    assert set(rows) == set(retrieval.SIDES) - {PREFIX, PLAIN}
    assert {(row["n"], row["pools"]) for row in rows.values()} == {(10, 3)}  # a pool of four and two of three
    assert result["model"] == "random" and part["made"] == [MADE]
    assert rows[NO_REUSE]["f1 over no reuse"]["value"] == 0 and rows[NO_REUSE]["same"]["value"] == 1
    assert (
        rows[REUSE]["computed"]["value"] < rows["first 10%"]["computed"]["value"] < rows[NO_REUSE]["computed"]["value"]
    )
    assert result["budgets"]["random, 6"][0] in (0, 0.1, 0.2, 0.4, 0.6, 1)
    again = arguments("quality", **QUALITY, out=tmp_path / "records")
    assert "6/0" not in capsys.readouterr().out
    assert all(again["quality"][key]["rows"] == part["rows"] for key, part in result["quality"].items())


def test_speed_pairs_all_sides_with_both_prefix_caches_and_is_drawn(arguments, tmp_path):
    arguments("quality", **QUALITY, out=tmp_path / "records")
    result = arguments("speed", **SPEED)
    rows = {(row["measure"], row["peer"]): row for row in result["rows"]}
    for side in {REUSE, "attention 20%", retrieval.CONNECTED}:
        for key in ("first token", "answer"):
            for peer in (None, PREFIX, PLAIN):
                assert rows[f"random, 6 passages: {key}, {side}", peer]["value"] > 0
    assert ("random, 6 passages: passages, reuse", None) in rows
    assert ("random, 6 passages: passages, prefix mode", None) not in rows
    assert result["quality"] and "attention" in (tmp_path / "figures" / "retrieval-random-6-passages.svg").read_text()


def test_a_repair_of_everything_or_nothing_is_another_side():
    repair = retrieval.Repair
    assert [retrieval.equal_side(repair(share)) for share in (0, 1)] == [REUSE, NO_REUSE]
    assert retrieval.equal_side(repair(0.2, "attention")) == "attention 20%"
    assert retrieval.equal_side(repair(0.6)) is None


def test_other_models_are_not_aligned_with_the_numbers_of_a_calibrated_one():
    assert retrieval.ALIGNED in retrieval.settings_of("bundled", None)
    assert retrieval.ALIGNED not in retrieval.settings_of("other", None)


def test_rounds_go_round_the_pools_on_which_no_budget_learned():
    pools = [retrieval.Group([str(i)], []) for i in range(3)]
    assert [retrieval.pool_of_round(pools, number).documents for number in range(4)] == [["0"], ["1"], ["0"], ["1"]]


def test_a_missing_time_is_an_error(talker):
    with talker.session() as session, pytest.raises(RuntimeError, match="no ttft"):
        retrieval.seconds_of(session.prefill(session.user("a prefill decodes nothing")).result(), "ttft")


def test_records_without_provenance_keep_that_of_the_last_result(arguments, tmp_path):
    arguments("quality", **QUALITY, out=tmp_path / "records")
    for file in (tmp_path / "records" / "random").glob("*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            del record["made"]  # as older runs wrote them
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    file = common.result_file("retrieval")
    older = {"commit": "older", "date": "2026-01-01", "hardware": "another machine"}
    result = json.loads(file.read_text())
    for part in result["quality"].values():
        part["made"] = [older]
    file.write_text(json.dumps(result))
    again = arguments("quality", **QUALITY, out=tmp_path / "records")
    assert all(part["made"] == [older] for part in again["quality"].values())
