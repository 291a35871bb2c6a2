"""The lines of the table, by part: what the papers report (Prompt Choreography and DroidSpeak on an A100, KVFlow on an
A10G), what must be reached here, what is aimed at. Owns no figure that was measured or predicted."""

from typing import NamedTuple


class Line(NamedTuple):
    measure: str
    unit: str = "x"
    paper: float | None = None
    required: float | None = None
    target: float | None = None
    better: str = "higher"


def _step(name: str) -> tuple[Line, Line]:
    title = f"decode step, {name}"
    return Line(title, "ms", better="lower"), Line(f"{title}: share of the limit", "", None, 0.8, 0.9)


def _attention(name: str, required: float | None, target: float | None) -> tuple[Line, ...]:
    cases = ("decode of 1", "decode of 8", "decode of 8, shared", "decode of 32", "prefill")
    moved = Line(f"{name}, decode of 1: moved over home", "x", None, required and 1.05, target, "lower")
    return (*(Line(f"{name}, {case}: SDPA over it", "x", None, required, target) for case in cases), moved)


def _flow(title: str, ttft: tuple[float | None, ...], e2e: tuple[float, float, float]) -> tuple[Line, Line]:
    return Line(f"{title}: TTFT", "x", *ttft), Line(f"{title}: end to end", "x", *e2e)


TITLES = {
    "tree_of_thoughts": "Tree of Thoughts",
    "debate_iterative": "iterative debate",
    "debate_parallel": "parallel debate",
    "scaled": "Tree of Thoughts, large",
}
PARTS: dict[str, tuple[Line, ...]] = {
    "rates": (
        Line("memory, plain copy", "TB/s"),
        Line("product of matrices", "TFLOP/s"),
        Line("host to device", "GB/s"),
    ),
    "steps": (
        *_step("batch 1"),
        *_step("batch 8"),
        *_step("batch 8, shared"),
        *_step("batch 32"),
        Line("decode step, batch 32: a plain loop over it", "x", None, 1.0, 1.1),
        Line("decode step, moved over home", "x", None, 1.05, 1.0, "lower"),
        Line("first token, moved over home", "x", None, 1.05, 1.0, "lower"),
    ),
    "triton": _attention("triton", 0.7, 1.0),
    "prompt_cache": (
        Line("Prompt Cache: first token", "ms", better="lower"),
        Line("Prompt Cache: no reuse over modules", "x", 8, 8, 20),
    ),
    "partial": (Line("DroidSpeak: prefill, all layers over a quarter", "x", 2.6, None, 3),),
    "tree_of_thoughts": _flow(TITLES["tree_of_thoughts"], (3.5, 3.5, 7), (1.03, 1.03, 1.2)),
    "debate_parallel": _flow(TITLES["debate_parallel"], (6.2, 6.2, 12), (1.03, 1.03, 1.2)),
    "kvflow": (
        Line("KVFlow: over device only", "x", 2.91, None, 2.91),
        Line("KVFlow: over reactive loading", "x", 1.83, None, 1.83),
    ),
    "debate_iterative": _flow(TITLES["debate_iterative"], (2.0, 2.0, 4), (1.03, 1.03, 1.2)),
    "scaled": _flow(TITLES["scaled"], (None, None, None), (2.2, 2.2, 4)),
    "flex": _attention("flex", None, None),
}
