"""What models write, as they write it: forms taken from real outputs, with other names and numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreograph.lab.workflows import parsing as reading

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
    ("The answer is (B) 17.", "B"),
    ("But the answer is 15 because of 3 more.", "15"),
    ("Thus the answer is 4 (four).", "4"),
    ("The answer is $5 million", "5000000"),
    ("The answer is approximately 3.14", "3.14"),
    ("The answer is (C).", "C"),
    ("The answer is B.", "B"),
    ("The answer is B) 12", "B"),
    ("The correct answer is **D**.", "D"),
    ("The answer is option A", "A"),
    ("The answer is A, because cats purr.", "A"),
    ("The correct option is (E).", "E"),
    ("Answer: (A) 3 apples", "A"),
    ("the best choice is C", "C"),
    ("The answer is 12 since each box has 3.", "12"),
    ("The answer is 7, as we saw above.", "7"),
    ("The answer is 20 dollars because he paid 5.", "20 dollars"),
    ("The answer is Evelyn because she is older.", "Evelyn"),
    ("The answer is 9, not 8.", "9"),
    ("The answer is 5 which is odd.", "5"),
    ("The answer is 40 in total.", "40"),
    ("The answer is 6 if we count the first.", "6"),
    ("The answer is 12 (twelve) apples.", "12 apples"),
    ("The answer is 5 (since 2 + 3 = 5).", "5"),
    ("The answer is about 250.", "250"),
    ("The answer is therefore 8.", "8"),
    ("The answer is roughly $3.50.", "3.50"),
    ("The answer would be 14.", "14"),
    ("The answer is ≈ 2.72", "2.72"),
    ("The answer is 2.5 billion people", "2500000000 people"),
    ("The answer is 3 thousand.", "3000"),
    ("It costs $5 million", "5000000"),
    ("There are 3 million.", "3000000"),
    ("The answer is 42. I hope it is correct.", "42"),
    ("The answer is $\\frac{1}{2}$ because it is half.", "\\frac{1}{2}"),
    ("The answer is $5$ dollars.", "5 dollars"),
    ("The answer is 3 + 4 = 7.", "7"),
    ("The answer is (3, 4).", "(3, 4)"),
    ("The answer is 2 1/2 cups.", "2 1/2 cups"),
    ("So she needs 2 1/2 cups", "2 1/2"),
    ("They left at 5 pm.", "5 pm"),
    ("It begins at 5:30", "5:30"),
    ("The answer is 5:30 p.m.", "5:30 p.m"),
    ("Therefore it is (D).", "D"),
    ("The answer is 5. The answer is 6.", "6"),
    ("The answer is 5. This answer is correct.", "5"),
    ("The answer is \\[\n18\n\\]", "18"),
    ("So\n\\[\n\\frac{1}{2}\n\\]", "\\frac{1}{2}"),
    ("The answer is $18 - $3 = $15.", "15"),
    ("The answer is x = 5.", "x = 5"),
    ("The answer is 50%.", "50%"),
    ("The answer is 10 miles per hour.", "10 miles per hour"),
    ("The answer is 1/2 or 0.5.", "1/2 or 0.5"),
    ("The answer equals 12.", "12"),
    ("Final Answer: \\(\\boxed{3}\\)", "3"),
    ("The answer is: \n\n12 km", "12 km"),
    ("The answer is 3 – three apples", "3"),
    ("The final answer is $\\boxed{5 \\text{ hours}}$.", "5 \\text{ hours}"),
    ("The answer is 15, because of 3 more", "15"),
    ("The answer is 15 due to rounding", "15"),
    ("The answer is yes, because 2 < 3", "yes"),
    ("The answer is a dog.", "a dog"),
    ("The answer is exactly 4.", "4"),
    ("The answer is $1,200.", "1,200"),
    ("The answer is $12 for each.", "12"),
    ("The answer is 16 for the third day.", "16"),
    ("#### 42", "42"),
    ("Answer: 17 apples\n", "17 apples"),
    ("The answer is 15 - because of 3 more", "15"),
    ("The answer is 17 and not 15", "17"),
    ("the answer is therefore (C)", "C"),
    ("The answer is $\\text{(B)}$.", "B"),
    ("The answer is $2 billion in 3 years", "2000000000"),
    ("The answer is 2^3 = 8.", "8"),
    ("The answer is 17.\nThis concludes step 3.", "17"),
    ("The answer is \\frac{3}{4}.", "\\frac{3}{4}"),
    ("The answer is \\(x^2 + 1\\).", "x^2 + 1"),
    ("The answer is (x + 1)(x - 1).", "(x + 1)(x - 1)"),
    ("The answer is f(x) = 2x.", "f(x) = 2x"),
    ("The answer is -5.", "-5"),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_a_final_answer_is_parsed_from_its_text(text, answer):
    assert reading.final_answer(text) == answer


def test_of_a_text_that_was_cut_only_what_it_calls_its_answer_counts():
    for text, answer in ANSWERS:
        cut = reading.final_answer(text, is_complete=False)
        is_stated = any(word in text.lower() for word in ("boxed", "answer", "result", "option", "choice"))
        assert cut == (answer if is_stated else None)


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
def test_a_vote_is_parsed_from_its_text(text, number):
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
        ("If Bob cooperates I defect.", "defect"),
        ("defecting is bad, so I cooperate", "cooperate"),
        ("I defect if Bob defects.", "defect"),
        ("If Bob defects, I will cooperate.", "cooperate"),
        ("When Bob cooperates, I'll defect.", "defect"),
        ("Although cooperating is nice, I choose to defect.", "defect"),
        ("cooperation would be best, but I will defect", "defect"),
        ("I'd like to cooperate, but I will defect.", "defect"),
        ("I will not defect.", "cooperate"),
        ("I won't cooperate.", "defect"),
        ("Because Bob will defect, I defect too", "defect"),
        ("Bob will probably cooperate, so I will defect", "defect"),
        ("If I cooperate, she defects", "defect"),
        ("Since Bob will cooperate, defect.", "defect"),
        ("I must decide whether to cooperate or defect. I cooperate.", "cooperate"),
        ("I think she will defect", "defect"),
        ("Bob cooperates, therefore I cooperate", "cooperate"),
        ("Defecting gains more; however, I cooperate.", "cooperate"),
        ("unless Bob defects, I cooperate", "cooperate"),
        ("I am going to defect", "defect"),
        ("cooperate if Bob does", "cooperate"),
        ("if Bob cooperates then defect", "defect"),
        ("I refuse to cooperate", "defect"),
        ("I have decided to cooperate.", "cooperate"),
        ("cooperating is risky, so defect", "defect"),
        ("cooperating is risky, so he will defect", "defect"),
        ("If Bob cooperates", None),
        ("defect. If Bob cooperates, I will cooperate", "defect"),
        ("I would rather cooperate than defect", "cooperate"),
        ("I expect Bob to defect, so I defect.", "defect"),
        ("Bob defected last time, but I still cooperate", "cooperate"),
        ("I cooperate, even though Bob defects", "cooperate"),
        ("I do not want to defect", "cooperate"),
        ("I don't want to cooperate", "defect"),
        ("Not cooperating is bad, so I cooperate.", "cooperate"),
        ("I never defect", "cooperate"),
        ("my choice is to defect", "defect"),
        ("I will cooperate unless Bob defects", "cooperate"),
        ("I will choose to cooperate", "cooperate"),
        ("Whatever Bob does, I defect", "defect"),
        ("Even if Bob defects, I cooperate", "cooperate"),
        ("Bob cooperates and I defect", "defect"),
        ("It would be foolish to cooperate, so I defect", "defect"),
        ("I won't defect because Bob cooperates", "cooperate"),
        ("I hope Bob cooperates; I defect", "defect"),
        ("Defecting is wrong. I cooperate.", "cooperate"),
        ("I decide against defecting", "cooperate"),
        ("I no longer cooperate", "defect"),
        ("Whether Bob defects or not, I cooperate", "cooperate"),
        ("rather than cooperate, I defect", "defect"),
        ("I want to cooperate, but defecting is safer, so I defect", "defect"),
        ("Defecting is tempting, but cooperating is better.", "cooperate"),
        ("It would be unwise to cooperate.", "defect"),
        ("It is a mistake to defect", "cooperate"),
        ("There is no reason to cooperate.", "defect"),
        ("Neither cooperate nor defect", None),
        ("I was going to defect, but I will cooperate.", "cooperate"),
        ("Bob will defect, so cooperating would give me 0 points; I defect.", "defect"),
        ("I trust Bob not to defect, so I cooperate.", "cooperate"),
        ("Answer: cooperate (not defect)", "cooperate"),
        ("Unlike Bob, who defects, I cooperate.", "cooperate"),
        ("I choose to cooperate, but defecting is better for Bob.", "cooperate"),
    ],
)
def test_a_decision_is_parsed_from_its_text(text, read):
    assert reading.first_decision(text) == read


@pytest.mark.parametrize(
    ("text", "read"),
    [(" Yes, both sides agree.", True), (" No.", False), ("**yes**", True), (" Affirmative", None), ("nobody", None)],
)
def test_a_verdict_is_parsed_from_its_text(text, read):
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


@pytest.mark.parametrize(
    "text",
    [
        " dog, run\nGroup 2: ice cream, sea",
        " dog, run\n\n**Group 2:** ice cream, sea",
        "\n- dog\n- run\n\nGroup 2:\n- ice cream\n- sea",
        " dog, run\n### Group two\n1. ice cream\n2. sea",
        " dog, run\n2. ice cream, sea",
        " dog, run\nB: ice cream, sea",
        " dog, run\n(2) ice cream, sea",
        "\n1. dog\n2. run\n\nGroup 2:\n1. ice cream\n2. sea",
        "\n1. dog\n2. run\n\n1. ice cream\n2. sea",
        " dog, run. Second group: ice cream and sea.",
        " dog and run; ice cream and sea",
        "\n* dog\n* run\n\n* ice cream\n* sea",
        " dog, run\nice cream, sea",
        " dog, run\n- ice cream, sea",
        " dog, run Group B: ice cream, sea",
        " dogs, Run\n**2.** Ice Creams, the sea",
        " dog, run\n\nThe other group: ice cream, sea",
        " Dog, run\nSet 2: ice cream, sea",
        " {dog, run}, Group #2: {ice cream, sea}",
        " dog, run | ice cream, sea",
        "dog, run\n* **B**: ice cream, sea",
        "A: dog, run\nB: ice cream, sea",
        " dog, run, Group 2 - ice cream, sea",
        " dog, run\nII. ice cream, sea",
        "\n1) dog, run\n2) ice cream, sea",
        "- Group 1: dog, run\n- Group 2: ice cream, sea",
        "**dog, run**\n**Group 2**\nice cream, sea\n\nGroup 3:",
        " dog, run\nGroup2: ice cream, sea",
        "dog, run\n\nb) ice cream, sea",
        " dog, run.\nStory 2: ice cream, sea",
        " dog, run, 2: ice cream, sea",
        "dog\nrun\n\nice cream\nsea",
        " dog, running\n**Second:** ice creams, the sea",
        '["dog", "run"], "Group 2": ["ice cream", "sea"]',
        '["dog", "run"], ["ice cream", "sea"]',
        "(dog, run), (ice cream, sea)",
        "\n| Group 1 | Group 2 |\n|---|---|\n| dog | ice cream |\n| run | sea |",
        "A. dog\nB. run\n\nC. ice cream\nD. sea",
        "1. dog\n2. run\n\nGroup 2:\n3. ice cream\n4. sea",
    ],
)
def test_groups_in_any_form_of_a_list(text):
    assert reading.parse_groups(text, ["dog", "run", "ice cream", "sea"]) == (["dog", "run"], ["ice cream", "sea"])


def test_a_list_of_single_items_is_no_division():
    items = ["dog", "run", "sea"]
    assert reading.parse_groups("\n1. dog\n2. run\n3. sea", items) is None
    assert reading.parse_groups("\n- dog\n- run\n- sea", items) is None
    assert reading.parse_groups(" dog\nGroup 2: run\nGroup 3: sea", items) is None
    assert reading.parse_groups(" dog\nGroup 2: run, sea\nGroup 3: dog", items) == (["dog"], ["run", "sea"])


def test_an_item_within_another_is_named_on_its_own():
    groups = reading.parse_groups("ice, sea\nGroup 2: ice cream, dog", ["ice cream", "ice", "dog", "sea"])
    assert groups == (["ice", "sea"], ["ice cream", "dog"])


@given(st.text(alphabet="\\boxed{}$ 0123456789/.,=answer is\n-xy*", max_size=200))
def test_no_text_breaks_a_reader(text):
    for read in (reading.final_answer, reading.first_decision, reading.first_yes_no, reading.boxed):
        assert read(text) is None or read(text) != ""
    assert reading.first_choice(text, 4) in (None, 1, 2, 3, 4)
    reading.parse_groups(text, ["a", "b"])
