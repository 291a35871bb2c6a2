"""Reuse never changes what other requests get: plain ones, other tenants', readers of replaced entries."""

import itertools

import numpy as np
import pytest
from offline_engine import OfflineEngine, Request, is_refused, logprobs_of, missing_of, tokens_of
from reuse_graphs import Call, View, expected_rows, largest_difference, run_graph
from tiny_models import TOKEN_BYTES, random_tokens

TOLERANCE = 2e-4
TEXTS = [random_tokens(seed, length) for seed, length in enumerate((70, 45, 96))]  # blocks have 32 tokens
HEADER = random_tokens(9, 5)
ORDERS = list(itertools.permutations(range(3)))


def prompt_in(order: tuple[int, ...]) -> list[int]:
    return [token for i in order for token in TEXTS[i]] + HEADER


def run_scenario(engine: OfflineEngine, *, reuse: bool) -> list:
    """Encode the texts, read them in all orders if `reuse`, then answer the same prompts plainly."""
    for i, text in enumerate(TEXTS):
        store = [{"entry": f"text-{i}", "start": 0, "stop": len(text)}]
        engine.run(Request(text, {"store": store} if reuse else None))
    for order in ORDERS if reuse else []:
        # Moved by 7, so that no span continues its prompt exactly, which would be a hit of the prefix cache.
        spans, at = [], 0
        for i in order:
            spans.append({"entry": f"text-{i}", "start": 0, "stop": len(TEXTS[i]), "at": at, "position": at + 7})
            at += len(TEXTS[i])
        prompt = prompt_in(order)
        readers = [{"spans": spans}, {"spans": spans, "repair": 0.3}, {"spans": [spans[0], spans[2]]}]
        for output in engine.run(*(Request(prompt, reader, max_tokens=40) for reader in readers)):
            assert output.outputs[0].finish_reason == "length"
    return engine.run(*(Request(prompt_in(order), max_tokens=8) for order in ORDERS))


def differences(outputs: list, others: list) -> list[float]:
    return [float(np.abs(logprobs_of(a) - logprobs_of(b)).max()) for a, b in zip(outputs, others, strict=True)]


def test_plain_requests_equal_those_of_a_fresh_engine_bit_for_bit(start_engine):
    after, fresh = (
        run_scenario(start_engine(fresh=True), reuse=True),
        run_scenario(start_engine(fresh=True), reuse=False),
    )
    without = run_scenario(start_engine(fresh=True, connector=False), reuse=False)
    for others in (fresh, without):
        assert [tokens_of(output) for output in after] == [tokens_of(output) for output in others]
        assert [output.num_cached_tokens for output in after] == [output.num_cached_tokens for output in others]
        assert all(np.array_equal(logprobs_of(a), logprobs_of(b)) for a, b in zip(after, others, strict=True))


def test_without_the_salt_plain_requests_would_read_reused_blocks(start_engine, monkeypatch):
    monkeypatch.setattr("choreograph.vllm.reuse_scheduler._set_salt", lambda request, salt: None)
    after = run_scenario(start_engine(fresh=True), reuse=True)
    monkeypatch.undo()
    assert max(differences(after, run_scenario(start_engine(fresh=True), reuse=False))) > 0.1


def test_equal_prompts_with_other_placements_share_no_blocks(start_engine, tiny_model):
    calls = [Call([], TEXTS[0]), Call([], TEXTS[1])]
    placements = [(None, None), (3, None), (None, 90), (40, -60), (None, None), (3, None)]
    calls += [Call([View(0, 0, 70, a), View(1, 0, 45, b)], HEADER, num_generated=3) for a, b in placements]
    found = run_graph(start_engine(), calls)
    assert largest_difference(found, expected_rows(tiny_model().model, calls)) < TOLERANCE


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": "a"}, {"salt": None}),
        ({"salt": None}, {"salt": "a"}),
        ({"labels": ["secret"]}, {"labels": []}),
        ({"labels": ["secret", "legal"]}, {"labels": ["secret"]}),
        ({"workflow": "w"}, {"workflow": None}),
        ({"workflow": "w"}, {"workflow": "v"}),
        ({"salt": "a", "labels": ["secret"]}, {"salt": "b", "labels": ["secret"]}),
    ],
)
def test_namespaces_share_no_entries(ours, theirs, start_engine, tiny_model):
    engine = start_engine()

    def request(namespace: dict, tokens: list[int], reuse: dict) -> Request:
        fields = {name: value for name, value in namespace.items() if name != "salt" and value}
        return Request(tokens, reuse | fields, salt=namespace.get("salt"))

    text, other, name = random_tokens(20, 50), random_tokens(21, 50), f"shared-{ours}-{theirs}"[:200]
    store = {"store": [{"entry": name, "start": 0, "stop": 50}]}
    spans = {"spans": [{"entry": name, "start": 0, "stop": 50, "at": 0, "position": 9}]}
    engine.run(request(ours, text, store))
    assert missing_of(engine.run(request(theirs, [0], {"query": [name]}))) == [name]
    assert is_refused(engine.run(request(theirs, text + HEADER, spans)))
    engine.run(request(theirs, other, store))
    for namespace, mine in ((ours, text), (theirs, other)):
        assert missing_of(engine.run(request(namespace, [0], {"query": [name]}))) == []
        (output,) = engine.run(request(namespace, mine + HEADER, spans))
        calls = [Call([], mine), Call([View(0, 0, 50, 9)], HEADER)]
        (row,) = logprobs_of(output)
        assert largest_difference([{54: row}], expected_rows(tiny_model().model, calls)[1:]) < TOLERANCE
    engine.run(request(theirs, [0], {"release": [name]}))
    assert missing_of(engine.run(request(theirs, [0], {"query": [name]}))) == [name]
    assert missing_of(engine.run(request(ours, [0], {"query": [name]}))) == []


def test_a_replaced_entry_is_never_read(start_engine, tiny_model):
    """Neither in other content, nor in the context that equal content had before."""
    engine, text, context = start_engine(), random_tokens(30, 64), random_tokens(31, 40)
    read = Request(text + HEADER, {"spans": [{"entry": "again", "start": 0, "stop": 64, "at": 0, "position": 5}]})
    for before in (context, [], context[:10]):
        prompt = before + text
        store = [{"entry": "again", "start": len(before), "stop": len(prompt)}]
        engine.run(Request(prompt, {"store": store}))
        calls = [Call([], before), Call([View(0, 0, len(before))] if before else [], text)]
        calls.append(Call([View(1, 0, 64, 5)], HEADER))
        expected = expected_rows(tiny_model().model, calls)[2:]
        for _ in range(2):  # the second time from vLLM's own blocks
            (row,) = logprobs_of(*engine.run(read))
            assert largest_difference([{68: row}], expected) < TOLERANCE
    engine.run(Request(context, {"store": [{"entry": "again", "start": 0, "stop": 40}]}))
    assert is_refused(engine.run(read))


def test_entries_of_a_small_store_are_evicted_and_reported(start_engine):
    engine = start_engine(fresh=True, connector_options={"store_gib": 200 * TOKEN_BYTES / 2**30})
    for i in range(5):
        engine.run(Request(random_tokens(i, 64), {"store": [{"entry": f"part-{i}", "start": 0, "stop": 64}]}))
    names = [f"part-{i}" for i in range(5)]
    assert missing_of(engine.run(Request([0], {"query": names}))) == names[:2]
    span = {"entry": "part-0", "start": 0, "stop": 64, "at": 0, "position": 3}
    assert is_refused(engine.run(Request(random_tokens(0, 64) + HEADER, {"spans": [span]})))


def test_entries_that_are_needed_last_are_evicted_first(start_engine):
    engine = start_engine(fresh=True, connector_options={"store_gib": 200 * TOKEN_BYTES / 2**30})
    steps = {"soon": 1, "last": 5, "later": 2}
    for i, name in enumerate(steps):
        engine.run(Request(random_tokens(i, 64), {"store": [{"entry": name, "start": 0, "stop": 64}]}))
    engine.run(Request([0], {"steps": steps}))
    for victim in ("last", "later", "soon"):
        store = [{"entry": f"instead-of-{victim}", "start": 0, "stop": 64}]
        engine.run(Request(random_tokens(9, 64), {"store": store, "steps": 0}))
        assert victim in missing_of(engine.run(Request([0], {"query": [*steps]})))
