"""Pictures of step graphs and of messages: names stand where there is room for them."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from helpers import tiny_models
from rich.cells import cell_len

from choreograph import SamplingParams
from choreograph.agents.step_graph import Progress, StepGraph
from choreograph.viz import draw_message_graph, draw_step_graph, step_graph_boxes

LONG = "an agent whose name goes on for longer than most names do"
WIDE = "名字很长的代理人，它还在继续，继续，再继续"
POINTS = 72  # of an inch


def bars(path):
    """Left edge and right edge of every bar, in points."""
    groups = [e for e in ElementTree.parse(path).iter() if e.get("id", "").startswith("PolyCollection")]
    outlines = [e.get("d") for group in groups for e in group.iter() if e.tag.endswith("}path") and e.get("d")]
    xs = [[float(x) for x in re.findall(r"[ML] (\S+)", outline)] for outline in outlines]
    return [(min(x), max(x)) for x in xs]


def test_boxes_are_as_wide_as_the_longest_name_and_stay_apart(tmp_path):
    graph = StepGraph.read({LONG: None, WIDE: LONG, "b": {"all_of": [LONG, WIDE]}})
    draw_step_graph(graph, graph.steps(Progress()), tmp_path / "g.svg", title=LONG * 3)
    spans = sorted((left, left + width) for left, _, width in step_graph_boxes(graph).values())
    assert POINTS * (spans[0][1] - spans[0][0]) >= 6 * max(map(cell_len, graph.agents))
    columns = sorted(set(spans))
    assert all(end < start for (_, end), (start, _) in pairwise(columns))
    drawn = sorted(set(bars(tmp_path / "g.svg")))
    assert [x for x, _ in drawn] == pytest.approx([POINTS * start for start, _ in columns], abs=1)
    width = float(ElementTree.parse(tmp_path / "g.svg").getroot().get("width").removesuffix("pt"))
    assert POINTS * columns[-1][1] <= width and width >= 6 * len(LONG * 3)


def test_rows_begin_behind_the_longest_stage(tmp_path):
    engine = tiny_models.engine()
    with engine.session() as s:
        first = s.prefill([1, 2, 3])
        second = s.decode([4], [first], sampling=SamplingParams(max_tokens=2))
        second.result()
        draw_message_graph([(LONG, first), ("b", second)], tmp_path / "m.svg")
    assert min(start for start, _ in bars(tmp_path / "m.svg")) >= 12 + 6 * len(LONG)
    assert LONG in (tmp_path / "m.svg").read_text()
