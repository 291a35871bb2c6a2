"""Pictures of step graphs and of messages: names stand where there is room for them."""

from itertools import pairwise
from xml.etree import ElementTree

from helpers import tiny_models
from rich.cells import cell_len

from choreograph import SamplingParams
from choreograph.agents.step_graph import Progress, StepGraph
from choreograph.viz import message_graph as messages
from choreograph.viz import step_chart as steps

LONG = "an agent whose name goes on for longer than most names do"
WIDE = "名字很长的代理人，它还在继续，继续，再继续"


def parts(drawn, name):
    return [e for e in ElementTree.fromstring(drawn).iter() if e.tag.endswith(f"}}{name}")]


def test_boxes_are_as_wide_as_the_longest_name_and_stay_apart():
    graph = StepGraph.read({LONG: None, WIDE: LONG, "b": {"all_of": [LONG, WIDE]}})
    drawn = steps.step_graph_to_svg(graph, graph.steps(Progress()), title=LONG * 3)
    _, *boxes = parts(drawn, "rect")
    spans = sorted((float(b.get("x")), float(b.get("x")) + float(b.get("width"))) for b in boxes)
    assert spans[0][1] - spans[0][0] >= 6.5 * max(map(cell_len, graph.agents))
    columns = sorted(set(spans))
    assert all(end < start for (_, end), (start, _) in pairwise(columns))
    whole = float(ElementTree.fromstring(drawn).get("width"))
    assert columns[-1][1] <= whole and whole >= 8 * len(LONG * 3)


def test_rows_begin_behind_the_longest_stage():
    engine = tiny_models.engine()
    with engine.session() as s:
        first = s.prefill([1, 2, 3])
        second = s.decode([4], [first], sampling=SamplingParams(max_tokens=2))
        second.result()
        drawn = messages.message_graph_to_svg([(LONG, first), ("b", second)])
    bars = [float(bar.get("x")) for bar in parts(drawn, "rect") if bar.get("x")]
    assert min(bars) >= 12 + 6 * len(LONG)
