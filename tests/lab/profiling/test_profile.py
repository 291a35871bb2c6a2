"""Profiles: what is measured is what would be served, runs go on where they stopped, points are picked as asked."""

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
import torch
from helpers import tiny_models
from helpers.char_tokenizer import tokenizer
from helpers.command_line import app
from helpers.inspect_engine import inspect
from helpers.model_variants import LAYERS
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.reuse_figures import draw_figures, profile_top_layers, transfer_loss
from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.errors import ConfigError, DataError, ModelError
from choreograph.features.other_models import EngineLoad, TransferLoad
from choreograph.lab.profiling.profile_report import draw_profile, frontier_rows, summary_rows
from choreograph.lab.profiling.profiler import (
    PairContext,
    ProfileConfig,
    QAExample,
    all_but,
    enable_all_patterns,
    head_patterns,
    measure_service_times,
    parse_qa_example,
    profile_pair,
    profiled_patterns,
    time_patterns,
)
from choreograph.layer_pattern import LayerPattern
from choreograph.layer_reuse import (
    LatencyAwareSelector,
    ParetoPoint,
    PatternScores,
    Profile,
    ServiceTimes,
    enable_profiled_reuse,
)

ASKED = [
    QAExample("a", "The cat is red. The dog is blue.", "What is red?", ("cat",)),
    QAExample("b", "One plus two is three.", "What is three?", ("one plus two", "1+2")),
]
PROFILE = Profile(
    receiver="r",
    sender="s",
    layers=4,
    metric="likelihood",
    inputs=("a", "b"),
    receiver_scores=(0.9, 0.7),
    full_reuse_scores=(0.5, 0.1),
    sender_scores=(0.1, 0.1),
    per_layer=((0.1, 0.1), (0.9, 0.7), (0.9, 0.6), (0.9, 0.7)),
    receiver_f1=(0.9, 0.7),
    per_layer_f1=((0.9, 0.7), (0.5, 0.3), (0.9, 0.6), (0.9, 0.7)),
    ranges=(
        PatternScores(LayerPattern.from_triplet(0, 1, 2), (0.8, 0.6)),
        PatternScores(LayerPattern.from_triplet(0, 1, 3), (0.9, 0.7)),
        PatternScores(LayerPattern.from_triplet(0, 0, 1), (0.5, 0.2)),
        PatternScores(LayerPattern.from_triplet(0, 2, 3), (0.4, 0.2)),
    ),
    costs={"1-3": 0.45},
)


@pytest.fixture(scope="module")
def engine():
    letters = tokenizer()
    base, other = (tiny_models.build(seed=3, vocabulary=len(letters), layers=LAYERS) for _ in range(2))
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    config = EngineConfig(cache=CacheConfig(capacity=2048, page_size=4, poison_freed_pages=True))
    return Engine.from_pretrained(base, tokenizer=letters, config=config, models={"math": other})


def answered(session, seen, one, forced):
    """As a user would ask."""
    question = session.prefill(session.user(one.question), [seen], model="math", kv_reuse="reuse")
    return session.decode(
        session.assistant(),
        [seen, question],
        model="math",
        kv_reuse="reuse",
        forced_tokens=forced,
        sampling=SamplingParams(temperature=0, max_tokens=4, logprobs=0),
    )


@pytest.mark.parametrize("every", [1, 2])
def test_a_cell_is_what_its_pattern_serves(engine, tmp_path, every):
    done = []
    setting = ProfileConfig(stride=every)
    result = profile_pair(engine, "math", ASKED, tmp_path, config=setting, on_done=done.append)
    engine.check()
    assert [cell.pattern for cell in result.ranges] == profiled_patterns(LAYERS, setting)
    heads = [cell.pattern for cell in result.ranges if len(cell.pattern.ranges) == 2]
    assert LayerPattern.from_triplet(2, 4, 5) in heads and len(heads) == (10 if every == 1 else 1)
    assert len(result.per_layer) == LAYERS and len(done) == 2 and result.inputs == ("a", "b")
    for cell in [
        *result.ranges,
        *(PatternScores(all_but(LAYERS, layer), values) for layer, values in enumerate(result.per_layer)),
        PatternScores(LayerPattern.from_triplet(0, 0, LAYERS), result.receiver_scores),
        PatternScores(LayerPattern(), result.full_reuse_scores),
    ]:
        with engine.session() as session:
            text = session.prefill(session.user(f"{setting.system}\n\n{ASKED[1].context}"))
            seen = session.partial_prefill(text, cell.pattern, model="math")
            forced = engine.tokenizer.encode(ASKED[1].answers[0], add_special_tokens=False)
            said = answered(session, seen, ASKED[1], forced)
            value = sum(one.logprob for one in said.logprobs) / len(forced)
        assert cell.values[1] == pytest.approx(value, abs=1e-4), cell.pattern
    f1s = (result.receiver_f1, *result.per_layer_f1)
    assert len(f1s) == LAYERS + 1 and all(0 <= value <= 1 for values in f1s for value in values)
    again = profile_pair(engine, "math", ASKED, tmp_path, config=setting, on_done=done.append)
    assert again == result and len(done) == 2, "nothing is measured twice"
    with pytest.raises(ConfigError, match="other settings"):
        profile_pair(engine, "math", ASKED, tmp_path, config=ProfileConfig(stride=every, metric="f1"))
    with pytest.raises(ConfigError, match="another input of the id 'a'"):
        profile_pair(engine, "math", [QAExample("a", "Other.", "What?", ("x",))], tmp_path, config=setting)
    with pytest.raises(ConfigError, match="same id"):
        profile_pair(engine, "math", [*ASKED, ASKED[0]], tmp_path, config=setting)
    choice = enable_profiled_reuse(engine, result, "math", times=ServiceTimes(0.01), max_loss=1e9)
    assert LayerPattern() in choice.patterns and ("math", "base") in inspect(engine).layer_reuse_pairs
    with pytest.raises(ConfigError, match="receiver='base' is not the receiver"):
        enable_profiled_reuse(engine, result, "base", "math", times=ServiceTimes(0.01))
    with pytest.raises(ModelError, match="'nobody' does not compute here"):
        enable_profiled_reuse(engine, result, "nobody", times=ServiceTimes(0.01))


def test_questions_about_one_context_are_answered_together_as_alone(engine):
    pattern, setting = LayerPattern.from_triplet(0, 1, 3), ProfileConfig()
    asked = [ASKED[0], QAExample("c", ASKED[0].context, "What is blue?", ("dog",))]
    enable_all_patterns(engine, "math", "base")
    alone = []
    for one in asked:
        with engine.session(seed=0) as session:
            scene = PairContext(session, one.context, "math", "base", setting)
            alone.append(scene.make_probe(one).score(scene.compute_variant(pattern)))
    with engine.session(seed=0) as session:
        scene = PairContext(session, asked[0].context, "math", "base", setting)
        seen = scene.compute_variant(pattern)
        questions = [scene.make_probe(one) for one in asked]
        said = [one.generate(seen) for one in questions]
        assert [q.compute_score(message) for q, message in zip(questions, said, strict=True)] == pytest.approx(
            alone, 1e-4
        )
        assert questions[0].score(scene.sender_message, "base") != pytest.approx(alone[0], 1e-4)
    engine.check()


def test_agreement_is_with_what_the_receiver_says_by_itself(engine, tmp_path):
    setting = ProfileConfig(metric="agreement", max_tokens=4)
    result = profile_pair(engine, "math", ASKED, tmp_path, config=setting)
    for number, one in enumerate(ASKED):
        values = {}
        with engine.session() as session:
            text = session.prefill(session.user(f"{setting.system}\n\n{one.context}"))
            own, half = (
                session.partial_prefill(text, LayerPattern.from_triplet(0, 0, end), model="math") for end in (LAYERS, 2)
            )
            said: list[int] | None = None
            for name, seen in (("own", own), ("half", half), ("reused", text)):
                answer = answered(session, seen, one, said)
                said = said or answer.output_token_ids
                values[name] = sum(one.logprob for one in answer.logprobs) / len(said)
        half = next(cell for cell in result.ranges if cell.pattern == LayerPattern.from_triplet(0, 0, 2))
        assert result.receiver_scores[number] == pytest.approx(values["own"], abs=1e-4)
        assert half.values[number] == pytest.approx(values["half"], abs=1e-4)
        assert result.full_reuse_scores[number] == pytest.approx(values["reused"], abs=1e-4)
    (critical,) = profile_top_layers(engine, "math", ASKED, result, [1], config=setting)
    known = {cell.pattern: cell.values for cell in result.ranges}
    assert critical.values == pytest.approx(known[critical.pattern], abs=1e-4)
    engine.check()


def test_a_profile_of_questions_about_one_context_is_that_of_each_alone(engine, tmp_path):
    more = [
        QAExample("c", ASKED[0].context, "What is blue?", ("dog",)),
        QAExample("d", ASKED[1].context, "And?", ("two",)),
    ]
    together = profile_pair(engine, "math", [ASKED[0], more[0], ASKED[1], more[1]], tmp_path / "together")
    for number, one in enumerate([ASKED[0], more[0], ASKED[1], more[1]]):
        alone = profile_pair(engine, "math", [one], tmp_path / one.id)
        for name in ("receiver_scores", "full_reuse_scores", "sender_scores"):
            assert getattr(together, name)[number] == pytest.approx(getattr(alone, name)[0], abs=1e-4)
        for layer, same in zip(together.per_layer, alone.per_layer, strict=True):
            assert layer[number] == pytest.approx(same[0], abs=1e-4)
        for cell, same in zip(together.ranges, alone.ranges, strict=True):
            assert cell.values[number] == pytest.approx(same.values[0], abs=1e-4), cell.pattern
    engine.check()
    (tmp_path / "together" / "inputs.jsonl").write_text(
        "".join((tmp_path / "together" / "inputs.jsonl").read_text().splitlines(keepends=True)[:1])
    )
    again = profile_pair(engine, "math", [ASKED[0], more[0]], tmp_path / "together")
    assert again.receiver_scores == pytest.approx(together.receiver_scores[:2], abs=1e-4), (
        "what was cut off goes on in the middle of a context"
    )


def test_scattered_layers_and_costs(engine, tmp_path):
    setting = ProfileConfig(metric="f1", max_tokens=4)
    result = profile_pair(engine, "math", ASKED, tmp_path, config=setting)
    assert result.per_layer == result.per_layer_f1 and result.receiver_scores == result.receiver_f1
    more = profile_top_layers(engine, "math", ASKED, result, [1, 3], config=setting)
    assert [len(cell.pattern.layers) for cell in more] == [1, 3]
    known = {cell.pattern: cell.values for cell in result.ranges}
    assert more[0].values == known[more[0].pattern], "one layer is a range"
    twice = [ASKED[0], QAExample("c", ASKED[0].context, "What is blue?", ("dog",))]
    both = profile_pair(engine, "math", twice, tmp_path / "twice", config=setting)
    scattered = profile_top_layers(engine, "math", twice, both, [1, 3], config=setting)
    assert [len(cell.values) for cell in scattered] == [2, 2]
    with pytest.raises(ConfigError, match="same ones"):
        profile_top_layers(engine, "math", ASKED[:1], result, [1])
    patterns = [LayerPattern.from_triplet(0, 0, LAYERS), LayerPattern.from_triplet(0, 1, 2)]
    costs = time_patterns(engine, "math", patterns, 40, rounds=2, clock=iter(range(100)).__next__)
    assert costs == {"0-5": [1, 1], "1-2": [1, 1]}
    times = measure_service_times(engine, "math", (8, 16), rounds=1, clock=iter(range(100)).__next__)
    assert times.per_step == 1 / 9 and times.per_pair == 0 and times.per_token == 1 / 16
    engine.check()


def test_a_profile_survives_its_file(tmp_path):
    file = tmp_path / "deep" / "profile.json"
    PROFILE.save(file)
    assert Profile.load(file) == PROFILE
    whole = file.read_text()
    for damage in ("", "[]", "{}", whole.replace('"version": 3', '"version": 2'), '{"version": 1}'):
        file.write_text(damage)
        with pytest.raises(DataError, match=r"profile\.json: no profile of version 3 .*: profile the pair again"):
            Profile.load(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inputs": [], "receiver_scores": [], "full_reuse_scores": [], "sender_scores": []}, "inputs.*at least 1"),
        ({"layers": 0}, "layers.*greater than 0"),
        ({"layers": "4"}, "layers.*valid integer"),
        ({"receiver_scores": ["good", "bad"]}, r"receiver_scores\.0.*number"),
        ({"receiver_scores": [0.9, float("nan")]}, r"receiver_scores\.1.*finite"),
        ({"full_reuse_scores": [0.5]}, "full_reuse_scores has 1 scores for 2 inputs"),
        ({"per_layer": [[0.9, 0.7], [0.5], [0.9, 0.6], [0.9, 0.7]]}, r"per_layer\[1\] has 1 scores"),
        ({"ranges": [{"pattern": {"ranges": [[1, 2]]}, "values": [0.8]}]}, "ranges, layers 1-2 has 1 scores"),
        ({"ranges": [{"pattern": {"ranges": [[2, 1]]}, "values": [0.8, 0.7]}]}, "ascending ranges"),
        ({"per_layer": [[0.9, 0.7]]}, "per_layer has 1 of 4 layers"),
        ({"per_layer_f1": [[0.9, 0.7]]}, "per_layer_f1 has 1 of 4 layers"),
        ({"receiver_f1": []}, "receiver_f1 has 0 scores"),
        ({"ranges": [{"pattern": {"ranges": [[3, 9]]}, "values": [0.8, 0.7]}]}, "the model has layers 0 to 3"),
        ({"ranges": [{"pattern": {"ranges": []}, "values": [0.8, 0.7]}]}, "a pattern without layers"),
        ({"costs": {"1-3": "fast"}}, r"costs\.1-3.*number"),
        ({"costs": []}, "costs.*dictionary|costs.*object"),
        ({"scattered": []}, "scattered=.*Unexpected"),
    ],
)
def test_damaged_columns_are_refused(change, says, tmp_path):
    file = tmp_path / "profile.json"
    PROFILE.save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=says):
        Profile.load(file)


def test_critical_layers_frontier_and_picks():
    assert PROFILE.critical() == [1], "a tenth of F1, whatever the metric"
    assert replace(PROFILE, receiver_f1=(), per_layer_f1=()).critical() == []
    assert [str(p.pattern) for p in PROFILE.pareto_points()] == ["none", "1-2", "1-3"]
    assert PROFILE.pareto_points()[-1] == ParetoPoint(LayerPattern.from_triplet(0, 1, 3), 0.0, 0.45)
    assert str(PROFILE.cheapest(0.15).pattern) == "1-2" and str(PROFILE.cheapest(0).pattern) == "1-3"
    assert str(PROFILE.cheapest(1).pattern) == "none"
    with pytest.raises(ConfigError, match="max_loss=nan: use a number"):
        PROFILE.cheapest(float("nan"))
    other = transfer_loss(PROFILE, PROFILE)
    assert [(p.loss, loss) for p, loss in other] == [(p.loss, p.loss) for p in PROFILE.pareto_points()]


def test_more_layers_are_on_the_frontier_only_if_they_are_measurably_better():
    """Three layers gain 0.01 on every input, two gain 0.05 on average by one lucky input."""
    own = tuple(0.5 + 0.01 * (i % 3) for i in range(20))
    reused = tuple(value - 0.3 for value in own)
    lucky = (reused[0] + 1.0, *reused[1:])
    steady = tuple(value - 0.01 - 0.001 * (i % 2) for i, value in enumerate(own))
    profile = replace(
        PROFILE,
        inputs=tuple(map(str, range(20))),
        receiver_scores=own,
        full_reuse_scores=reused,
        sender_scores=reused,
        per_layer=(),
        receiver_f1=(),
        per_layer_f1=(),
        ranges=(
            PatternScores(LayerPattern.from_triplet(0, 1, 3), lucky),
            PatternScores(LayerPattern.from_triplet(0, 1, 4), steady),
        ),
        costs={},
    )
    assert [str(p.pattern) for p in profile.pareto_points()] == ["none", "1-3", "1-4", "0-4"]
    assert [str(p.pattern) for p in profile.frontier()] == ["none", "1-4", "0-4"]
    assert [str(p.pattern) for p in profile.frontier(max_loss=0.02)] == ["1-4", "0-4"]
    noisy = tuple(value + (0.2 if i % 2 else -0.21) for i, value in enumerate(own))
    equal = replace(profile, ranges=(PatternScores(LayerPattern.from_triplet(0, 1, 4), noisy),))
    assert [str(p.pattern) for p in equal.frontier()] == ["none", "1-4"], "all layers are not measurably better"


def test_patterns_with_a_head_have_three_numbers():
    assert [str(p) for p in head_patterns(6, 2)] == ["0-2,4-6"]
    assert [str(p) for p in head_patterns(4, 1)] == ["0-1,2-3", "0-1,2-4", "0-1,3-4", "0-2,3-4"]


def test_patterns_with_and_without_a_time_stand_on_one_scale():
    """Half of a prefill's time is not the layers': two of ten cost more than a fifth of it, whether they were timed or
    not."""
    cells = [
        PatternScores(LayerPattern.from_triplet(0, a, b), (q, q))
        for a, b, q in ((4, 6, 0.89), (6, 8, 0.85), (2, 8, 0.895), (3, 6, 0.5))
    ]
    plain = replace(
        PROFILE, layers=10, receiver_scores=(0.9, 0.9), per_layer=(), per_layer_f1=(), ranges=tuple(cells), costs={}
    )
    timed = replace(plain, costs={"0-10": 1.0, "4-6": 0.55, "2-8": 0.75})
    assert timed.cost(LayerPattern.from_triplet(0, 6, 8)) == 0.55 and timed.cost(
        LayerPattern.from_triplet(0, 3, 6)
    ) == pytest.approx(0.6)
    assert (
        plain.cost(LayerPattern.from_triplet(0, 6, 8)) == 0.2
        and plain.cost(LayerPattern()) == timed.cost(LayerPattern()) == 0
    )
    assert [str(p.pattern) for p in timed.pareto_points()] == ["none", "4-6", "2-8", "0-10"]
    assert str(timed.cheapest(0.06).pattern) == "4-6"


def test_a_profile_is_drawn_and_printed(tmp_path):
    files = draw_figures(PROFILE, tmp_path, "pair")
    draw_profile(PROFILE, tmp_path / "new" / "profile.svg")
    assert all(file.read_text().startswith("<?xml") for file in [*files, tmp_path / "new" / "profile.svg"])
    assert [row[:3] for row in frontier_rows(PROFILE)] == [("none", "0%", "0.00")], "two inputs tell nothing apart"
    assert ("critical layers (F1)", "1") in summary_rows(PROFILE)


def test_many_critical_layers_fold_on_a_terminal(tmp_path, monkeypatch):
    """And take no digit from the numbers."""
    wide = replace(
        PROFILE,
        layers=40,
        per_layer=(),
        per_layer_f1=((0.5, 0.5),) * 40,
        receiver_scores=(0.87654, 0.87654),
        ranges=(),
        costs={},
    )
    wide.save(tmp_path / "profile.json")
    console = Console(file=StringIO(), force_terminal=True, width=80, no_color=True)
    monkeypatch.setattr("choreograph.lab.commands.layer_reuse.make_console", lambda: console)
    CliRunner().invoke(app, ["reuse", "show", str(tmp_path / "profile.json")])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert "0.877" in shown and all(re.search(rf"\b{layer}\b", shown) for layer in range(40))
    assert max(map(len, shown.splitlines())) <= 80


def test_a_choice_is_careful_while_there_is_time():
    points = PROFILE.pareto_points()
    choice = LatencyAwareSelector(points, times=ServiceTimes(0.01), ttft_slo=1.0, max_loss=0.2)
    assert [str(p) for p in choice.patterns] == ["1-3", "1-2"]
    loads = [EngineLoad(0, 0, tokens, 100) for tokens in (0, 50, 60, 1000, 0)]
    assert [str(choice(load)) for load in loads] == ["1-3", "1-3", "1-2", "1-2", "1-3"]
    assert choice.expected_ttft(points[-1], loads[1]) == pytest.approx(0.5 + 0.45), "what is queued has its own layers"
    assert str(LatencyAwareSelector(points, times=ServiceTimes(0.01))(loads[3])) == "1-3", (
        "without an objective there is always time"
    )
    assert str(LatencyAwareSelector(points, times=ServiceTimes(0.01), ttft_slo=1e-9)(loads[0])) == "none"
    worse = ParetoPoint(LayerPattern.from_triplet(0, 0, 3), loss=0.3, cost=0.9)
    assert LatencyAwareSelector([*points, worse], times=ServiceTimes(0.01)).points == points[::-1]
    for wrong in ({"max_loss": -1.0}, {"times": ServiceTimes(0.0)}, {"ttft_slo": 0.0}):
        with pytest.raises(ConfigError):
            LatencyAwareSelector(points, **{"times": ServiceTimes(1.0)} | wrong)


def test_the_expected_time_counts_attention_decodes_waiting_and_transfer():
    point = ParetoPoint(LayerPattern.from_triplet(1, 2, 4), 0.0, 0.5)  # one E cache, six of ten layers' KV is 6 * 100
    choice = LatencyAwareSelector([point], times=ServiceTimes(0.01, per_pair=0.001, per_step=0.1))
    load = EngineLoad(1, 1, tokens=10, message_tokens=20, pairs=50, message_pairs=200, steps=2, waited=0.25)
    idle = 0.25 + (0.1 + 0.05) + 0.5 * (0.2 + 0.2) + 0.1
    assert choice.expected_ttft(point, load) == pytest.approx(idle)
    assert choice.expected_ttft(point, load._replace(decodes=3)) == pytest.approx(idle + 3 * 0.1), (
        "a turn of the decodes between any two of three batches, and before the first token"
    )
    quick = TransferLoad(0, float("inf"), kv_bytes=100, hidden_bytes=40, layers=10)
    assert choice.expected_ttft(point, load._replace(transfer=quick)) == pytest.approx(idle)
    slow = quick._replace(queued_bytes=60, bytes_per_second=100.0)
    assert choice.expected_ttft(point, load._replace(transfer=slow)) == pytest.approx(
        0.25 + (60 + 40 + 700) / 100 + 0.1
    )
    hidden = slow._replace(kv_bytes=1)
    assert choice.expected_ttft(point, load._replace(transfer=hidden)) == pytest.approx(0.25 + 1.0 + 0.2 + 0.1), (
        "it starts when the hidden states are there"
    )
    whole = ParetoPoint(LayerPattern.from_triplet(0, 0, 10), 0.0, 0.5)
    assert choice.expected_ttft(whole, load._replace(transfer=slow)) == pytest.approx(idle), "nothing is fetched"


def test_records_are_contexts_and_questions():
    documents = [{"title": "T", "text": "one"}, {"text": "two"}]
    result = parse_qa_example(
        {"id": 3, "question": "Who?", "documents": documents, "answer": "me", "answer_aliases": ["I"]}, 0
    )
    assert result == QAExample("3", "T\none\n\ntwo", "Who?", ("me", "I"))
    assert parse_qa_example({"input": "Who?", "context": "text", "answers": ["me"]}, 7) == QAExample(
        "7", "text", "Who?", ("me",)
    )
    assert parse_qa_example({"question": "Who?", "context": "text", "answers": ["", "me"]}, 0).answers == ("me",)
    with pytest.raises(DataError, match=r"record 3: .* lacks \['answers'\]"):
        parse_qa_example({"question": "Who?", "context": "text", "answers": [" "]}, 3)
    for wrong in ({"question": "Who?", "answer": "me"}, {"context": "text", "answers": ["me"]}):
        with pytest.raises(DataError, match="needs a question"):
            parse_qa_example(wrong, 0)


def test_the_profile_command_writes_and_shows_a_profile(tmp_path):
    """Two model folders, a file of questions, a profile, a pick."""
    letters, folders = tokenizer(), []
    for seed in (3, 4):
        folders.append(str(tmp_path / f"model-{seed}"))
        tiny_models.build(seed=seed, vocabulary=len(letters), layers=3).save_pretrained(folders[-1])
        letters.save_pretrained(folders[-1])
    lines = [json.dumps({"question": "What?", "context": f"It is {i}.", "answers": [str(i)]}) for i in range(3)]
    data, out = tmp_path / "asked.jsonl", tmp_path / "out"
    data.write_text("\n".join(lines))
    arguments = ["--data", str(data), "--out", str(out), "--model", folders[0], "--limit", "2", "--time-tokens", "8"]
    result = CliRunner().invoke(app, ["reuse", "profile", folders[1], *arguments[:-1], "100000"])
    assert result.exit_code != 0 and "time_tokens=100000" in str(result.exception) + result.output
    assert not out.exists(), "told before anything was measured"
    result = CliRunner().invoke(app, ["reuse", "profile", folders[1], *arguments])
    assert result.exit_code == 0, result.output
    assert "frontier" in result.output and (out / "profile.svg").is_file()
    found = Profile.load(out / "profile.json")
    assert found.layers == 3 and len(found.inputs) == 2 and found.costs
    result = CliRunner().invoke(app, ["reuse", "profile", folders[1], *arguments[:-2]])
    assert result.exit_code == 0 and Profile.load(out / "profile.json") == found, "times are kept"
    shown = CliRunner().invoke(app, ["reuse", "show", str(out / "profile.json"), "--loss", "99", "--json"])
    assert json.loads(shown.output)["picked"] == "none"
