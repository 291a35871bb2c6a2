"""Repair: a share of the context is computed again where it is used."""

import math
from functools import cache

import pytest
import torch
from helpers import model_variants, tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import graphs
from helpers.model_configs import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, Repair, SamplingParams, SchedulerConfig
from choreograph.attention.backend import ForwardContext
from choreograph.errors import ConfigError, RequestFailedError
from choreograph.features.repair import probe
from choreograph.features.repair.options import REPAIR_STRATEGIES
from choreograph.features.repair.planner import ContextRepair
from choreograph.features.repair.probe import AttentionObserver
from choreograph.features.repair.strategy import Strategy

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def distributions(session, header, parents, count=4, **options):
    """Log-probabilities (count, V) of a decode that is forced to a fixed continuation."""
    rows = []
    message = session.decode(header, parents, forced_tokens=list(range(count)), **options)
    message.on_logprobs(rows.append)
    message.wait_encoded()
    return torch.stack(rows), message


def build(session, nodes):
    """Run a message graph in a session."""
    messages = []
    for node in nodes:
        parents = [messages[index] for index in node.parents]
        args = (node.tokens, parents, node.offsets, node.position)
        if node.generated is None:
            messages.append(session.prefill(*args))
        else:
            messages.append(session.decode(*args, forced_tokens=node.generated, footer=node.footer))
    return messages


@pytest.mark.parametrize(
    ("backend", "repair"),
    [
        ("native", 1),
        ("sdpa", 1),
        ("reference", 1),
        ("native", Repair(0.9999, "deviation")),  # every token, but selected by its score
        ("native", Repair(0.9999, "attention")),
        ("sdpa", Repair(0.9999, "attention")),
        ("native", Repair(0.9999, "unseen")),
    ],
)
@settings(max_examples=many(6), deadline=None)
@given(nodes=graphs(), data=st.data())
def test_a_full_repair_equals_prefix_mode(backend, repair, nodes, data):
    engine = tiny_models.engine(backend=backend)
    order = data.draw(st.permutations(range(len(nodes))))[: data.draw(st.integers(1, 4))]
    with engine.session() as session, engine.session(mode="prefix") as baseline:
        messages, texts = build(session, nodes), [node.all_tokens for node in nodes]
        expected, _ = distributions(baseline, [7, 8], [baseline.prefill(texts[i]) for i in order])
        result, message = distributions(
            session, [7, 8], [messages[i] for i in order], repair=repair, offsets=[50] * len(order)
        )
        assert torch.allclose(result, expected, atol=2e-4)
        engine.check()
        assert message.offsets == tuple(sum(len(texts[i]) for i in order[:n]) for n in range(len(order)))


@settings(max_examples=many(6), deadline=None)
@given(nodes=graphs())
def test_no_repair_is_reuse_as_it_is(nodes):
    engine = tiny_models.engine()
    with engine.session() as session:
        messages = build(session, nodes)
        plain, _ = distributions(session, [7, 8], messages)
        zero, message = distributions(session, [7, 8], messages, repair=0)
        assert torch.allclose(plain, zero, atol=1e-5)
        assert message.usage.repaired_tokens == 0


def test_the_first_tokens_see_what_precedes_them_in_the_call():
    """The same graph, written out with slices, gives the same result and shares the entries."""
    engine = tiny_models.engine()
    with engine.session() as session:
        a, b, c = (session.prefill([i, i + 1, i + 2, i + 3, i + 4, i + 5]) for i in (0, 10, 20))
        result, message = distributions(session, [30], [a, b, c], repair=1 / 3)
        assert message.usage.repaired_tokens == 4  # two tokens each of b and c: nothing precedes a
        assert message.usage.cached_tokens == 18 - 4
        by_hand_b = session.prefill([10, 11], [a])
        by_hand_c = session.prefill([20, 21], [a, by_hand_b, b[2:6]])
        expected, _ = distributions(session, [30], [a, by_hand_b, b[2:6], by_hand_c, c[2:6]])
        assert torch.allclose(result, expected, atol=1e-5)
        assert by_hand_b.finish_reason == by_hand_c.finish_reason == "cached"
    assert engine.stats().num_referenced_entries == 0
    engine.check()


def repaired_by_hand(session, parents, ranges):
    """The slow form: each range is a prefill of its own, over the pieces of the context before it."""
    pieces = []
    for parent, spans in zip(parents, ranges, strict=True):
        kept = 0
        for first, last in spans:
            pieces += [parent[kept:first]] if kept < first else []
            pieces.append(session.prefill(parent.tokens[first:last], list(pieces)))
            kept = last
        pieces += [parent[kept:]] if kept < parent.length else []
    return pieces


@st.composite
def token_ranges(draw, num_tokens):
    """Ranges of a parent's tokens: ascending, not adjacent."""
    cuts = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=8)))
    return list(zip(cuts[::2], cuts[1::2], strict=False))


@pytest.mark.parametrize("family", ["llama", "mistral, window", "gemma2", "gpt_oss", "bloom"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@settings(max_examples=many(6), deadline=None)
@given(lengths=st.lists(st.integers(1, 14), min_size=2, max_size=4), step=st.sampled_from([5, 1024]), data=st.data())
def test_scattered_tokens_equal_one_prefill_for_each_range(family, backend, lengths, step, data):
    engine = family_engine(family, backend, step)
    ranges = [[], *(data.draw(token_ranges(length)) for length in lengths[1:])]  # nothing precedes the first parent
    with engine.session() as session:
        parents = [session.prefill([(7 * i + j) % 60 for j in range(n)]) for i, n in enumerate(lengths)]
        result, message = distributions(session, [30], parents, repair=Repair(0.5, Strategy(lambda view: ranges)))
        assert message.usage.repaired_tokens == sum(last - first for spans in ranges for first, last in spans)
        expected, _ = distributions(session, [30], repaired_by_hand(session, parents, ranges))
        assert torch.allclose(result, expected, atol=1e-5)
        engine.check()
    assert engine.stats().num_referenced_entries == 0


def test_the_repair_of_a_parent_is_one_entry_that_its_reader_reads_whole():
    engine = tiny_models.engine()
    ranges = [[], [(0, 1), (3, 5)], [(2, 3), (4, 6), (7, 8)]]
    scatter, more = Strategy(lambda view: ranges), Strategy(lambda view: [*ranges, [(0, 1)]])
    with engine.session() as session:
        parents = [session.prefill([i] * 8) for i in range(3)]
        message = session.decode([40], parents, sampling=GREEDY, repair=Repair(0.5, scatter))
        assert message.usage.repaired_tokens == 7
        context = inspect(message).entry.context
        assert [(s.entry.runs.positions, s.num_tokens) for s in context if s.entry.runs] == [
            ((8, 11), 3),
            ((18, 20, 23), 4),
        ]
        again = session.decode([41], [*parents, session.prefill([9])], sampling=GREEDY, repair=Repair(0.5, more))
        assert again.usage.repaired_tokens == 1  # of the last parent: the others' are shared


@cache
def family_model(family):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(CONFIGS[family]).float().eval()


def family_engine(family, backend, step):
    return Engine.from_pretrained(
        family_model(family),
        config=EngineConfig(
            backend=backend,
            cache=CacheConfig(capacity=2048, page_size=4, poison_freed_pages=True),
            scheduler=SchedulerConfig(max_num_batched_tokens=step),
        ),
    )


def test_readers_of_one_context_share_its_repair():
    engine = tiny_models.engine()
    with engine.session(repair=0.5) as session:
        solutions = [session.prefill([i] * 8) for i in range(4)]
        voters = [session.decode([40 + i], solutions, sampling=GREEDY) for i in range(3)]
        engine.run_until_idle()
        assert [voter.usage.repaired_tokens for voter in voters] == [12, 0, 0]
        longer = session.decode([50], [*solutions, session.prefill([9] * 8)], sampling=GREEDY)
        assert longer.usage.repaired_tokens == 4


def test_readers_of_one_context_share_its_scoring(monkeypatch):
    """Deviation does not read the prompts."""
    engine, calls = tiny_models.engine(), []
    planner = inspect(engine).repair_planner
    monkeypatch.setattr(
        planner, "_is_loaded", lambda *args: calls.append(1) or ContextRepair._is_loaded(planner, *args)
    )
    with engine.session(repair=Repair(0.5, "deviation")) as session:
        solutions = [session.prefill([i] * 8) for i in range(4)]
        for solution in solutions:
            solution.wait_encoded()
        voters = [session.decode([40 + i // 2], solutions, sampling=GREEDY) for i in range(4)]
        engine.run_until_idle()
        assert len(calls) == 1
        assert sum(voter.usage.repaired_tokens for voter in voters) >= 12
        session.decode([40], solutions[::-1], sampling=GREEDY).wait_encoded()
        assert len(calls) == 2


def steps_of(engine):
    """List the numbers of tokens of steps from now on."""
    steps = []
    engine.events.subscribe(lambda event: steps.append(event.data["tokens"]) if event.kind == "step" else None)
    return steps


def test_equal_prompts_are_scored_once_in_one_step():
    """The header of two voters is [40, 41], that of the others [41, 41]: two rows each."""
    engine = tiny_models.engine()
    with engine.session(repair=Repair(0.5, "attention")) as session:
        solutions = [session.prefill([i] * 8) for i in range(4)]
        for solution in solutions:
            solution.wait_encoded()
        steps, count = steps_of(engine), engine.stats().num_batched_tokens
        voters = [session.decode([40 + i // 2, 41], solutions, sampling=GREEDY) for i in range(4)]
        engine.run_until_idle()
        assert steps[:2] == [4, sum(voter.usage.repaired_tokens for voter in voters) + 8]
        assert engine.stats().num_batched_tokens - count == 4 + sum(v.usage.computed_tokens + 4 for v in voters)
        again = session.decode([40, 41], solutions, sampling=GREEDY)
        again.wait_encoded()
        assert again.usage.repaired_tokens == 0 and steps[-5:] == [2, 1, 1, 1, 1]
    engine.check()


def test_the_prompt_is_scored_in_the_step_that_completes_the_context():
    engine = tiny_models.engine()
    with engine.session(repair=Repair(0.5, "attention")) as session:
        solutions = [session.decode([i, 1, 2, 3], sampling=GREEDY, footer=[5, 6]) for i in range(3)]
        reader = session.decode([40, 41], solutions, sampling=GREEDY)
        steps = steps_of(engine)
        assert len(reader.output_token_ids) == 4
        # 4 steps of the solutions; their last token and footer with the scored prompt; the repair with the prompt
        assert steps[:6] == [12, 3, 3, 3, 9 + 2, reader.usage.repaired_tokens + 2]
        assert reader.usage.repaired_tokens == 10


@pytest.mark.parametrize(("step", "rows"), [(1024, 64), (1024, 4), (4, 64)])
def test_the_observed_attention_is_that_of_transformers(monkeypatch, step, rows):
    """With one layer, keys do not depend on what precedes a message; small steps compute the prompt in parts."""
    monkeypatch.setattr(probe, "ROWS", rows)
    scheduler = SchedulerConfig(max_num_batched_tokens=step)
    engine = Engine.from_pretrained(tiny_models.build(layers=1), config=EngineConfig(scheduler=scheduler))
    parts, prompt, observed = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]], [20, 21, 22, 23, 24, 25], []
    strategy = REPAIR_STRATEGIES["attention"]
    select = lambda view: observed.append(view.attention) or strategy.select(view)  # noqa: E731
    monkeypatch.setitem(REPAIR_STRATEGIES, "attention", strategy._replace(select=select))
    with engine.session() as session:
        parents = [session.prefill(part) for part in parts]
        session.decode(prompt, parents, sampling=GREEDY, repair=Repair(0.5, "attention")).wait_encoded()
    reference = tiny_models.build(layers=1)
    reference.set_attn_implementation("eager")
    (weights,) = reference(
        torch.tensor([[token for part in [*parts, prompt] for token in part]]), output_attentions=True
    ).attentions
    assert torch.allclose(observed[0], weights[0, :, -6:, :12].sum(dim=(0, 1)), atol=1e-5)


def test_the_scored_prompt_is_computed_up_to_the_last_observed_layer(monkeypatch):
    """The step that computes it alone stops there; one with other tokens does not."""
    engine, attended = Engine.from_pretrained(tiny_models.build(layers=6)), []
    attend = ForwardContext.attend
    record = lambda self, layer, query, *args: (  # noqa: E731
        attended.append((query.shape[2], layer)) or attend(self, layer, query, *args)
    )
    monkeypatch.setattr(ForwardContext, "attend", record)
    with engine.session(repair=Repair(0.5, "attention")) as session:
        parents = [session.prefill([i] * 8) for i in range(3)]
        for parent in parents:
            parent.wait_encoded()
        attended.clear()
        session.decode([40, 41], parents, sampling=GREEDY).wait_encoded()
        assert [layer for rows, layer in attended if rows == 2] == [0, 1, 2, 3]
        attended.clear()
        session.decode([42], [*parents, session.prefill([5] * 8)], sampling=GREEDY).wait_encoded()
        assert [layer for rows, layer in attended if rows == 9] == list(range(6))
    engine.check()


def test_a_call_whose_scoring_fails_ends_with_the_error(monkeypatch):
    engine = tiny_models.engine()
    monkeypatch.setattr(AttentionObserver, "__call__", lambda *args: 1 / 0)
    with engine.session(repair=Repair(0.5, "attention")) as session:
        parents = [session.prefill([i] * 8) for i in range(3)]
        reader, other = (session.decode([40, 41], parents, sampling=GREEDY) for _ in range(2))
        plain = session.decode([40, 41], parents, sampling=GREEDY, repair=0)
        assert len(plain.output_token_ids) == 4
        for message in (reader, other):
            with pytest.raises(RequestFailedError, match="division by zero"):
                message.result()
        monkeypatch.undo()
        assert len(session.decode([40, 41], parents, sampling=GREEDY).output_token_ids) == 4
    engine.run_until_idle()
    engine.check()
    assert engine.stats().num_referenced_entries == 0


def test_what_already_saw_its_context_is_not_repaired():
    engine = tiny_models.engine()
    with engine.session() as session:
        question = session.prefill(list(range(10)))
        answer = session.decode([11], [question], sampling=GREEDY, footer=[12])
        vote = session.decode([13], [question, answer], sampling=GREEDY, repair=1)
        assert vote.usage.repaired_tokens == 0 and vote.usage.cached_tokens == 10 + answer.length


def test_a_repaired_message_is_exact_for_readers_with_the_same_repair():
    engine = tiny_models.engine()
    with engine.session(repair=0.5) as session:
        a, b = session.prefill([1] * 8), session.prefill([2] * 8)
        answer = session.decode([3], [a, b], sampling=GREEDY)
        reader = session.decode([4], [a, b, answer], sampling=GREEDY)
        assert answer.usage.repaired_tokens == 4 and reader.usage.repaired_tokens == 0


@pytest.mark.parametrize("strategy", ["deviation", "attention", "unseen"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_strategies_over_all_parents_recompute_the_share_of_the_tokens(strategy, share):
    engine = tiny_models.engine()
    with engine.session() as session:
        parents = [session.prefill([i, *range(20, 39)]) for i in range(3)]
        message = session.decode([50, 51], parents, sampling=GREEDY, repair=Repair(share, strategy))
        assert message.usage.repaired_tokens == math.ceil(share * 40)  # nothing precedes the first parent


def repaired_by_parent(session, parents, share):
    """Numbers of tokens of each parent that "unseen" selects."""
    message = session.decode([50], parents, sampling=GREEDY, repair=Repair(share, "unseen"))
    return [p.repaired for p in message.explain().parents]


def test_parents_that_saw_less_of_the_context_are_repaired_more():
    engine = tiny_models.engine()
    with engine.session() as session:
        a, b, c, d = (session.prefill([i] * 10) for i in range(4))
        assert repaired_by_parent(session, [a, b, c, d], 0.2) == [0, 1, 2, 3]  # 0, 10, 20, 30 tokens unseen
        assert repaired_by_parent(session, [a, b, c, d], 0.8) == [0, 4, 10, 10]  # d is full: its rest is for c and b
        saw_a = session.prefill([5] * 10, [a])
        assert repaired_by_parent(session, [a, b, saw_a], 0.3) == [0, 3, 3]  # both lack ten tokens
        saw_half = session.prefill([6] * 10, [a[:5], b])
        assert repaired_by_parent(session, [a, b, saw_half], 0.3) == [0, 4, 2]
        assert repaired_by_parent(session, [saw_a], 0.3) == [3]  # it saw too much, and lacks nothing


@pytest.mark.parametrize("strategy", ["first", "unseen", "deviation", "attention"])
def test_results_do_not_depend_on_memory(strategy):
    """Entries that leave the device come back for scoring and for reading."""
    results = []
    for tokens in (2048, 92):
        engine = tiny_models.engine(tokens=tokens, host_capacity=64)
        with engine.session(seed=0) as session:
            parents = [session.prefill([i, *range(20, 31)]) for i in range(3)]
            for parent in parents:
                parent.wait_encoded()
            session.decode([1] * 40, sampling=GREEDY).wait_encoded()
            messages = [
                session.decode([50 + i], parents, sampling=GREEDY, repair=Repair(0.5, strategy)) for i in range(2)
            ]
            results.append([message.output_token_ids for message in messages])
            engine.check()
    assert results[0] == results[1]


@pytest.mark.parametrize("share", [0.5, 1])
def test_the_time_to_first_token_starts_when_the_repaired_parents_have_ended(share):
    engine = tiny_models.engine()
    with engine.session() as session:
        a, b = session.prefill([1] * 8), session.decode([2] * 8, sampling=GREEDY)
        reader = session.decode([3], [a, b], sampling=GREEDY, repair=share)
        engine.run_until_idle()
        assert inspect(reader).ready_time == inspect(b).finish_time > inspect(reader).submit_time


def test_a_released_parent_serves_the_calls_that_wait_for_it():
    engine = tiny_models.engine()
    with engine.session() as session:
        a, b = session.prefill([1] * 8), session.decode([2] * 8, sampling=GREEDY)
        reader = session.decode([3], [a, b], sampling=GREEDY, repair=0.5)
        a.release(), b.release()
        assert len(reader.output_token_ids) == 4
        engine.check()
    assert engine.stats().num_referenced_entries == 0


@pytest.mark.parametrize("kv_reuse", ["recompute", "partial"])
def test_repair_of_another_models_message_keeps_nothing(kv_reuse):
    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[0, 1, 3])
    with engine.session() as session:
        question, plan = session.prefill([1, 2, 3]), session.decode([4], sampling=GREEDY)
        options = {"model": "math", "kv_reuse": kv_reuse, "repair": 0.5, "sampling": GREEDY}
        assert session.decode([5], [question, plan], **options).usage.repaired_tokens > 0
    engine.run_until_idle()
    engine.check()
    assert engine.stats().num_referenced_entries == 0


def test_a_cancelled_call_leaves_no_repair_behind():
    engine = tiny_models.engine(step=4)
    with engine.session() as session:
        parents = [session.prefill([i] * 8) for i in range(3)]
        reader = session.decode([3], parents, sampling=GREEDY, repair=1)
        engine.step(), engine.step()
        reader.release()
        engine.run_until_idle()
        engine.check()
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_other_modes_ignore_it():
    engine = tiny_models.engine()
    for mode in ("prefix", "naive"):
        with engine.session(mode=mode, repair=0.5) as session:
            message = session.decode([3], [session.prefill([1, 2])], sampling=GREEDY)
            assert message.usage.repaired_tokens == 0


@pytest.mark.parametrize("value", [-0.1, 1.1, "all", True, float("nan")])
def test_a_wrong_share_is_refused(value):
    engine = tiny_models.engine()
    with engine.session() as session, pytest.raises(ConfigError, match="from 0 to 1"):
        session.decode([3], [session.prefill([1])], repair=value)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match="first"):
        Repair(0.5, "best")
