"""Records of many shapes become examples; what cannot be read says where."""

import json
import sys
from types import SimpleNamespace

import pytest

from choreograph.errors import DataError
from choreograph.lab.evaluation.datasets import Example, load, make_games, make_pairs, parse_example

SHAPES = [
    ({"problem": "p", "answer": "5"}, "math", "p", {"answer": "5"}),
    ({"problem": "p", "solution": "so \\boxed{7}."}, "math", "p", {"answer": "7"}),
    ({"question": "q", "answer": "2 + 2\n#### 1,234"}, "math", "q", {"answer": "1234"}),
    ({"question": "q", "answer": "long", "final_answer": "9"}, "math", "q", {"answer": "9"}),
    ({"question": "q?", "answers": ["a", "b"]}, "qa", "q?", {"answers": ["a", "b"]}),
    (
        {"question": "q", "answer": "a", "answer_aliases": ["b"], "documents": [{"title": "T", "text": "x"}]},
        "qa",
        "T\nx\n\nQuestion: q?",
        {"answers": ["a", "b"]},
    ),
    ({"question": "q", "answer": {"value": "a", "aliases": ["b"]}}, "qa", "q", {"answers": ["b", "a"]}),
    ({"input": "i", "context": "c", "answers": ["a"]}, "qa", "c\n\nQuestion: i?", {"answers": ["a"]}),
    ({"concepts": ["a", "b"]}, "concepts", ["a", "b"], {"concepts": ["a", "b"]}),
    ({"turns": ["first", "second"]}, "text", "first", {"reference": None}),
    ({"question": "only"}, "text", "only", {}),
    (
        {"task": ["x"], "kind": "pair", "gold": {"first": {"answers": ["a"]}, "second": 2}},
        "pair",
        ["x"],
        {"first": {"answers": ["a"]}, "second": {"answers": ["2"]}},
    ),
    ({"concepts": "dog, cat, tree"}, "concepts", ["dog", "cat", "tree"], {"concepts": ["dog", "cat", "tree"]}),
    ({"turns": "hello there"}, "text", "hello there", {"reference": None}),
    ({"question": "q", "answers": {"text": "Paris"}}, "qa", "q", {"answers": ["Paris"]}),
    ({"question": "q", "answer": "a", "answer_aliases": "bc"}, "qa", "q", {"answers": ["a", "bc"]}),
    ({"question": "q", "answer": 0, "answers": []}, "qa", "q", {"answers": ["0"]}),
    ({"question": "q", "final_answer": 0}, "math", "q", {"answer": "0"}),
    ({"question": "q", "answers": "a", "documents": ["x"]}, "qa", "x\n\nQuestion: q?", {"answers": ["a"]}),
    ({"question": "q", "answers": "a", "documents": "xy"}, "qa", "xy\n\nQuestion: q?", {"answers": ["a"]}),
    ({"task": "t", "kind": "qa", "gold": {"answers": "Iris"}}, "qa", "t", {"answers": ["Iris"]}),
    ({"task": "t", "kind": "math", "gold": {"answer": 5}}, "math", "t", {"answer": "5"}),
    ({"task": "t", "kind": "concepts", "gold": {"concepts": "a, b"}}, "concepts", "t", {"concepts": ["a", "b"]}),
    ({"task": "t", "gold": None}, "text", "t", {}),
    ({"task": "t", "answer": "a"}, "qa", "t", {"answers": ["a"]}),
    ({"task": "t", "kind": "math", "gold": {"answer": "5"}, "answer": "6"}, "math", "t", {"answer": "5"}),
    ({"task": "a set's name", "input": "", "context": "c", "answers": ["a"]}, "qa", "c", {"answers": ["a"]}),
    ({"task": "a set's name", "question": "q?", "target": "a"}, "text", "q?", {}),
    ({"question": "q?", "context": "c"}, "text", "c\n\nQuestion: q?", {}),
    ({"question": "q?", "final_answer": "5", "context": "c"}, "math", "c\n\nQuestion: q?", {"answer": "5"}),
    ({"question": "Name it.", "answer": "a", "context": "c"}, "qa", "c\n\nQuestion: Name it.", {"answers": ["a"]}),
    ({"question": "q", "answers": ["b", " "], "answer_aliases": ["c"]}, "qa", "q", {"answers": ["b", "c"]}),
    ({"question": "q", "answer": True}, "qa", "q", {"answers": ["yes"]}),
]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"answers": ["x"]}, "ask something"),
        ({"question": " ", "answer": "x"}, "ask something"),
        ({"question": None}, "use a string"),
        ({"task": None}, "ask something"),
        ({"turns": [""]}, "ask something"),
        ({"problem": "", "answer": "5"}, "ask something"),
        ({"question": "q", "answer": "a", "context": [["Title", ["A sentence."]]]}, "`documents` for a list of texts"),
        ({"question": "q", "answers": ["", "  "]}, "lacks"),
    ],
)
def test_what_asks_nothing_or_hides_its_context_is_refused(record, said):
    with pytest.raises(DataError, match=said):
        parse_example(record, 0)


def test_marks_of_a_file_and_halves_of_characters(tmp_path):
    file = tmp_path / "marked.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"question": "q?", "_id": "own"}')
    assert load(str(file)) == [Example("own", "text", "q?", {})]
    file.write_text('{"question": "bad \\ud800 char?"}')
    with pytest.raises(DataError, match="line 1: not JSON in UTF-8"):
        load(str(file))
    file.write_text("[" * 100_000)
    with pytest.raises(DataError, match="line 1: not JSON in UTF-8"):
        load(str(file))
    with pytest.raises(DataError, match="use games:N"):
        load("games:²")


@pytest.mark.parametrize(("record", "kind", "task", "gold"), SHAPES)
def test_kinds_follow_from_the_fields(record, kind, task, gold):
    assert parse_example(record, 3) == Example("3", kind, task, gold)
    assert parse_example({**record, "id": "own"}, 3).id == "own"


def test_a_file_in_order_shuffled_and_limited(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(json.dumps({"id": i, "problem": "p", "answer": "é"}) for i in range(20)) + "\n\n")
    assert [e.id for e in load(str(file), limit=3)] == ["0", "1", "2"]
    shuffled = load(str(file), seed=1)
    assert shuffled == load(str(file), seed=1) != load(str(file))
    assert sorted(int(e.id) for e in shuffled) == list(range(20))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"problem": 1', "line 1: not JSON"),
        ('{"concepts": ["a"]}\n[1]', "line 2: list"),
        ('{"colour": "red"}', "colour"),
        ('{"problem": "p", "solution": "no box"}', "lacks"),
        ('{"task": "t", "kind": "poem"}', "poem"),
        ('{"id": 1, "question": "a"}\n{"id": 1, "question": "b"}', "same id"),
    ],
)
def test_bad_files_say_where(tmp_path, text, said):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=said):
        load(str(file))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"problem": "p", "answer": ["5"]}, r"answer=\['5'\]"),
        ({"problem": 3, "answer": 5}, "problem=3"),
        ({"problem": "p", "solution": 7}, "solution=7"),
        ({"question": "q", "answers": [["a"]]}, r"answers=\['a'\]"),
        ({"question": "q", "answers": []}, "lacks"),
        ({"question": ["q"], "answers": "a"}, "question="),
        ({"question": "q", "answers": "a", "documents": [{"title": "T"}]}, "documents=.*`text`"),
        ({"question": "q", "answers": "a", "documents": {"text": "T"}}, "documents="),
        ({"concepts": 7}, "concepts=7"),
        ({"concepts": ["a", 7]}, "concepts=7"),
        ({"concepts": []}, "lacks"),
        ({"turns": []}, "turns="),
        ({"turns": [{"role": "user"}]}, "turns="),
        ({"task": "t", "kind": "qa", "gold": "Iris"}, "gold='Iris'"),
        ({"task": "t", "kind": ["qa"]}, "kind="),
        ({"task": "t", "kind": "qa", "gold": None}, "lacks"),
        ({"task": "t", "kind": "pair", "gold": {"first": "a", "second": {}}}, "lacks"),
    ],
)
def test_what_no_scorer_could_compare_is_refused_with_its_place(tmp_path, record, said):
    file = tmp_path / "odd.jsonl"
    file.write_text(json.dumps({"problem": "p", "answer": 1}) + "\n" + json.dumps(record))
    with pytest.raises(DataError, match=f"odd.jsonl: record 1: .*{said}"):
        load(str(file))


def test_a_file_of_another_encoding_says_where(tmp_path):
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"question": "a"}\n{"question": "café"}'.encode("latin-1"))
    with pytest.raises(DataError, match="line 2: not JSON in UTF-8"):
        load(str(file))


def test_a_missing_file_and_an_unknown_dataset():
    with pytest.raises(DataError, match="no such file"):
        load("nowhere.jsonl")


def test_a_dataset_of_the_hub_is_read_by_its_fields(monkeypatch):
    asked = []

    def load_dataset(name, configuration, *, split):
        asked.append((name, configuration, split))
        if name == "gone":
            raise FileNotFoundError("gone")
        return [{"question": "q", "answer": "so\n#### 4"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load("openai/gsm8k:main", split="train") == [Example("0", "math", "q", {"answer": "4"})]
    assert load("some/set")[0].kind == "math"
    assert asked == [("openai/gsm8k", "main", "train"), ("some/set", None, "test")]
    with pytest.raises(DataError, match="gone"):
        load("gone")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"choreograph\[hub\]"):
        load("some/set")


def test_pairs_show_everything_first_and_second_once():
    some = [Example(str(i), "qa", f"q{i}", {"answers": [str(i)]}) for i in range(7)]
    result = make_pairs(some, seed=4)
    assert sorted(e.task[0] for e in result) == sorted(e.task[1] for e in result) == [e.task for e in some]
    assert result == make_pairs(some, seed=4)
    assert all(e.task[0] != e.task[1] for e in result)
    with pytest.raises(DataError, match="not of"):
        make_pairs([Example("1", "math", "", {}), Example("2", "math", "", {})])
    with pytest.raises(DataError, match="games:N"):
        load("games:many")
    with pytest.raises(DataError, match="two or more"):
        make_pairs(some[:1])


def test_more_rings_make_other_pairs_of_the_same_examples():
    some = [Example(str(i), "qa", f"q{i}", {"answers": [str(i)]}) for i in range(7)]
    result = make_pairs(some, seed=4, num_shifts=3)
    assert result[:7] == make_pairs(some, seed=4)
    assert len({e.id for e in result}) == 21 and len({frozenset(e.task) for e in result}) == 21
    assert sorted(e.task[0] for e in result) == sorted(3 * [e.task for e in some])
    for rings in (0, 7):
        with pytest.raises(DataError, match="rings"):
            make_pairs(some, num_shifts=rings)


def test_half_of_the_games_start_with_bob():
    assert [g.task for g in make_games(4)] == ["Alice", "Bob", "Alice", "Bob"]
    assert load("games:3") == make_games(3)
