"""Answers that are followed by a unit, an explanation, a doubt or markup: the value alone is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreograph.lab.workflows.answers import math_equal
from choreograph.lab.workflows.parsing import final_answer

STATED = [  # after "The answer is "
    ("10 o'clock", "10"),
    ("10 o’clock.", "10"),
    ("10:00 o'clock", "10:00"),
    ("7 O'Clock, I think", "7"),
    ("7 o clock", "7"),
    ("10 o'clock in the morning", "10 in the morning"),
    ("7, I think", "7"),
    ("7; I think", "7"),
    ("7 I believe.", "7"),
    ("7, right?", "7"),
    ("7, hopefully", "7"),
    ("7, a prime", "7"),
    ("7, and that is final.", "7"),
    ("7 and I am sure", "7"),
    ("7, if I am right", "7"),
    ("7 in my opinion", "7"),
    ("7 (not 8), I think", "7"),
    ("7... or so", "7"),
    ("7. done", "7"),
    ("7: seven", "7"),
    ("7 — a prime", "7"),
    ("7—seven", "7"),
    ("7 => seven", "7"),
    ("7 | done", "7"),
    ("7 // done", "7"),
    ("7!", "7"),
    ("7..", "7"),
    ("... 7", "7"),
    ("(7).", "7"),
    ("[7]", "7"),
    ("7)", "7"),
    ("(7", "7"),
    ("#7", "7"),
    ("7 [units]", "7"),
    ("7</answer>", "7"),
    ("7 <br>", "7"),
    ("7 :)", "7"),
    ("7 ✓", "7"),
    ("7 👍", "7"),
    ("**7**.", "7"),
    ("***7***", "7"),
    ("__7__", "7"),
    ("**7 apples**, I think", "7 apples"),
    ("`7`, I think", "7"),
    ("“7”.", "7"),
    ("'7', because I counted", "7"),
    ("I think 7", "7"),
    (", I think, 7", "7"),
    ("probably 7", "7"),
    ("that it is 7", "7"),
    ("$7$: seven", "7"),
    ("\\(7\\), I think", "7"),
    ("$7$, $8$", "7, 8"),
    ("$x=2$, $y=3$.", "x=2, y=3"),
    ("$7\\%$: low", "7\\%"),
    ("$7$ dollars, I think", "7 dollars"),
    ("$2\\sqrt{3}$ cm, I think", "2\\sqrt{3} cm"),
    ("\\frac{1}{2}, I think", "\\frac{1}{2}"),
    ("\\(\\frac{1}{2}\\): one half", "\\frac{1}{2}"),
    ("$\\left(1, 2\\right)$: a point", "\\left(1, 2\\right)"),
    ("-3/4: minus three quarters", "-3/4"),
    ("−3.5, I think", "−3.5"),
    (".5, I think", ".5"),
    ("0.333..., I think", "0.333..."),
    ("0.333... I think", "0.333..."),
    ("1,234, I think", "1,234"),
    ("1,234,567: over a million", "1,234,567"),
    ("1 234, I think", "1 234"),
    ("$1,234.50, I think", "1,234.50"),
    ("£7, I think", "£7"),
    ("50%: half", "50%"),
    ("50 percent, I think", "50 percent"),
    ("7, 8", "7, 8"),
    ("7, 8, I think", "7, 8"),
    ("7, 8, and 9, I think", "7, 8, and 9"),
    ("7 or 8", "7 or 8"),
    ("7, or seven", "7"),
    ("10 km: ten kilometers", "10 km"),
    ("12,345 km, I think", "12,345 km"),
    ("7 m/s: fast", "7 m/s"),
    ("3 hours, 20 minutes", "3 hours, 20 minutes"),
    ("3 hours and 20 minutes, I think", "3 hours and 20 minutes"),
    ("7 units, and we are done", "7 units"),
    ("2 1/2 cups, I think", "2 1/2 cups"),
    ("10:30: half past ten", "10:30"),
    ("12:30 p.m., right after lunch", "12:30 p.m"),
    ("5 pm: late", "5 pm"),
    ("3 : 2", "3 : 2"),
    ("2 : 3 : 4, I think", "2 : 3 : 4"),
    ("3:2: three to two", "3:2"),
    ("3–5 days", "3–5 days"),
    ("between 3 and 5", "between 3 and 5"),
    ("[0, 1), I think", "[0, 1)"),
    ("(3, 5]: half open", "(3, 5]"),
    ("(0, 1) \\cup (2, 3), I think", "(0, 1) \\cup (2, 3)"),
    ("{1, 2}, I think", "{1, 2}"),
    ("x = 2 or x = 3, I think", "x = 2 or x = 3"),
    ("x = 2, y = 3, I think", "x = 2, y = 3"),
    ("x - 7: less", "x - 7"),
    ("1 < x < 3, where x is real", "1 < x < 3"),
    ("|x|, I think", "|x|"),
    ("3 + 4 = 7, I think", "7"),
    ("7 = 3 + 4", "7"),
    ("2^10, I think", "2^10"),
    ("1011_2: eleven", "1011_2"),
    ("seven", "seven"),
    ("seven: 7", "seven"),
    ("seven (7)", "seven"),
    ("twenty-five, I think", "twenty-five"),
    ("Paris: the capital of France", "Paris"),
    ("Paris, France", "Paris, France"),
    ("New York, I believe.", "New York"),
    ("Dr. Smith", "Dr. Smith"),
    ("March 3, 2020", "March 3, 2020"),
    ("red, green and blue, I think", "red, green and blue"),
    ("yes: 2 < 3", "yes"),
    ("Yes, it is", "Yes"),
    ("B) because it is", "B"),
    ("B: seven", "B"),
    ("B, I think", "B"),
    ("B I think", "B"),
    ("(C), which is 7", "C"),
    ("C and not B", "C"),
    ("C; the others are wrong", "C"),
]

OTHERS = [
    ("Answer: 7: seven", "7"),
    ("Final answer: 10 o'clock", "10"),
    ("I think the answer is 7", "7"),
    ("**The answer is 7**", "7"),
    ("They meet at 10 o'clock.", "10"),
    ("\\boxed{7}: seven", "7"),
    ("\\boxed{7, I think}", "7"),
    ("\\boxed{10 \\text{ o'clock}}", "10"),
    ("\\boxed{(7)}", "7"),
    ("\\boxed{**7**}", "7"),
    ("\\boxed{7.}", "7"),
    ("\\boxed{(1, 2)}", "(1, 2)"),
    ("\\boxed{2, \\text{ and } 3}", "2, \\text{ and } 3"),
    ("\\boxed{0.333...}", "0.333..."),
    ("\\boxed{\\frac{1}{1+\\frac{1}{2}}}, I think", "\\frac{1}{1+\\frac{1}{2}}"),
]


@pytest.mark.parametrize(("text", "answer"), [(f"The answer is {text}", answer) for text, answer in STATED] + OTHERS)
def test_the_value_is_read_without_what_follows(text, answer):
    assert final_answer(text) == answer


VALUES = st.sampled_from(
    ["7", "-7", "1,234", "3.5", "1/2", "50%", "10 km", "7 apples", "x = 5", "\\frac{3}{4}", "$7$", "\\(x + 1\\)", "(1, 2)",
     "[0, 1)", "7, 8", "10:30", "2^{10}", "\\sqrt{2}", "9\\pi", "**7**", "$5", "seven", "Paris"]
)  # fmt: skip
REMARKS = st.sampled_from(
    [", I think", ", I believe.", "; I checked it.", ", right?", ", as we saw.", ", which is the result", ", because it is so",
     ". This is all.", ", hopefully", ", I'm sure", ", and that is final", " — that is all", ", of course.", ".", "!", ""]
)  # fmt: skip
LEADS = st.sampled_from(
    ["The answer is ", "the final answer is: ", "Answer: ", "The answer is probably ", "The result is "]
)


@given(LEADS, VALUES, REMARKS)
def test_no_remark_changes_a_value(lead, value, remark):
    expected = final_answer(f"{lead}{value}")
    assert final_answer(f"{lead}{value}{remark}") == expected and math_equal(value.strip("*"), expected)


@given(st.text(alphabet="0127 ,;:.-—()[]{}$\\*_|=xI'o thinkclock\n…✓", max_size=60))
def test_an_answer_is_part_of_its_line_and_reading_it_again_ends(text):
    answer = final_answer(f"The answer is {text}")
    assert answer is None or (answer.strip() == answer and final_answer(f"The answer is {answer}") is not None)


@pytest.mark.parametrize(
    "text", [" " * 50_000, "-" * 50_000, "7, " * 20_000, "(" * 50_000, "1 + " * 20_000, "o " * 30_000]
)
def test_long_lines_are_read(text):
    final_answer(f"The answer is 7{text}x")
    final_answer(f"\\boxed{{7{text.replace('{', '')}x}}")


def test_an_hour_is_a_number_of_hours():
    assert math_equal("10 o'clock", "10") and math_equal("10", "10:00") and math_equal("5 o'clock", "5:00")
    assert not math_equal("10:30", "10") and not math_equal("10:00", "11") and not math_equal("5 pm", "5")
