"""`choreograph demo`: questions over notes, each note encoded once."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ...console import format_ms, format_ratio, print_table, print_text
from ...outputs import Mode
from ...sampling_params import SamplingParams
from ...utils import ensure_writable, require
from ...viz import draw_questions

if TYPE_CHECKING:
    from rich.console import Console

    from ...api.engine import Engine

NOTES_FILE = Path(__file__).with_name("retrieval_notes.json")
INSTRUCTION = "Answer from the notes, in a few words."
SAMPLING = SamplingParams(temperature=0, max_tokens=24, stop=(".", ","))
RUNS: tuple[tuple[str, Mode, float], ...] = (  # label, mode, share of the reused tokens that is computed again
    ("prefix caching", "prefix", 0.0),
    ("reuse", "choreographed", 0.0),
    ("reuse, 10% repaired", "choreographed", 0.1),
)


class Answer(NamedTuple):
    """Answer to one question; times are in seconds since the first note was submitted."""

    question: str
    text: str
    is_right: bool
    start: float
    ttft: float  # from the start
    end: float
    computed_tokens: int  # by the engine until then, with those of the notes and those generated


def run_retrieval_demo(engine: "Engine", console: "Console", *, svg_path: Path | None = None) -> dict[str, Any]:
    """Answer eight questions, each over five of ten notes in an order of its own, in three ways.

    Returns the answers of each way, and the ratios of prefix caching to reuse.
    """
    ensure_writable(svg_path)
    if svg_path is not None:
        require("matplotlib", "viz")
    data = json.loads(NOTES_FILE.read_text())
    notes, questions = data["notes"], data["questions"]
    for _, mode, repair in RUNS:  # warms up
        _answer(engine, {"mill": notes["mill"]}, [questions[0] | {"notes": ["mill"]}], mode, repair)
    answers: dict[str, list[Answer]] = {}
    for label, mode, repair in RUNS:
        console.print(f"... {label}: {len(questions)} questions, five of {len(notes)} notes each", highlight=False)
        answers[label] = _answer(engine, notes, questions, mode, repair)
    _print_answers(console, answers)
    numbers = {label: _summary(items) for label, items in answers.items()}
    prefix, reuse = (numbers[label] for label, _, _ in RUNS[:2])
    if svg_path is not None:
        draw_questions({label: [(a.start, a.ttft, a.end) for a in items] for label, items in answers.items()}, svg_path)
        print_text(console, f"When each question was answered: {svg_path}")
    return {
        "answers": {label: [answer._asdict() for answer in items] for label, items in answers.items()},
        "summary": numbers,
        "ttft_ratio": prefix["ttft"] / reuse["ttft"],
        "e2e_ratio": prefix["seconds"] / reuse["seconds"],
    }


def _answer(
    engine: "Engine", notes: Mapping[str, str], questions: Iterable[Mapping[str, Any]], mode: Mode, repair: float
) -> list[Answer]:
    """Ask one question after the other; notes that a mode encodes are encoded before the first one."""
    engine.clear_cache()
    answers, begin, computed_before = list[Answer](), time.perf_counter(), engine.stats().num_batched_tokens
    with engine.session(mode=mode, repair=repair) as session:
        intro = session.prefill(session.system(INSTRUCTION))
        shelf = {name: session.prefill(session.user(text), [intro]) for name, text in notes.items()}
        engine.run_until_idle()
        for item in questions:
            documents, start = [shelf[name] for name in item["notes"]], time.perf_counter() - begin
            header = [session.user(item["question"]), session.assistant()]
            message = session.decode(header, [intro, *documents], sampling=SAMPLING)
            text, end = " ".join(message.text.split()), time.perf_counter() - begin
            is_right = any(word in text.lower() for word in item["right"])
            computed, ttft = engine.stats().num_batched_tokens - computed_before, message.timing.ttft or 0.0
            answers.append(Answer(item["question"], text, is_right, start, ttft, end, computed))
    return answers


def _summary(answers: list[Answer]) -> dict[str, float]:
    return {
        "right": sum(answer.is_right for answer in answers),
        "ttft": fmean(answer.ttft for answer in answers),
        "seconds": answers[-1].end,
        "computed_tokens": answers[-1].computed_tokens,
    }


def _print_answers(console: "Console", answers: Mapping[str, list[Answer]]) -> None:
    for column in zip(*answers.values(), strict=True):
        print_text(console, f"\n{column[0].question}")
        for label, answer in zip(answers, column, strict=True):
            mark = "right" if answer.is_right else "wrong"
            print_text(console, f"  {label:<20} {format_ms(answer.ttft):>8}  {mark}: {answer.text}")
    sums = {label: _summary(items) for label, items in answers.items()}
    base = next(iter(sums.values()))
    rows = [
        (
            *(label, f"{item['right']:.0f} of {len(answers[label])}"),
            *(format_ms(item["ttft"]), format_ratio(base["ttft"], item["ttft"])),
            *(f"{item['seconds']:.1f} s", format_ratio(base["seconds"], item["seconds"])),
            f"{item['computed_tokens']:,.0f}",
        )
        for label, item in sums.items()
    ]
    header = ("", "right", "first token", "ratio", "end to end", "ratio", "tokens computed")
    console.print()
    print_table(console, "All questions; the sums include encoding the notes", header, rows)
    console.print()
