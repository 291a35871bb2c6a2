"""What is wanted of reused encodings is what plain prompts give, and learning it brings them nearer."""

from collections import defaultdict

import pytest
import torch
from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import graphs
from helpers.trace_builders import run_graph
from hypothesis import given, settings
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from choreograph import Engine
from choreograph.errors import ConfigError
from choreograph.lab.replay.packed_forward import forward, forward_no_grad, pack
from choreograph.lab.replay.traced_calls import TracedCall, TraceSlice, iter_decodes, split_adapter_stages, trace_calls
from choreograph.lab.training import TrainConfig, TrainingExample, train
from choreograph.lab.training.losses import kv_loss, mean_baseline_kv


@pytest.fixture(scope="module")
def engine():
    return tiny_models.engine()


def turned(model, keys, shift):
    """Keys (G, D) turned by a distance, as transformers itself turns them."""
    cos, sin = model.model.rotary_emb(keys, torch.tensor([[shift]]))
    return apply_rotary_pos_emb(keys[None, :, None], keys[None, :, None], cos, sin)[1][0, :, 0]


def by_hand(model, calls):
    """Of every row that is seen, layer by layer, the mean of its keys and values over the decodes that see it."""
    firsts = [0]
    for call in calls:
        firsts.append(firsts[-1] + len(call.tokens))
    result = defaultdict(list)
    for _, call in iter_decodes(calls):
        kv_slices = [(s.call, k) for s in call.parents for k in range(s.first, s.last)]
        if not kv_slices:
            continue
        cache = DynamicCache()
        model(torch.tensor([[calls[c].tokens[k] for c, k in kv_slices]]), past_key_values=cache)
        for place, (c, k) in enumerate(kv_slices):
            layers = [
                (turned(model, layer.keys[0, :, place], calls[c].start + k - place), layer.values[0, :, place])
                for layer in cache.layers
            ]
            result[firsts[c] + k].append(layers)
    return {
        row: [tuple(torch.stack(x).mean(0) for x in zip(*layer, strict=True)) for layer in zip(*seen, strict=True)]
        for row, seen in result.items()
    }


@given(nodes=graphs(5))
@settings(max_examples=many(30), deadline=None)
def test_the_kv_loss_is_the_mean_over_plain_prompts(engine, nodes):
    adapter = inspect(engine).hf_model
    with engine.session() as session:
        calls = trace_calls(run_graph(session, nodes))
    with adapter.attention_hook():
        result = mean_baseline_kv(adapter, calls)
    with torch.no_grad():
        expected = by_hand(tiny_models.model(), calls)
    assert result.rows.tolist() == sorted(expected)
    for at, row in enumerate(result.rows.tolist()):
        for some, others in zip(result.layers, expected[row], strict=True):
            for one, other in zip(some, others, strict=True):
                torch.testing.assert_close(one[:, at], other, atol=1e-4, rtol=1e-4)


def how_far(adapter, lesson, model="base"):
    kept, packed = {}, lesson.packed
    forward_no_grad(adapter, packed, model, kept)
    with adapter.attention_hook():
        return float(kv_loss(kept, mean_baseline_kv(adapter, lesson.calls, packed.num_prefix_tokens)))


def test_a_plain_chain_is_what_is_wanted_of_it(engine):
    a = TracedCall("", [1, 2, 3], 0)
    b = TracedCall("", [4], 3, (TraceSlice(0, 0, 3, 0),), [5, 6])
    c = TracedCall("", [7], 6, (TraceSlice(0, 0, 3, 0), TraceSlice(1, 0, 3, 3)), [8])
    assert how_far(inspect(engine).hf_model, TrainingExample("", (a, b, c))) < 1e-10
    assert (
        how_far(inspect(engine).hf_model, TrainingExample("nothing is seen", (TracedCall("", [1], 0, (), [2]),))) == 0
    )


def lesson(number, reading=False):
    """A text, a thought about another one, said again at another place, and an answer that sees all three."""
    text = TracedCall("text", [number % 7 + 1, 2, 3], 0)
    other = TracedCall("text", [number % 5 + 10, 12], 0)
    thought = TracedCall("thought", [15], 2, (TraceSlice(1, 0, 2, 0),), [number % 5 + 50, 51])
    said = (TraceSlice(0, 0, 3, 0), TraceSlice(1, 0, 2, 3), TraceSlice(2, 0, 3, 5))
    calls = [text, other, thought, TracedCall("answer", [20], 8, said, [number % 7 + 30, 41])]
    return TrainingExample(
        str(number), tuple(split_adapter_stages(calls, ["thought", "answer"]) if reading else calls), reading
    )


@pytest.mark.parametrize("reading", [False, True])
def test_learning_it_brings_encodings_nearer(tmp_path, reading):
    adapter = inspect(Engine.from_pretrained(tiny_models.build())).hf_model
    learn, check = ([lesson(n, reading) for n in numbers] for numbers in (range(12), range(12, 16)))
    before = [how_far(adapter, one) for one in check]
    config = TrainConfig(
        lora_rank=8, lora_alpha=16, learning_rate=5e-3, batch_size=2, dropout=0.0, epochs=1, kv_loss_weight=1e4
    )
    train(adapter, learn * 8, check, tmp_path, config)
    assert [how_far(adapter, one) for one in check] == before, "the model is as it was"
    engine = Engine(adapter, adapters={"FT": tmp_path})
    after = [how_far(inspect(engine).hf_model, one, "FT") for one in check]
    assert sum(after) < 0.7 * sum(before)


def test_gradients_are_the_same_where_layers_are_computed_again():
    result = []
    for again in (False, True):
        torch.manual_seed(0)
        adapter = inspect(Engine.from_pretrained(tiny_models.build())).hf_model
        model = get_peft_model(
            adapter.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        if again:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        kept, one = {}, lesson(1)
        adapter.training_model = model
        with adapter.attention_hook():
            forward(adapter, pack(one.calls), model=model, kv_out=kept)
            kv_loss(kept, mean_baseline_kv(adapter, one.calls)).backward()
        result.append([p.grad for p in model.parameters() if p.requires_grad and p.grad is not None])
    assert result[0]
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(one, other)


def test_weights_below_zero_are_refused():
    with pytest.raises(ConfigError, match="kv_loss_weight=-1"):
        TrainConfig(kv_loss_weight=-1)
