"""What models write, as they write it: forms taken from real outputs, with other names and numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreograph.workflows import parsing as reading

ANSWERS = [
    ("The answer is \\boxed{56}.", "56"),
    ("so \\(\\boxed{\\frac{1}{2}}\\). Then", "\\frac{1}{2}"),
    ("\\boxed{3} is wrong, thus \\boxed{4}", "4"),
    ("\\boxed{\\text{a {nested} one}}", "\\text{a {nested} one}"),
    ("First \\boxed{7} and then \\boxed{never closed", "7"),
    ("Therefore, the final answer is 12.", "12"),
    ("**Final answer:** 3/4", "3/4"),
    ("The answer is: $x = 5$.", "x = 5"),
    ("The result is \\(\\sqrt{2}\\).", "\\sqrt{2}"),
    ("The final answer is \\boxed{25,000", "25,000"),
    ("He has 36 pens.\nThen 36 - 8 = 28 pens are left.", "28"),
    ("It costs $1,250.50 in all", "1250.50"),
    ("I cannot say.", None),
    ("", None),
    ("The answer is\n", None),
    ("\\boxed{}", None),
    ("The final answer is \\boxed{}", None),
    ("The answer is \\", None),
    (" $\\frac{3}{4}$", "\\frac{3}{4}"),
    ("It is \\((1, 2)\\), as shown.", "(1, 2)"),
    ("$x = 2$ and so\nwe find 14 in all.", "14"),
    ("So she makes 9 * $2 = $18 every day.", "18"),
    ("He has $30 - $3 = $27 left.", "27"),
    ("He got $5 on Monday and $7 on Tuesday, a total of $12.", "12"),
    ("Thus it is $\\frac{1}{2}.$", "\\frac{1}{2}"),
    ("Thus it is $ x + 1 $.", "x + 1"),
    ("The answer is \\[18\\]", "18"),
    ("The answer is 18 dollars, since 9 * 2 = 18.", "18 dollars"),
    ("The answer is 1, 2, and 3.", "1, 2, and 3"),
    ("The answer is [0, infinity).", "[0, infinity)"),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_final_answers(text, answer):
    assert reading.final_answer(text) == answer


def test_of_a_text_that_was_cut_only_what_it_calls_its_answer_counts():
    for text, answer in ANSWERS:
        cut = reading.final_answer(text, is_complete=False)
        assert cut == (answer if "boxed" in text or "answer" in text or "result" in text.lower() else None)


def test_a_majority_forgets_spaces_and_dollars_and_prefers_the_earliest():
    assert reading.majority(["$x = 5$", "7", "5.", None]) == "5"
    assert reading.majority(["7", "5", "6"]) == "7"
    assert reading.majority(["\\dfrac{1}{2}", "\\frac12", "\\frac{1}{2}"]) == "\\frac{1}{2}"
    assert reading.majority([None, None]) is None
    assert reading.majority(["18", "24", "24 dollars"]) == "24"
    assert reading.majority(["18", "24\\text{ dollars}", "24$ dollars"]) == "24"
    assert reading.majority(["3", "25,000", "$25000$", "7", "7"]) == "25000"
    assert reading.majority(["2100", "2, 100", "2, 100"]) == "2,100", "a list is no number"
    assert reading.majority(["2", "3 million", "3"]) == "2", "three is another number"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 1, as it follows from the statement", 1),
        (" 7: the second step", 7),
        (" 3.", 3),
        ("**Solution 2**", 2),
        (" 13 of the 8 are wrong, 4 is best", 8),
        (" none", None),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_votes(text, number):
    assert reading.first_choice(text, 8) == number


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (" defect.", "defect"),
        (" defect alone.", "defect"),
        (" Cooperate with Bob", "cooperate"),
        (" not cooperate.", "defect"),
        (" choose not to defect", "cooperate"),
        (" never ever defect", "cooperate"),
        ("Cooperation is best, not defection", "cooperate"),
        (" co-operate", "cooperate"),
        (" win", None),
        (" don't cooperate", "defect"),
        (" won’t defect", "cooperate"),
        (" cannot cooperate", "defect"),
        (" either cooperate or defect", None),
        (" decide whether to defect or to cooperate", None),
        ("refuse to cooperate", "defect"),
        ("Instead of cooperating, I will defect.", "defect"),
        ("avoid defecting", "cooperate"),
        ("cooperate / defect", None),
        ("cooperate and defect", None),
        ("decide to cooperate or not", None),
        ("cooperate and not defect", "cooperate"),
        ("be uncooperative", None),
    ],
)
def test_decisions(text, read):
    assert reading.first_decision(text) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [(" Yes, both sides agree.", True), (" No.", False), ("**yes**", True), (" Affirmative", None), ("nobody", None)],
)
def test_verdicts(text, read):
    assert reading.first_yes_no(text) is read


def test_groups_name_every_item_once_or_are_not_read():
    items = ["dog", "run", "ice cream", "sea"]
    assert reading.parse_groups(" dog, run\nGroup 2: ice cream, sea", items) == (["dog", "run"], ["ice cream", "sea"])
    assert reading.parse_groups(" Dog and sea\n\nGroup 2:\n- run\n- Ice cream, dog", items) == (
        ["dog", "sea"],
        ["run", "ice cream"],
    )
    assert reading.parse_groups(" dog, run, sea, ice cream\nGroup 2:", items) is None
    assert reading.parse_groups(" dog\nGroup 2: run", items) is None
    assert reading.parse_groups(" dog, run, sea, ice cream", items) is None


@given(st.text(alphabet="\\boxed{}$ 0123456789/.,=answer is\n-xy*", max_size=200))
def test_no_text_breaks_a_reader(text):
    for read in (reading.final_answer, reading.first_decision, reading.first_yes_no, reading.boxed):
        assert read(text) is None or read(text) != ""
    assert reading.first_choice(text, 4) in (None, 1, 2, 3, 4)
    reading.parse_groups(text, ["a", "b"])
