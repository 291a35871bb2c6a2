"""What is wanted of reused encodings is what plain prompts give, and learning it brings them nearer."""

from collections import defaultdict

import pytest
import tiny
import torch
from graphs import graphs
from hypothesis import given, settings
from many import many
from peft import LoraConfig, get_peft_model
from rehearsed import perform
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from choreograph import Engine
from choreograph.distill import Lesson, TrainConfig, train
from choreograph.distill.encodings import apart, wanted_of
from choreograph.errors import ConfigError
from choreograph.onepass.calls import Seen, TracedCall, calls_of, decodes_of, for_readers
from choreograph.onepass.packed import logits_of, pack, read_logits


@pytest.fixture(scope="module")
def engine():
    return tiny.engine()


def turned(model, keys, shift):
    """Keys (G, D) turned by a distance, as transformers itself turns them."""
    cos, sin = model.model.rotary_emb(keys, torch.tensor([[shift]]))
    return apply_rotary_pos_emb(keys[None, :, None], keys[None, :, None], cos, sin)[1][0, :, 0]


def by_hand(model, calls):
    """Of every row that is seen, layer by layer, the mean of its keys and values over the decodes that see it."""
    firsts = [0]
    for call in calls:
        firsts.append(firsts[-1] + len(call.tokens))
    found = defaultdict(list)
    for _, call in decodes_of(calls):
        sights = [(s.call, k) for s in call.parents for k in range(s.first, s.last)]
        if not sights:
            continue
        cache = DynamicCache()
        model(torch.tensor([[calls[c].tokens[k] for c, k in sights]]), past_key_values=cache)
        for place, (c, k) in enumerate(sights):
            layers = [
                (turned(model, layer.keys[0, :, place], calls[c].start + k - place), layer.values[0, :, place])
                for layer in cache.layers
            ]
            found[firsts[c] + k].append(layers)
    return {
        row: [tuple(torch.stack(x).mean(0) for x in zip(*layer, strict=True)) for layer in zip(*seen, strict=True)]
        for row, seen in found.items()
    }


@given(nodes=graphs(5))
@settings(max_examples=many(30), deadline=None)
def test_it_is_the_mean_over_plain_prompts(engine, nodes):
    adapter = engine.runner.adapter
    with engine.session() as session:
        calls = calls_of(perform(session, nodes))
    with adapter.hooked():
        found = wanted_of(adapter, calls)
    with torch.no_grad():
        wanted = by_hand(tiny.model(), calls)
    assert found.rows.tolist() == sorted(wanted)
    for at, row in enumerate(found.rows.tolist()):
        for some, others in zip(found.layers, wanted[row], strict=True):
            for one, other in zip(some, others, strict=True):
                torch.testing.assert_close(one[:, at], other, atol=1e-4, rtol=1e-4)


def how_far(adapter, lesson, model="base"):
    kept, packed = {}, lesson.packed
    read_logits(adapter, packed, model, kept)
    with adapter.hooked():
        return float(apart(kept, wanted_of(adapter, lesson.calls, packed.behind)))


def test_a_plain_chain_is_what_is_wanted_of_it(engine):
    a = TracedCall("", [1, 2, 3], 0)
    b = TracedCall("", [4], 3, (Seen(0, 0, 3, 0),), [5, 6])
    c = TracedCall("", [7], 6, (Seen(0, 0, 3, 0), Seen(1, 0, 3, 3)), [8])
    assert how_far(engine.runner.adapter, Lesson("", (a, b, c))) < 1e-10
    assert how_far(engine.runner.adapter, Lesson("nothing is seen", (TracedCall("", [1], 0, (), [2]),))) == 0


def lesson(number, reading=False):
    """A text, a thought about another one, said again at another place, and an answer that sees all three."""
    text = TracedCall("text", [number % 7 + 1, 2, 3], 0)
    other = TracedCall("text", [number % 5 + 10, 12], 0)
    thought = TracedCall("thought", [15], 2, (Seen(1, 0, 2, 0),), [number % 5 + 50, 51])
    said = (Seen(0, 0, 3, 0), Seen(1, 0, 2, 3), Seen(2, 0, 3, 5))
    calls = [text, other, thought, TracedCall("answer", [20], 8, said, [number % 7 + 30, 41])]
    return Lesson(str(number), tuple(for_readers(calls, ["thought", "answer"]) if reading else calls), reading)


@pytest.mark.parametrize("reading", [False, True])
def test_learning_it_brings_encodings_nearer(tmp_path, reading):
    adapter = Engine.from_pretrained(tiny.build()).runner.adapter
    learn, check = ([lesson(n, reading) for n in numbers] for numbers in (range(12), range(12, 16)))
    before = [how_far(adapter, one) for one in check]
    config = TrainConfig(rank=8, alpha=16, rate=5e-3, lessons=2, dropout=0.0, epochs=1, encodings=1e4)
    train(adapter, learn * 8, check, tmp_path, config)
    assert [how_far(adapter, one) for one in check] == before, "the model is as it was"
    engine = Engine(adapter, adapters={"FT": tmp_path})
    after = [how_far(engine.runner.adapter, one, "FT") for one in check]
    assert sum(after) < 0.7 * sum(before)


def test_gradients_are_the_same_where_layers_are_computed_again():
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        adapter = Engine.from_pretrained(tiny.build()).runner.adapter
        model = get_peft_model(
            adapter.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        if again:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        kept, one = {}, lesson(1)
        adapter.in_training = model
        with adapter.hooked():
            logits_of(adapter, pack(one.calls), through=model, kept=kept)
            apart(kept, wanted_of(adapter, one.calls)).backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad and p.grad is not None])
    assert found[0]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_weights_below_zero_are_refused():
    with pytest.raises(ConfigError, match="encodings=-1"):
        TrainConfig(encodings=-1)
