"""The four systems in one workflow: what each part computes, in process and through a server."""

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from helpers.live_server import serving

from choreograph.messages.handle import unwrap_slice
from choreograph.prompt_cache import PromptCache

ROOMY, TIGHT = 8192, 1400  # tokens of the cache
EXAMPLE = Path(__file__).parents[1] / "examples" / "all_together" / "together.py"


@pytest.fixture(scope="module")
def together():
    spec = importlib.util.spec_from_file_location("together", EXAMPLE)
    module = sys.modules["together"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["together"]


@pytest.fixture(scope="module")
def engine_of(together, talker_folder):
    """Return an engine by capacity and eviction."""
    return cache(
        lambda capacity, graph=True: together.make_engine(together.Parts(graph=graph), talker_folder, capacity=capacity)
    )


@pytest.fixture(scope="module")
def run(together, engine_of):
    """Run the workflow with some parts; return its result, and what `inspect` makes of the decodes."""
    known = {}

    def run_once(capacity=ROOMY, inspect=lambda decodes: None, **changes):
        key = capacity, inspect, tuple(changes.items())
        if key not in known:
            parts = replace(together.Parts(), **changes)
            engine, seen = engine_of(capacity, parts.graph), []

            def read(prefill, decode, parts, **options):
                decodes = together.run(prefill, decode, parts, **options)
                seen.append(inspect(decodes))
                return decodes

            calls = together.in_process(engine, parts)
            result = together.measure(engine, calls, parts, program=read, max_tokens=4)
            engine.check()
            assert engine.stats().num_referenced_entries == 0
            known[key] = result, seen[0]
        return known[key]

    return run_once


def ancestors(messages):
    """The messages and everything that they attended to, by id."""
    found, queue = {}, list(messages)
    for message in queue:
        if message.id not in found:
            found[message.id] = message
            queue += map(unwrap_slice, message.parents)
    return found.values()


def by(agent, decodes):
    return [message for name, message in decodes if name == agent]


def test_modules_are_computed_once_and_plain_text_once_a_prefix(run, together, talker):
    texts = ["".join(map(together.CHAPTERS.get, chapters)) for chapters, *_ in together.INCIDENTS]
    prompts = [talker.tokenizer(together.RULES + text)["input_ids"] for text in texts]
    plain = 0
    for number, prompt in enumerate(prompts):
        plain += len(prompt) - max((num_equal(prompt, other) for other in prompts[:number]), default=0)
    with PromptCache(talker, together.SCHEMA) as manual:
        modules = sum(len(part.tokens) for module in manual.layout.modules.values() for part in module.runs)
    copies = sum(len(prompt) for prompt in {tuple(prompt) for prompt in prompts}) - modules
    # the planner computes half of the layers of what the reader has read
    assert run(schema=False)[0].tokens - run()[0].tokens == plain - modules + copies / 2 > 0


def num_equal(first, second):
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def test_the_planner_computes_half_of_the_layers_of_what_others_read(run):
    def count_shared(decodes):
        shared = ancestors(parent for plan in by("planner", decodes) for parent in plan.parents[1:])
        return sum({(tuple(message.tokens), message.position): message.length for message in shared}.values())

    complete, num_shared = run(inspect=count_shared)
    assert run(layers=False)[0].tokens - complete.tokens == num_shared / 2 > 0


def test_the_step_graph_recomputes_less_and_never_changes_a_text(run):
    roomy, graph, lru = run()[0], run(TIGHT)[0], run(TIGHT, graph=False)[0]
    assert roomy.texts == graph.texts == lru.texts
    assert roomy.tokens < graph.tokens < lru.tokens


def test_a_full_repair_is_prefix_mode_and_a_fifth_computes_a_fifth(run):
    def explain(decodes):
        return [verdict.explain(measure=True) for verdict in by("diver", decodes)[:2]]

    def count_repaired(decodes):
        return sum(message.usage.repaired_tokens for _, message in decodes)

    fifth, full = run(inspect=explain)[1], run(inspect=explain, repair=1.0)[1]
    assert all(explanation.kl < 1e-6 for explanation in full) and max(e.kl for e in fifth) > 1e-4
    parents = [parent for explanation in fifth for parent in explanation.parents[1:]]
    assert all(0.2 * p.num_tokens - 1 <= p.repaired <= 0.2 * p.num_tokens + 1 for p in parents)
    fifth, full = run(inspect=count_repaired), run(inspect=count_repaired, repair=1.0)
    assert full[0].tokens - fifth[0].tokens == full[1] - fifth[1] > 0


def test_the_notice_depends_on_no_caller(run):
    def inspect(decodes):
        return [
            (plan.labels, notice.labels, {label for message in ancestors(notice.parents) for label in message.labels})
            for plan, notice in zip(by("planner", decodes), by("clerk", decodes), strict=True)
        ]

    assert run(inspect=inspect)[1] == [({"caller"}, set(), set())] * 3
    assert run(inspect=inspect, guard=False)[1] == [({"caller"}, {"caller"}, {"caller"})] * 3


def test_all_parts_together_compute_less_than_prefix_mode(run, together):
    assert run(TIGHT)[0].tokens < run(TIGHT, **together.PREFIX_MODE)[0].tokens


def test_a_server_gives_the_same_texts_at_the_same_cost(run, together, engine_of):
    engine = engine_of(ROOMY)
    with serving(engine) as server:
        result = together.measure(engine, together.on_server(server.url), together.Parts(), max_tokens=4)
    complete = run()[0]
    assert result.texts == complete.texts
    # which equal first tokens are copied depends on which requests share a step
    assert result.tokens == pytest.approx(complete.tokens, abs=8)


def test_a_roomy_cache_moves_nothing_and_a_tight_one_evicts(run):
    roomy, tight = run()[0], run(TIGHT)[0]
    assert (roomy.evicted, roomy.prefetched, roomy.moved, tight.moved) == (0, 0, 0, 0)
    assert tight.evicted > 0 and tight.reused <= roomy.reused


def test_a_host_tier_moves_what_a_small_cache_evicts(together, talker_folder, run):
    engine = together.make_engine(together.Parts(), talker_folder, capacity=TIGHT, host_capacity=ROOMY)
    result = together.measure(engine, together.in_process(engine, together.Parts()), together.Parts(), max_tokens=4)
    assert result.texts == run()[0].texts
    assert result.moved > 0 and result.moved % engine.model_info.kv_bytes_per_token == 0
    assert result.tokens <= run(TIGHT)[0].tokens


@pytest.mark.parametrize("options", [[], ["--server"]])
def test_the_example_prints_a_table(together, engine_of, capsys, monkeypatch, options):
    monkeypatch.setattr(sys, "argv", ["together.py", "--max-tokens", "2", *options])
    monkeypatch.setattr(together, "INCIDENTS", together.INCIDENTS[:1])
    monkeypatch.setattr(together, "make_engine", lambda parts, model, **_: engine_of(TIGHT, parts.graph))
    together.main()
    printed = capsys.readouterr().out
    names = ["A server: the same texts", *list(together.VARIANTS)[::6]] if options else together.VARIANTS
    assert all(name in printed for name in names) and printed.count("\n") == len(names) + 2
