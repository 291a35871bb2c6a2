"""Steps that are begun before the host knows their tokens: what is said is what is said without, whoever comes and goes
in between."""

from collections import Counter

import pytest
import torch
from helpers import tiny_models
from helpers.graph_stub import boards, engine_with  # noqa: F401
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import Engine, SamplingParams
from choreograph.execution.overlap import OverlapScheduler
from choreograph.execution.sampler import SampleOutput

pytestmark = pytest.mark.usefixtures("boards")
LONG = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
WAYS = [
    {},
    {"temperature": 0, "logprobs": 2},
    {"top_p": 0.6},
    {"presence_penalty": 1.5, "logit_bias": {4: 3.0}},
    {"repetition_penalty": 1.4, "min_tokens": 3},
    {"stop_token_ids": [7, 8, 9, 10, 11, 12, 13, 14]},
]


@pytest.fixture
def seen(monkeypatch):
    """How many steps were begun and how many calls had what they wanted in one."""
    count, begin, logits_of = Counter(), OverlapScheduler.launch_next, OverlapScheduler.take_logits

    def beginning(self, choice):
        begin(self, choice)
        count["begun"] += self._launched is not None

    def giving(self, batch):
        result = logits_of(self, batch)
        count["steps"] += 1
        if result is not None:
            count["taken"] += 1
            count["rows"] += len(result)
        return result

    monkeypatch.setattr(OverlapScheduler, "launch_next", beginning)
    monkeypatch.setattr(OverlapScheduler, "take_logits", giving)
    return count


def both() -> list[Engine]:
    model = tiny_models.build(stop=3)
    return [engine_with(model, use_graphs=one, overlap=one, tokens=400) for one in (False, True)]


def plans(plan) -> list[list]:
    return [getattr(plan, name).tolist() for name in ("slots", "positions", "kv_runs", "reads")] + [plan.shifts]


def test_all_but_the_first_step_of_a_decode_are_begun_before_the_host_knows_a_token(seen, monkeypatch):
    order, read = [], SampleOutput.read

    def reading(self):
        order.append("read")
        return read(self)

    engine = engine_with(tiny_models.model(), use_graphs=True, overlap=True)
    graphs, begin = inspect(engine).compiled, inspect(engine).compiled.launch

    def beginning(*given):
        result = begin(*given)
        if result is not None:
            order.append("begin")
        return result

    monkeypatch.setattr(SampleOutput, "read", reading)
    graphs.launch = beginning
    with engine.session() as session:
        root = session.prefill(list(range(20)))
        said = [session.decode([30 + i], [root], sampling=LONG) for i in range(3)]
        assert [len(message.tokens) for message in said] == [13] * 3
        order.clear()  # the graphs are there now
        for message in [session.decode([40 + i], [root], sampling=LONG) for i in range(3)]:
            assert len(message.tokens) == 13
    assert order == ["begin", "read"] * 11 + ["read"], "the last token needs no step behind it"


def test_a_launched_step_has_the_plan_that_it_would_have_now(monkeypatch):
    engine, compared = engine_with(tiny_models.model(), use_graphs=True, overlap=True), []
    logits_of = OverlapScheduler.take_logits

    def giving(self, batch):
        begun = self._launched
        result = logits_of(self, batch)
        if result is not None and len(batch.chunks) == len(begun.planned.batch.chunks):
            compared.append(
                plans(begun.planned.forward_context.metadata) == plans(self._make_forward_context(batch).metadata)
            )
        return result

    monkeypatch.setattr(OverlapScheduler, "take_logits", giving)
    with engine.session() as session:
        root = session.prefill(list(range(20)))
        parts = [session.decode([30 + i], [root], sampling=LONG) for i in range(3)]
        session.decode([9], [parts[2], root, parts[0]], offsets=[40, 0, 70], new_offset=90, sampling=LONG).result()
    assert len(compared) > 15 and all(compared)


def test_a_call_that_stops_takes_nothing_from_those_that_go_on(seen):
    """One of three stops by a token, which nobody could foresee: the other two keep their rows."""
    said = []
    for engine in both():
        with engine.session(seed=0) as session:
            root = session.prefill(list(range(4, 24)))
            stops = SamplingParams(max_tokens=12, min_tokens=4, stop_token_ids=list(range(61)), temperature=0)
            parts = [session.decode([30 + i], [root], sampling=way) for i, way in enumerate((LONG, stops, LONG))]
            said.append([part.tokens for part in parts])
            engine.check()
    assert said[0] == said[1] and len(said[0][1]) == 6
    assert seen["rows"] < 3 * seen["taken"], "some step was taken in part"


def test_who_comes_in_between_waits_one_step(seen):
    engine = engine_with(tiny_models.model(), use_graphs=True, overlap=True)
    with engine.session() as session:
        root = session.prefill(list(range(20)))
        slow = session.decode([5], [root], sampling=LONG)
        for _ in range(4):
            engine.step()
        had = len(inspect(slow).generated)
        quick = session.decode([6], [root], sampling=LONG)
        engine.step()
        assert len(inspect(slow).generated) == had + 1 and not inspect(quick).generated
        engine.step()
        assert len(inspect(slow).generated) == had + 2 and len(inspect(quick).generated) == 1


def test_a_step_that_breaks_while_the_next_one_is_begun_changes_nothing(monkeypatch):
    engine = engine_with(tiny_models.model(), use_graphs=True, overlap=True)
    plain, read, broken = engine_with(tiny_models.model(), use_graphs=False), SampleOutput.read, Counter()

    def breaking(self):
        broken["tries"] += 1
        if broken["tries"] % 3 == 0:
            raise KeyboardInterrupt
        return read(self)

    def talk(engine: Engine) -> list[int]:
        with engine.session(seed=4) as session:
            message = session.decode([5], [session.prefill(list(range(20)))], sampling=SamplingParams(max_tokens=12))
            while not message.done:
                try:
                    engine.step()
                except KeyboardInterrupt:
                    broken["seen"] += 1
            return message.tokens

    want = talk(plain)
    monkeypatch.setattr(SampleOutput, "read", breaking)
    assert talk(engine) == want and broken["seen"] > 3


def test_tokens_that_only_the_host_can_choose_are_computed_again(seen, monkeypatch):
    """A nucleus that the candidates do not hold: the device goes on with another token, which nobody takes."""
    monkeypatch.setattr("choreograph.execution.sampler.CANDIDATES", 4)
    way = SamplingParams(max_tokens=10, ignore_eos=True, top_p=0.999, temperature=2.0)
    said = []
    for engine in both():
        with engine.session(seed=2) as session:
            root = session.prefill(list(range(4, 24)))
            said.append([session.decode([30 + i], [root], sampling=way).tokens for i in range(2)])
    assert said[0] == said[1]
    assert seen["begun"] > 0 and 0 <= seen["begun"] - seen["taken"] <= 2, (
        "whose token the host had to choose is not begun for again"
    )


def test_memory_that_does_not_hold_two_steps_holds_one(monkeypatch):
    engine, tries = engine_with(tiny_models.model(), use_graphs=True, overlap=True), []

    def full(*_):
        tries.append(1)
        raise torch.OutOfMemoryError("no room")

    inspect(engine).hf_model.launch_graph = full
    try:
        with engine.session() as session:
            message = session.decode([5], [session.prefill(list(range(20)))], sampling=LONG)
            with pytest.warns(UserWarning, match="steps no longer overlap"):
                assert len(message.tokens) == 13
    finally:
        del inspect(engine).hf_model.launch_graph
    assert tries == [1]


def test_nothing_of_what_was_begun_stays_when_nothing_runs():
    engine = engine_with(tiny_models.model(), use_graphs=True, overlap=True)
    with engine.session() as session:
        session.decode([5], [session.prefill(list(range(20)))], sampling=LONG)
        for _ in range(4):
            engine.step()
        ahead = inspect(engine).overlap_scheduler
        assert ahead._launched is not None
    assert ahead._launched is ahead._planned is ahead._current is None


def test_the_newest_tokens_are_seen_where_another_call_reads_the_same_run():
    """In prefix mode a call goes on behind what another one is still making; it stands before it in their tile."""
    heard = []
    for engine in both():
        with engine.session(mode="prefix", seed=0) as session:
            prompt, rows = list(range(4, 24)), []
            first = session.decode(prompt, [], sampling=LONG)
            first.on_logprobs(rows.append)
            for _ in range(4):
                engine.step()
            second = session.decode(prompt, [], sampling=LONG)
            heard.append((first.tokens, second.tokens, torch.stack(rows)))
    assert heard[0][:2] == heard[1][:2]
    torch.testing.assert_close(heard[0][2], heard[1][2], atol=1e-4, rtol=1e-4)


def test_rows_without_numbers_end_their_call_alone(seen):
    engine = engine_with(tiny_models.build(), use_graphs=True, overlap=True)
    with engine.session() as session:
        root = session.prefill(list(range(20)))
        good = session.decode([5], [root], sampling=LONG)
        for _ in range(3):
            engine.step()
        begun = inspect(engine).overlap_scheduler._launched
        assert begun is not None
        begun.logits.fill_(float("nan"))
        with pytest.raises(Exception, match="NaN"):
            good.result()
        assert len(session.decode([6], [root], sampling=LONG).tokens) == 13
    engine.check()


class Program:
    """The same calls on an engine, stepped by hand; what was released is not asked."""

    def __init__(self, engine: Engine, actions: list[tuple], mode: str, rows: int) -> None:
        self.engine = engine
        inspect(engine).scheduler._max_num_batched_tokens = rows
        self.heard: dict[int, list[torch.Tensor]] = {}
        self.session = engine.session(seed=5, mode=mode)
        self.made = [self.session.prefill(list(range(4, 12)))]
        self.gone: set[int] = set()
        for action in actions:
            self.do(*action)
        engine.run_until_idle()
        engine.check()

    def do(self, what: str, number: int, way: int) -> None:
        there = [i for i in range(len(self.made)) if i not in self.gone]
        if what == "step":
            for _ in range(number):
                self.engine.step()
        elif what == "decode" and there:
            parents = [self.made[there[(number * k) % len(there)]] for k in range(1, 1 + way % 3)]
            parents = list(dict.fromkeys(parents)) or [self.made[there[0]]]
            sampling = SamplingParams(max_tokens=3 + number, **WAYS[way])
            message = self.session.decode([20] * (1 + number), parents, sampling=sampling)
            if way == 2:
                message.on_logprobs(self.heard.setdefault(message.id, []).append)
            self.made.append(message)
        elif what == "prefill":
            self.made.append(self.session.prefill(list(range(way, way + 3 + number))))
        elif what == "release" and len(there) > 2:
            self.made[there[number % len(there)]].release()
            self.gone.add(there[number % len(there)])

    @property
    def said(self) -> list[tuple]:
        kept = [m for i, m in enumerate(self.made) if i not in self.gone]
        return [(m.tokens, [sorted(p.top) for p in m.logprobs or ()]) for m in kept]


actions = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "decode", "decode", "prefill", "release"]),
        st.integers(0, 7),
        st.integers(0, 5),
    ),
    min_size=3,
    max_size=14,
)


@given(actions, st.sampled_from(["choreographed", "prefix", "naive"]), st.sampled_from([3, 8, 512]))
@settings(max_examples=many(40), deadline=None)
def test_overlapped_steps_give_the_same_tokens_while_requests_come_and_go(actions, mode, rows):
    plain, begun = (Program(engine, actions, mode, rows) for engine in both())
    assert begun.said == plain.said
    torch.testing.assert_close(begun.heard, plain.heard, atol=1e-4, rtol=1e-4)
