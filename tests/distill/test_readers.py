"""Adapters that only read what the base model encoded: one pass is the engine, training is what is served."""

import json
import re
from dataclasses import replace

import pytest
import tiny
import torch
from families import CONFIGS
from graphs import graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from many import many
from peft import LoraConfig, get_peft_model
from rehearsed import HEARD, perform
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from choreograph import Engine, SamplingParams
from choreograph.choreographies import conditions_of, find
from choreograph.choreographies.performance import Condition, Performance
from choreograph.cli import app
from choreograph.distill import Lesson, TrainConfig, collect, lessons_of, train, train_on
from choreograph.distill.lessons import baseline_lessons, joined
from choreograph.distill.losses import losses
from choreograph.distill.run import check_use
from choreograph.errors import ConfigError, DataError
from choreograph.evaluation.data import Example
from choreograph.evaluation.fidelity import drifts
from choreograph.evaluation.folder import Folder
from choreograph.evaluation.runs import run_conditions, settings_of
from choreograph.evaluation.shown import with_adapter
from choreograph.onepass.calls import Seen, TracedCall, calls_of, for_readers
from choreograph.onepass.likelihood import log_likelihood
from choreograph.onepass.packed import encoded, logits_of, pack, pack_reading, read_logits
from choreograph.onepass.shared import Shared

SHORT = SamplingParams(max_tokens=5)
LISTS = [Example(f"c{i}", "concepts", ["dog", "ball", f"tree{i}", "cat"], {}) for i in range(3)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "FT"
    torch.manual_seed(1)
    asked = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(tiny.build(), asked).save_pretrained(str(folder))
    return Engine.from_pretrained(tiny.build(), adapters={"FT": folder})


def closed(nodes, wanted):
    """Of these decodes, those that only such see, be it through a prefill; and the prefills that see them."""
    while True:
        read = set()
        for n, node in enumerate(nodes):
            if n in wanted or (node.generated is None and read & set(node.parents)):
                read.add(n)
        late = {i for n, node in enumerate(nodes) if n not in read for i in node.parents} & read
        if not late:
            return {f"s{n}" for n in read}
        for n in sorted(range(len(nodes)), reverse=True):
            late |= set(nodes[n].parents) if n in late else set()
        wanted = wanted - late


def lesson_on(engine, nodes, draw, reading=True):
    """Of a graph's calls; some of its decodes, which only such see, are readers'."""
    with engine.session() as session:
        calls = calls_of(perform(session, nodes))
    decodes = [n for n, node in enumerate(nodes) if node.generated]
    readers = closed(nodes, draw.draw(st.sets(st.sampled_from(decodes))) if decodes else set())
    return Lesson("a graph", tuple(for_readers(calls, readers) if reading else calls), reading)


@given(nodes=graphs(), draw=st.data())
@settings(max_examples=many(60), deadline=None)
def test_one_pass_of_readers_is_the_engine_step_by_step(engine, nodes, draw):
    decodes = [n for n, node in enumerate(nodes) if node.generated]
    readers = closed(nodes, draw.draw(st.sets(st.sampled_from(decodes))) if decodes else set())
    with engine.session() as session:
        calls = calls_of(perform(session, nodes))
    with engine.session() as session:
        steps = perform(session, nodes, readers)
        said = [s.message for s in steps if s.stage in readers and s.message.kind == "decode"]
        heard = [one.logprob for message in said for one in message.logprobs]
    packed = pack_reading(for_readers(calls, readers))
    packed.check()
    said = log_likelihood(read_logits(engine.runner.adapter, packed, "FT"), packed.targets).tolist()
    assert said == pytest.approx(heard, abs=1e-4)


@given(pair=st.tuples(graphs(4), graphs(4)), reading=st.booleans(), draw=st.data())
@settings(max_examples=many(40), deadline=None)
def test_lessons_in_one_pass_say_what_each_says_alone(engine, pair, reading, draw):
    """Equal prefills are rows of both; what a reader computes is never the base's."""
    lessons = [lesson_on(engine, nodes, draw, reading) for nodes in pair]
    both, model = joined([*lessons, lessons[0]]), "FT" if reading else "base"
    both.packed.check()
    alone, found = [], []
    for said, them in ((alone, [*lessons, lessons[0]]), (found, [both])):
        for packed in (one.packed for one in them):
            said += log_likelihood(read_logits(engine.runner.adapter, packed, model), packed.targets).tolist()
    assert found == pytest.approx(alone, abs=1e-4)
    shared = 0 if reading else sum(len(c.tokens) for c in lessons[0].calls if c.generated is None and not c.parents)
    assert _rows(both) <= sum(map(_rows, lessons)) + _rows(lessons[0]) - shared


@given(many_nodes=st.lists(graphs(4), min_size=1, max_size=3), tokens=st.integers(0, 30), draw=st.data())
@settings(max_examples=many(40), deadline=None)
def test_what_passes_share_changes_nothing(engine, many_nodes, tokens, draw):
    """Every graph comes twice, alone and with another one in its pass."""
    lessons = [lesson_on(engine, nodes, draw) for nodes in many_nodes]
    packs = [one.packed for one in (*lessons, joined([lessons[0], lessons[-1]]))]
    adapter = engine.runner.adapter
    shared = Shared(adapter, [packed.past for packed in packs], tokens)
    shared.check()
    for packed in packs:
        with torch.no_grad(), adapter.hooked():
            alone = logits_of(adapter, packed)
            found = logits_of(adapter, packed, by_base=shared)
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
        shared.check()


def test_what_passes_share_is_computed_once_and_comes_out_the_same(monkeypatch):
    adapter = Engine.from_pretrained(tiny.build()).runner.adapter
    computed = []
    compute = adapter.logits

    def logits(tokens, *rest, **named):
        computed.append(len(tokens))
        return compute(tokens, *rest, **named)

    monkeypatch.setattr(adapter, "logits", logits)
    pasts = [one.packed.past for one in (lesson(1), lesson(6), lesson(2))]  # the first two have a text of 2 tokens
    made = []
    for order in (pasts, pasts[::-1]):
        shared = Shared(adapter, pasts)
        with torch.no_grad(), adapter.hooked():
            made.append([shared(one) for one in order])
    assert computed == [2, 5, 5, 7, 7, 2, 5, 5], "what two of them have by itself, then what is new in each"
    for one, other in zip(made[0], made[1][::-1], strict=True):
        assert all(torch.equal(a[n][i], b[n][i]) for a, b in zip(one, other, strict=True) for n in a for i in (0, 1))
    shared.forget()


def test_names_of_long_talks_stay_short():
    """Where every call sees all before it, a name that told all names in it would be as long as a power of two."""
    calls = [TracedCall("text", [1, 2], 0)]
    for n in range(1, 60):
        calls.append(TracedCall("text", [n, 3], 2 * n, tuple(Seen(m, 0, 2, 2 * m) for m in range(n))))
    calls.append(TracedCall("answer", [4], 120, tuple(Seen(m, 0, 2, 2 * m) for m in range(60)), [5]))
    adapter = Engine.from_pretrained(tiny.build()).runner.adapter
    packed = pack_reading(calls)
    shared = Shared(adapter, [packed.past, packed.past])
    with torch.no_grad(), adapter.hooked():
        found, alone = logits_of(adapter, packed, by_base=shared), logits_of(adapter, packed)
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def _rows(lesson):
    return sum(len(call.tokens) for call in lesson.calls)


def text(number):
    """Two texts over each other, a decode of the base, and a reader of all three whose answer follows a rule."""
    a = TracedCall("text", [number % 7 + 1, 2, 3], 0)
    b = TracedCall("text", [number % 5 + 10, 12], 0)
    base = TracedCall("thought", [15], 3, (Seen(0, 0, 3, 0),), [number % 5 + 50])
    said = TracedCall(
        "answer", [20], 5, (Seen(0, 0, 3, 0), Seen(1, 0, 2, 0), Seen(2, 0, 2, 3)), [number % 7 + 30, 41, 42]
    )
    return [a, b, base, said]


def lesson(number):
    return Lesson(str(number), tuple(for_readers(text(number), ["answer"])), True)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_reader_is_served_as_it_was_trained(tmp_path, checkpointing):
    adapter = Engine.from_pretrained(tiny.build()).runner.adapter
    learn, check = [lesson(i) for i in range(12)], [lesson(i) for i in range(12, 16)]
    before = losses(adapter, check)
    config = TrainConfig(
        rank=4, alpha=8, rate=1e-2, lessons=2, dropout=0.0, epochs=5, validations=2, checkpointing=checkpointing
    )
    report = train(adapter, learn, check, tmp_path, config)
    assert report.after < report.before - 0.5
    assert losses(adapter, check) == before, "the model is as it was"
    engine = Engine(adapter, adapters={"FT": tmp_path})
    lost = []
    for number in range(12, 16):
        a, b, base, said = text(number)
        with engine.session() as session:
            texts = [session.prefill(x.prompt, new_offset=0) for x in (a, b)]
            thought = session.decode(base.prompt, [texts[0]], forced_tokens=base.generated)
            answer = session.decode(
                said.prompt,
                [*texts, thought],
                offsets=[0, 0, 3],
                new_offset=5,
                forced_tokens=said.generated,
                sampling=HEARD,
                model="FT",
                share="reuse",
            )
            lost += [-one.logprob for one in answer.logprobs]
    assert sum(lost) / len(lost) == pytest.approx(report.after, abs=1e-4)


def test_validation_of_readers_knows_no_dropout(tmp_path):
    adapter = Engine.from_pretrained(tiny.build()).runner.adapter
    learn, check = [lesson(i) for i in range(6)], [lesson(i) for i in range(6, 8)]
    report = train(adapter, learn, check, tmp_path, TrainConfig(rank=4, rate=1e-2, lessons=2, dropout=0.5, epochs=1))
    engine = Engine(adapter, adapters={"FT": tmp_path})
    served = sum(losses(engine.runner.adapter, check, "FT")) / len(check)
    assert served == pytest.approx(report.after, abs=1e-5)


def test_a_reader_need_not_speak_in_every_run(talker, tmp_path):
    """Of six runs two have it: whichever they are, one is learned from and one validates."""
    file = tmp_path / "some.py"
    file.write_text(
        "def run(p, task):\n"
        "    draft = p.decode('draft', p.assistant(), [p.prefill('task', p.user(task))])\n"
        "    return p.decode('answer', p.assistant(), [draft]) if task[0] in '25' else draft\n"
    )
    tasks = [Example(f"t{i}", "text", f"{i} or so") for i in range(6)]
    collect(talker, str(file), find(str(file)), tasks, tmp_path / "traces", sampling=SHORT)
    config = TrainConfig(rank=2, lessons=1, epochs=1)
    for named in ("readers", "stages"):
        asked = {named: ["answer"], "workflow": str(file)}
        report = train_on(talker.runner.adapter, tmp_path / "traces", tmp_path / named, config, **asked)
        assert report.updates == 1
    with pytest.raises(ConfigError, match="anser"):
        train_on(talker.runner.adapter, tmp_path / "traces", tmp_path / "x", workflow=str(file), readers=["anser"])


def test_in_bfloat16_a_stopped_training_goes_on_as_if_it_had_not_been(tmp_path):
    adapter = Engine.from_pretrained(tiny.build()).runner.adapter
    learn, check = [lesson(i) for i in range(6)], [lesson(i) for i in range(6, 8)]
    config = TrainConfig(rank=2, rate=1e-2, lessons=2, dropout=0.3, epochs=3, bf16=True)

    def stop(done, most):
        if done == 5:  # of nine, behind the checkpoint of update 3
            raise InterruptedError

    whole = train(adapter, learn, check, tmp_path / "whole", config)
    assert whole.after < whole.before
    with pytest.raises(InterruptedError):
        train(adapter, learn, check, tmp_path / "parts", config, on_update=stop)
    train(adapter, learn, check, tmp_path / "parts", config)
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_base_sees_no_reader():
    late = TracedCall("late", [1], 9, (Seen(3, 0, 4, 5),), [2])
    with pytest.raises(DataError, match="'late' sees what 'answer' says: name 'late' too"):
        for_readers([*text(0), late], ["answer"])
    assert [call.stage for call in for_readers([*text(0), late], ["answer", "late"])][-2:] == ["answer", "late"]
    prefilled = for_readers([*text(0), replace(late, generated=None)], ["answer"])
    assert [call.stage for call in prefilled][-2:] == ["answer", "late"], "what sees a reader is read too"
    assert pack_reading(prefilled).behind == sum(len(call.tokens) for call in prefilled[:-2])


def test_what_sees_a_reader_is_prefilled_by_it(tmp_path):
    """A question behind an answer, and an answer to it: served as one pass computes it, and as the base where nobody
    reads."""
    file = tmp_path / "asked.py"
    file.write_text(
        "def run(p, task):\n"
        "    text = p.prefill('text', [1, 2, 3])\n"
        "    said = p.decode('answer', [4], [text])\n"
        "    more = p.prefill('more', [5, 6], [text, said])\n"
        "    part = p.prefill('part', [7], (m.part(0, 1) for m in [more]))\n"
        "    other = p.prefill('other', [8], [text])\n"
        "    return p.decode('again', [9], [text, said, more, part, other])\n"
    )
    torch.manual_seed(2)
    asked = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(tiny.build(), asked).save_pretrained(str(tmp_path / "FT"))
    engine = Engine.from_pretrained(tiny.build(), adapters={"FT": tmp_path / "FT"})
    run, readers, content = find(str(file)), ("answer", "again"), {"answer": [[10, 11]], "again": [[12, 13]]}
    heard = {}
    for name, reading in (("base", {}), ("FT", {"model": "FT", "readers": readers})):
        with engine.session() as session:
            p = Performance(session, sampling=HEARD, forced=content, **reading)
            run(p, "").result()
            calls = calls_of(p.steps) if name == "base" else []
            made = {step.stage: step.message.model for step in p.steps}
            heard[name] = [o.logprob for s in p.steps for o in (s.message.logprobs or ())], made, calls
    assert set(heard["base"][1].values()) == {"base"}
    assert {stage for stage, model in heard["FT"][1].items() if model == "base"} == {"text", "other"}
    packed = pack_reading(for_readers(heard["base"][2], readers))
    assert packed.behind == 3 + 1, "the text, and what sees nothing else"
    said = log_likelihood(read_logits(engine.runner.adapter, packed, "FT"), packed.targets).tolist()
    assert said == pytest.approx(heard["FT"][0], abs=1e-4)
    assert said != pytest.approx(heard["base"][0], abs=1e-2)


def test_readers_are_named_where_something_can_be_read():
    with pytest.raises(ConfigError, match="prefix mode"):
        Condition("prefix", readers=("answer",))
    with pytest.raises(ConfigError, match=r"\['merg'\]: use stages that decode, \['merge', 'solve'\]"):
        Condition("choreographed", readers=("merg",)).check_readers(["solve", "merge", "solve"])


def test_a_reader_is_no_plain_training(tmp_path):
    """Where only readers decode, their lessons are the same calls."""
    adapter = Engine.from_pretrained(tiny.build()).runner.adapter
    calls = (*text(0)[:2], replace(text(0)[3], parents=text(0)[3].parents[:2]))
    config = TrainConfig(rank=2, epochs=1)
    train(adapter, [Lesson("a", calls)], [Lesson("a", calls)], tmp_path, config)
    with pytest.raises(ConfigError, match="another setting"):
        train(adapter, [Lesson("a", calls, True)], [Lesson("a", calls, True)], tmp_path, config)


def test_what_the_base_encodes_knows_no_dropout(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["gpt2"])
    adapter = Engine.from_pretrained(model.eval()).runner.adapter
    trained = get_peft_model(adapter.model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    adapter.in_training = trained
    packed = lesson(3).packed
    found = []
    for training in (False, True):
        trained.train(training)
        with adapter.hooked():
            found.append(encoded(adapter, packed.past))
        assert trained.training == training
        assert all(p.requires_grad == ("lora_" in name) for name, p in trained.named_parameters())
    assert all(torch.equal(a, b) for layer in found[0] for a, b in zip(found[0][layer], found[1][layer], strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_reads_in_one_pass(name):
    """By the base model itself, so that one pass in two parts is one pass."""
    torch.manual_seed(0)
    adapter = Engine.from_pretrained(AutoModelForCausalLM.from_config(CONFIGS[name]).eval()).runner.adapter
    places = (Seen(0, 0, 4, 0), Seen(1, 0, 3, 2)) if adapter.facts.movable else (Seen(0, 0, 4, 0), Seen(1, 0, 3, 4))
    calls = [
        TracedCall("text", [1, 2, 3, 4], 0),
        TracedCall("thought", [5], 4, (Seen(0, 0, 4, 0),), [6, 7]),
        TracedCall("answer", [8], 7, places, [9, 10, 11]),
    ]
    whole = log_likelihood(read_logits(adapter, pack(calls)), [6, 7, 9, 10, 11]).tolist()
    reading = pack_reading(for_readers(calls, ["answer"]))
    assert log_likelihood(read_logits(adapter, reading), [9, 10, 11]).tolist() == pytest.approx(whole[2:], abs=1e-4)
    shared = Shared(adapter, [reading.past, pack(calls[:1])])  # which have the text
    with torch.no_grad(), adapter.hooked():
        found = log_likelihood(logits_of(adapter, reading, by_base=shared), [9, 10, 11]).tolist()
    assert found == pytest.approx(whole[2:], abs=1e-4)


@pytest.fixture(scope="module")
def traces(talker, tmp_path_factory):
    out = tmp_path_factory.mktemp("traces")
    workflow = find("branch_solve_merge")
    return out, collect(talker, "branch_solve_merge", workflow, LISTS, out, sampling=SHORT, top=3)


def test_lessons_of_readers_are_what_they_said(talker, traces):
    condition = Condition("choreographed", model="FT", readers=("merge",))
    for trace, one in zip(
        traces[1],
        lessons_of(talker.runner.adapter, find("branch_solve_merge"), traces[1], condition, sampling=SHORT),
        strict=True,
    ):
        assert [call.stage for call in one.calls if call.generated] == ["merge"]
        assert [call.generated for call in one.calls if call.generated] == trace.content["merge"]
        (baseline,) = baseline_lessons([trace], ["merge"])
        assert baseline.targets == one.targets


def test_stages_that_are_not_learned_are_left_out(talker, traces):
    """But not what learned ones see: a merge sees what solved it, and nobody how the task was branched."""
    adapter, workflow, condition = talker.runner.adapter, find("branch_solve_merge"), Condition("choreographed")
    asked = [adapter, workflow, traces[1], condition]
    whole = lessons_of(*asked, sampling=SHORT)
    for named, learned in ((["solve"], {"solve"}), (["merge"], {"solve", "merge"})):
        for one, other in zip(lessons_of(*asked, sampling=SHORT, stages=named), whole, strict=True):
            assert {call.stage for call in one.calls if call.generated} == learned
            wanted = [p for stage, p in _said(adapter, other) if stage in learned]
            assert [p for _, p in _said(adapter, one)] == pytest.approx(wanted, abs=1e-4)
            assert len(one.packed.tokens) < len(other.packed.tokens)
    reading = [*asked[:3], replace(condition, readers=("merge",))]
    for one in lessons_of(*reading, sampling=SHORT, stages=["merge"]):
        assert [call.stage for call in one.calls if call.generated] == ["merge"]
        assert not [call for call in one.calls if call.stage == "branch"]
    for them, stages in ((asked, ["mergers"]), (reading, ["solve", "merge"])):
        with pytest.raises(ConfigError, match=re.escape(f"stages ['{stages[0]}']")):
            lessons_of(*them, sampling=SHORT, stages=stages)


def _said(adapter, lesson):
    stages = [call.stage for call in lesson.calls for _ in call.generated or ()]
    found = log_likelihood(read_logits(adapter, lesson.packed), lesson.packed.targets)
    return list(zip(stages, found.tolist(), strict=True))


def test_an_adapter_for_one_stage_from_traces_to_answers(talker, talker_folder, traces, tmp_path):
    out, found = traces
    command = ["train", str(out), "--out", str(tmp_path / "FT"), "--model", talker_folder, "--condition", "serial"]
    result = CliRunner().invoke(
        app,
        [
            *command,
            "--reader",
            "merge",
            "--stage",
            "merge",
            "--rank",
            "2",
            "--rate",
            "0.01",
            "--lessons",
            "1",
            "--kl",
            "1",
            "--encodings",
            "1",
        ],
    )
    assert result.exit_code == 0, result.output
    command = ["run", "branch_solve_merge", "--task", "dog, ball, cat, tree", "--model", talker_folder, "--adapter"]
    command += [str(tmp_path / "FT"), "--max-tokens", "5", "--json"]
    result = CliRunner().invoke(app, [*command, "--reader", "merge"])
    assert result.exit_code == 0 and json.loads(result.output)["answer"], result.output
    for more in ([], ["--reader", "merge", "--reader", "solve"]):
        refused = CliRunner().invoke(app, [*command, *more])
        assert 'give --reader "merge"' in str(refused.exception)
    for note in ("{", "[1]", '{"readers": 3}'):
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / "learned.json").write_text(note)
        with pytest.raises(ConfigError, match=r"broken.learned\.json.*train"):
            check_use(str(tmp_path / "broken"), [], talker.runner.adapter)
    check_use("somebody/adapter", ["merge"], talker.runner.adapter)
    others = Engine.from_pretrained(tiny.build(vocabulary=61)).runner.adapter
    with pytest.raises(ConfigError, match="other weights"):
        check_use(str(tmp_path / "FT"), ["merge"], others)
    engine = Engine.from_pretrained(talker_folder, dtype="float32", adapters={"FT": tmp_path / "FT"})
    workflow = find("branch_solve_merge")
    conditions = with_adapter(conditions_of(workflow), "FT", ["merge"])
    asked = {"sampling": SHORT, "options": {}}
    settings = settings_of(engine, "branch_solve_merge", workflow, LISTS, conditions, seed=0, **asked)
    assert settings["conditions"]["serial + FT"]["readers"] == ("merge",)
    assert "readers" not in settings["conditions"]["serial"]
    records = run_conditions(engine, workflow, LISTS, conditions, Folder(tmp_path / "run", settings), **asked)
    unknown = {"baseline": conditions["baseline"], "x": replace(conditions["serial + FT"], readers=("merg",))}
    with pytest.raises(ConfigError, match="merg"):
        run_conditions(engine, workflow, LISTS[:1], unknown, Folder(tmp_path / "unknown", {}), **asked)
    for plain, adapted in zip(records["serial"], records["serial + FT"], strict=True):
        assert not adapted.get("error")
        assert adapted["tokens"]["solve"] == plain["tokens"]["solve"], "what the base decodes is its own"
    known = {name: conditions[name] for name in ("baseline", "serial", "serial + FT")}
    for _, drift in drifts(engine, workflow, [t.script for t in found], known, sampling=SHORT):
        for plain, adapted in zip(drift["serial"], drift["serial + FT"], strict=True):
            assert plain.stage == adapted.stage
            assert (plain.after == adapted.after) == (plain.stage != "merge")


@pytest.mark.parametrize("command", [["run", "direct", "--task", "x"], ["eval", "direct", "--data", "x.jsonl"]])
def test_readers_need_an_adapter(command):
    result = CliRunner().invoke(app, [*command, "--reader", "answer"])
    assert result.exit_code == 2 and "--adapter" in result.output


def test_final_answers_have_no_readers(talker, traces, tmp_path):
    with pytest.raises(ConfigError, match="direct"):
        train_on(talker.runner.adapter, traces[0], tmp_path, direct="multi_qa", readers=["merge"])
