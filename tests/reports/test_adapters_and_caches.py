"""Public reports on adapters, offloading and saved KV: nothing that another model or file made is read."""

import pytest
import torch
from helpers import tiny_models
from peft import LoraConfig, get_peft_model

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.errors import CacheFileError
from choreograph.messages.kv_export import KVSnapshot

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    result = {}
    for seed, name in enumerate("ab"):
        base = tiny_models.build()
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(base, config)
        result[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(str(result[name]))
    return result


def serve(adapters=None, **cache):
    config = EngineConfig(cache=CacheConfig(**{"capacity": 1024, "page_size": 4, "poison_freed_pages": True} | cache))
    return Engine.from_pretrained(tiny_models.build(), config=config, adapters=adapters)


def answer(engine, model, mode="prefix"):
    """Log-probabilities of an answer to the prompt, which stays in the cache."""
    with engine.session(mode=mode, model=model) as session:
        message = session.decode([20], [session.prefill(PROMPT)], sampling=GREEDY)
        return [item.logprob for item in message.logprobs]


@pytest.mark.parametrize("mode", ["prefix", "choreographed"])
@pytest.mark.parametrize("host", [None, 4096])
def test_an_adapter_that_replaces_another_under_its_name_reads_nothing_of_it(folders, mode, host):
    engine = serve({"x": folders["a"]}, host_capacity=host)
    first = answer(engine, "x", mode)
    assert answer(engine, "x", mode) == pytest.approx(first, abs=1e-5)
    engine.remove_adapter("x")
    engine.add_adapter("x", folders["b"])
    replaced = answer(engine, "x", mode)
    assert replaced == pytest.approx(answer(serve({"x": folders["b"]}), "x", mode), abs=1e-5)
    assert replaced != pytest.approx(first, abs=1e-3)
    engine.check()


@pytest.mark.parametrize("mode", ["prefix", "choreographed"])
@pytest.mark.parametrize("capacity", [1024, 40])  # at 40 tokens each answer evicts the others to the host
def test_adapters_share_no_prefix_in_any_tier(folders, mode, capacity):
    engine = serve(folders, capacity=capacity, host_capacity=4096)
    expected = {model: answer(serve(folders), model, mode) for model in ("base", "a", "b")}
    for model in ("a", "base", "b", "a", "b", "base", "base", "a"):
        assert answer(engine, model, mode) == pytest.approx(expected[model], abs=1e-5), model
    engine.check()


def test_a_failed_restore_changes_no_later_answer(tmp_path):
    engine = serve()
    expected = answer(engine, "base")
    with engine.session() as session:
        session.prefill(PROMPT).export_kv().save(tmp_path / "kv.safetensors")
    data = bytearray((tmp_path / "kv.safetensors").read_bytes())
    data[-20] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(data)
    for _ in range(2):
        with pytest.raises(CacheFileError, match=r"damaged\.safetensors is damaged"):
            KVSnapshot.load(tmp_path / "damaged.safetensors")
        assert answer(engine, "base") == pytest.approx(expected, abs=1e-5)
    engine.check()


def test_kv_of_an_earlier_process_gives_the_answer_of_a_cold_one(tmp_path):
    first = serve()
    with first.session() as session:
        session.prefill(PROMPT).export_kv().save(tmp_path / "kv.safetensors")
    again = serve()
    with again.session() as session:
        prompt = session.import_kv(PROMPT, KVSnapshot.load(tmp_path / "kv.safetensors"))
        message = session.decode([20], [prompt], sampling=GREEDY)
        restored = [item.logprob for item in message.logprobs]
    assert restored == pytest.approx(answer(serve(), "base", "choreographed"), abs=1e-5)


@pytest.mark.parametrize("heads", [2, 4])
def test_two_heads_are_not_taken_for_keys_and_values(tmp_path, heads):
    """A layout of [tokens, 2, ...] may be two heads, or keys and values: the file says which, and is checked."""
    torch.manual_seed(0)
    layers = [(torch.randn(12, heads, 16), torch.randn(12, heads, 16)) for _ in range(2)]
    snapshot = KVSnapshot(0, layers, "m", "c")
    snapshot.save(tmp_path / "kv.safetensors")
    loaded = KVSnapshot.load(tmp_path / "kv.safetensors")
    for (keys, values), (their_keys, their_values) in zip(layers, loaded.layers, strict=True):
        assert torch.equal(keys, their_keys) and torch.equal(values, their_values)
