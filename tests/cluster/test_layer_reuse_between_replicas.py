"""A model that reuses layers of another one's messages: in one server, and of messages from another replica."""

import asyncio
import dataclasses
import random
from collections import Counter
from functools import partial

import pytest

pytest.importorskip("ray")

from helpers import tiny_models
from helpers.inspect_engine import inspect
from helpers.live_server import make_engine
from helpers.replica_pair import evict_all, message, pair, spec_of
from helpers.transfer_failures import BY_LAYER, FAILURES, flip
from transformers import AutoTokenizer

from choreograph.cluster import message_transfer
from choreograph.server.openai.chat_prompt import Segment

PATTERNS = pytest.mark.parametrize("pattern", [(1, 1, 1), (0, 1, 2), (1, 2, 3)], ids=["head", "inside", "both"])


@pytest.fixture(scope="module")
def family(talker_folder, tmp_path_factory):
    """Folders of a base of four layers, and of a model that was trained on: noise on its weights."""
    tokenizer = AutoTokenizer.from_pretrained(talker_folder)
    model = tiny_models.build(vocabulary=len(tokenizer), positions=8192, stop=tokenizer.eos_token_id, layers=4)
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("base", "math")]
    for folder, weights in zip(folders, (model, tiny_models.finetuned(model)), strict=True):
        weights.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


def family_engine(pattern):
    """Return what makes an engine over both models; "math" reuses layers of the base."""
    return lambda folders: make_engine(folders[0], math=folders[1], pattern=pattern)


def by_the_library(folders, pattern, *segments):
    """Return what "math" says about two messages and an answer of the base, and a question, in one session."""
    first, second, question = segments
    engine = family_engine(pattern)(folders)
    with engine.session() as session:
        read = [session.prefill(list(first.tokens))]
        read.append(session.prefill(list(second.tokens), read))
        read.append(session.decode([901, 902], read, temperature=0, max_tokens=6))
        own = {"model": "math", "kv_reuse": "partial" if pattern else "recompute"}
        read.append(session.prefill(list(question.tokens), read, **own))
        tokens = session.decode([901, 902], read, temperature=0, max_tokens=6, **own).tokens[2:]
    engine.close()
    return tokens


def recomputed(service):
    return service.engine.events.counts["recomputed"]


@PATTERNS
async def test_some_layers_are_computed_whichever_replica_has_the_message(family, pattern):
    first, second, question = message(1), message(2), message(3, 20)
    expected = by_the_library(family, pattern, first, second, question)
    assert expected != by_the_library(family, None, first, second, question)
    async with pair(family, make_engine=family_engine(pattern)) as replicas:
        _, text, _ = await replicas.run(replicas.source, spec_of(first, second))
        asked = spec_of(first, second, Segment((7, 8, 9), text), question, model="math")
        for service, source in ((replicas.source, "other_model"), (replicas.reader, "remote")):
            tokens, _, counts = await replicas.run(service, asked)
            assert tokens == expected
            assert (getattr(counts, source), counts.computed, recomputed(service)) == (104, 22, 0)
            tokens, _, counts = await replicas.run(service, asked)
            assert (tokens, counts.message + counts.remote, counts.computed) == (expected, 124, 2)
        # the base finds what was received for the other model
        _, _, counts = await replicas.run(replicas.reader, spec_of(second, first))
        assert (counts.remote, counts.computed) == (96, 2)


async def test_an_answer_is_reused_at_once_and_in_any_order(family):
    async with pair(family, make_engine=family_engine((1, 2, 3))) as replicas:
        first, second = message(1), message(2)
        for expected in ((104, 0), (0, 104)):
            _, text, _ = await replicas.run(replicas.source, spec_of(first, second))
            answer = Segment((7, 8, 9), text)
            _, _, counts = await replicas.run(replicas.source, spec_of(answer, second, first, model="math"))
            assert (counts.other_model, counts.message, counts.computed) == (*expected, 2)


@pytest.mark.parametrize(
    "options",
    [{"repair": 0.5}, {"max_kl": 0.1}, {"client": "others"}, {"workflow": "w"}, {"labels": frozenset({"private"})}],
    ids=lambda options: next(iter(options)),
)
async def test_what_needs_one_model_or_may_not_be_read_is_computed(family, options):
    async with pair(family, make_engine=family_engine((1, 2, 3))) as replicas:
        await replicas.run(replicas.source, spec_of(message(1)))
        fields = {name: value for name, value in options.items() if name in ("repair", "max_kl")}
        key = {name: value for name, value in options.items() if name not in fields}
        spec = dataclasses.replace(spec_of(message(1), model="math", **key), **fields)
        for service in (replicas.source, replicas.reader):
            _, _, counts = await replicas.run(service, spec)
            assert counts.other_model == 0 and (fields or counts.remote == 0)
        if fields:
            assert {query.key.model for query in replicas.queries} == {"math"}


async def test_an_expected_request_loads_layers_of_both_models(family):
    def with_host(folders):
        return make_engine(folders[0], math=folders[1], pattern=(1, 2, 3), host_capacity=4096)

    async with pair(family, make_engine=with_host) as replicas:
        service, asked = replicas.source, spec_of(message(1), model="math")
        await replicas.run(service, spec_of(message(1)))
        stored = service.planner.store.find(spec_of().key, (message(1).tokens, 0))
        for _ in range(2):  # then it has a message of its own, too
            await service.thread.call(partial(evict_all, service))
            while stored.message.kv_location != "host":
                await service.thread.call(inspect(service.engine).cache_manager.poll_transfers)
            await service.thread.call(partial(message_transfer.load_stored, service, asked))
            assert stored.message.kv_location in ("loading", "device")
            _, _, counts = await replicas.run(service, asked)
            assert counts.other_model + counts.message == 48


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"repair": 0.5}, {"max_kl": 0.1}], ids=lambda options: next(iter(options)))
async def test_what_has_layers_of_two_models_is_not_repaired(family, options):
    async with pair(family, make_engine=family_engine((1, 2, 3))) as replicas:
        await replicas.run(replicas.source, spec_of(message(1)))
        plain = spec_of(message(1), model="math")
        repaired = dataclasses.replace(plain, **options)
        expected, _, _ = await replicas.run(
            replicas.source, dataclasses.replace(repaired, key=plain.key._replace(workflow="w"))
        )
        for service in (replicas.source, replicas.reader):
            _, _, counts = await replicas.run(service, plain)
            assert counts.other_model + counts.remote == 48
            tokens, _, counts = await replicas.run(service, repaired)
            assert tokens == expected and counts.other_model == 0
            assert counts.remote == 48 * (service is replicas.reader)  # the whole message of the source
            stored = service.planner.store.find(plain.key, (message(1).tokens, 0))
            assert not stored.is_partial
            _, _, counts = await replicas.run(service, plain)  # what was computed as a whole replaces it
            assert counts.prefix + counts.remote == 48


async def test_a_message_is_used_as_long_as_the_one_that_has_its_other_layers(family):
    async with pair(family, make_engine=family_engine((1, 2, 3))) as replicas:
        store = replicas.source.planner.store
        for asked in (spec_of(message(1)), spec_of(message(2)), spec_of(message(1), model="math")):
            await replicas.run(replicas.source, asked)
        for _ in range(2):
            stored = [(key.model, tuple(stored.tokens)) for stored, key in store.messages.items()]
            base, other, own = (
                stored.index(place)
                for place in (("base", message(1).tokens), ("base", message(2).tokens), ("math", message(1).tokens))
            )
            assert other < base < own
            for asked in (spec_of(message(2)), spec_of(message(1), model="math")):
                await replicas.run(replicas.source, asked)


async def test_what_was_computed_over_a_message_that_never_arrived_is_not_computed_again(family):
    async with pair(family, group_bytes=1, make_engine=family_engine((1, 1, 1))) as replicas:
        missing, here, store = message(1), message(2), replicas.reader.planner.store
        asked = spec_of(missing, here, model="math")
        computed = []  # over the first layer of what is missing

        async def gone_once_it_is_used(groups):
            yield await anext(groups)
            for _ in (1, 2):  # of layers 1 and 2, not of layer 3
                yield await anext(groups)
            while not computed:
                stored = store.find(asked.key, (here.tokens, 0))
                computed.extend([stored] if stored is not None and inspect(stored.message).is_finished else [])
                await asyncio.sleep(0.01)
            raise ConnectionError("the replica is gone")

        await replicas.run(replicas.source, spec_of(missing))
        await replicas.run(replicas.reader, spec_of(here))
        replicas.change = gone_once_it_is_used
        _, _, counts = await replicas.run(replicas.reader, asked)
        assert (counts.remote, counts.message, counts.computed) == (0, 48, 50)
        (stored,) = computed
        assert stored.is_partial and stored.may_lose_context and stored.is_usable
        await replicas.reader.thread.call(partial(evict_all, replicas.reader))
        assert not stored.is_usable
        tokens, _, counts = await replicas.run(replicas.reader, asked)
        assert (counts.other_model, counts.prefix, counts.computed) == (48, 48, 2)
        await replicas.run(replicas.reader, spec_of(here, workflow="new"))
        new = spec_of(missing, here, workflow="new", model="math")
        assert tokens == (await replicas.run(replicas.reader, new))[0]


async def test_without_a_pair_or_cached_inputs_all_layers_are_computed(family):
    async with pair(family, make_engine=family_engine(None)) as replicas:
        await replicas.run(replicas.source, spec_of(message(1)))
        asked = spec_of(message(1), model="math")
        expected, _, counts = await replicas.run(replicas.source, asked)
        assert (counts.other_model, counts.computed) == (0, 50)
        # what was computed before has no cached inputs
        for service in (replicas.source, replicas.reader):
            enable = partial(service.engine.enable_layer_reuse, "math", "base", pattern=(1, 2, 3))
            await service.thread.call(enable)
        asked = spec_of(message(1), workflow="late", model="math")
        await replicas.source.thread.call(lambda: replicas.source.planner.store.clear())
        tokens, _, counts = await replicas.run(replicas.reader, asked)
        assert (tokens, counts.computed) == (expected, 50)


def with_inputs(change):
    async def changed(groups):
        async for group in groups:
            blocks = [
                block._replace(tensors=(change(block.tensors[0]),)) if len(block.tensors) == 1 else block
                for block in group.blocks
            ]
            yield group._replace(blocks=blocks)

    return changed


@pytest.mark.slow
@BY_LAYER
async def test_failed_transfers_end_in_computing_all_layers(family, monkeypatch, group_bytes):
    monkeypatch.setattr(message_transfer, "TIMEOUT", 0.5)
    failures = FAILURES | {"corrupted inputs": with_inputs(flip), "truncated inputs": with_inputs(lambda a: a[:-1])}
    async with pair(family, group_bytes=group_bytes, make_engine=family_engine((1, 2, 3))) as replicas:
        for number, (name, change) in enumerate(failures.items()):
            first, second = message(90), message(number)
            await replicas.run(replicas.source, spec_of(second, workflow=name))
            replicas.change = change
            asked = spec_of(first, second, workflow=name, model="math")
            tokens, _, counts = await replicas.run(replicas.reader, asked)
            assert counts.remote == counts.other_model == 0, name
            replicas.change = lambda groups: groups
            again, _, counts = await replicas.run(replicas.reader, asked)  # what was computed here counts as that
            assert again == tokens and (counts.remote, counts.computed) == (0, 2), name
            alone = spec_of(first, second, workflow="alone", model="math")
            assert (await replicas.run(replicas.source, alone))[0] == tokens, name


async def test_random_requests_of_both_models_on_both_replicas(family):
    rng, failures = random.Random(3), [change for name, change in FAILURES.items() if name != "slow"]
    async with pair(family, group_bytes=1, make_engine=family_engine((1, 2, 3))) as replicas:
        total = Counter[str]()
        for _ in range(50):
            chosen = [message(number, 16 + 4 * number) for number in rng.sample(range(24), rng.randint(2, 4))]
            spec = spec_of(*chosen, model=rng.choice(["base", "math"]))
            replicas.change = rng.choice(failures) if rng.random() < 0.2 else lambda groups: groups
            service = rng.choice([replicas.source, replicas.reader])
            tokens, _, counts = await replicas.run(service, spec)
            total += Counter(dataclasses.asdict(counts))
            assert len(tokens) == 6 and counts.cached + counts.computed == len(spec.prompts[0].tokens)
            await service.thread.call(service.engine.check)
        assert min(total[name] for name in ("other_model", "remote", "message", "computed")) > 0
