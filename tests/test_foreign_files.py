"""Files that others have written: refused by an error that names the file and the fix, before anything costly is done."""

import json
import struct

import pytest
from helpers import char_tokenizer, tiny_models
from peft import LoraConfig, get_peft_model

from choreograph import Engine
from choreograph.agents import StepGraph
from choreograph.cli import common
from choreograph.cli.serve_command import _option_names, _read_config
from choreograph.errors import ConfigError, DataError, GraphError, ModelError, PMLError
from choreograph.features.budget import Budget
from choreograph.lab.evaluation.calibration import load_examples
from choreograph.lab.evaluation.explain_run import load_run
from choreograph.lab.evaluation.traces import load_traces
from choreograph.models.loader import load
from choreograph.prompt_cache.parser import load_schema
from choreograph.server.server_config import read_api_keys
from choreograph.utils import parse_yaml

DEEP = "[" * 100_000 + "]" * 100_000
LAUGHS = "x: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "tiny"
    tiny_models.build().save_pretrained(folder)
    char_tokenizer.tokenizer().save_pretrained(folder)
    return folder


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 1 << 20}, "1048576 layers, its weights have 2"),
        ({"vocab_size": 1 << 30}, "weights of .* bytes, its files have"),
        ({"intermediate_size": 1 << 24}, "weights of .* bytes, its files have"),
        ({"num_attention_heads": 32, "head_dim": 1 << 20}, "weights of .* bytes, its files have"),
    ],
)
def test_a_configuration_of_a_larger_model_is_refused_before_memory_is_allocated(model_folder, fields, reason):
    change(model_folder / "config.json", **fields)
    with pytest.raises(ModelError, match=rf"'tiny': its configuration .*{reason}.*get all files of one version"):
        load(model_folder)


def test_an_index_that_names_weights_outside_of_the_folder_is_refused(model_folder):
    (model_folder / "model.safetensors").rename(model_folder.parent / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tiny_models.build().state_dict(), "../model.safetensors")}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names '\.\./model\.safetensors', outside of its folder"):
        load(model_folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha_pattern", "x"),
        ("alpha_pattern", {"(": 1}),
        ("alpha_pattern", {"q_proj": "many"}),
        ("lora_alpha", None),
        ("lora_alpha", [4]),
        ("lora_alpha", float("inf")),
    ],
)
def test_a_scale_of_an_adapter_that_is_no_number_is_refused(tmp_path, field, value):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(tiny_models.build(), config).save_pretrained(str(tmp_path / "adapter"))
    change(tmp_path / "adapter" / "adapter_config.json", **{field: value})
    with pytest.raises(ModelError, match=f"adapter 'a' of .*{field}|adapter 'a' of .*lora_alpha"):
        Engine.from_pretrained(tiny_models.build()).add_adapter("a", tmp_path / "adapter")


def test_an_error_of_a_library_names_the_model_and_the_fix(model_folder):
    (model_folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40))
    with pytest.raises(
        ModelError, match=r"'tiny' cannot be loaded: .*; get all files of one version of the model again"
    ):
        load(model_folder)


def test_a_length_that_is_no_number_is_refused_with_the_tokenizer(model_folder):
    change(model_folder / "tokenizer_config.json", model_max_length="long")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json has model_max_length='long': use a number"):
        load(model_folder)


def test_yaml_whose_aliases_expand_without_end_is_refused(tmp_path):
    with pytest.raises(ValueError, match="100,000 values"):
        parse_yaml(LAUGHS, "agents")
    (tmp_path / "team.yaml").write_text(LAUGHS)
    with pytest.raises(GraphError, match=r"team\.yaml: not YAML: .*use fewer"):
        StepGraph.read(tmp_path / "team.yaml")
    assert parse_yaml("a: &x [1, 2]\nb: *x\nc: {<<: &y {d: 1}, e: *x}", "agents")["c"] == {"d": 1, "e": [1, 2]}


@pytest.mark.parametrize(
    "value", ["!!int ''", "2001-99-99", "0x" + "f" * 5000, "9" * 5000, DEEP, "!!python/name:os.system", "*gone"]
)
def test_values_that_yaml_cannot_have_are_refused(tmp_path, value):
    for name in ("team.yaml", "serve.yaml"):
        (tmp_path / name).write_text(f"port: {value}\n")
    with pytest.raises(GraphError, match=r"team\.yaml: "):
        StepGraph.read(tmp_path / "team.yaml")
    with pytest.raises(ConfigError, match=r"serve\.yaml: "):
        _read_config(tmp_path / "serve.yaml", _option_names())


def read_options(tmp_path, text):
    (tmp_path / "serve.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return _read_config(tmp_path / "serve.yaml", _option_names())


@pytest.mark.parametrize(
    "text", ["port: many", "port: 70000", "host: [1]", "adapter: {a: b}", "layer-reuse: [1]", "api_key: 5"]
)
def test_an_option_of_another_type_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"serve\.yaml: \w+="):
        read_options(tmp_path, text)


def test_one_text_is_a_list_of_one(tmp_path):
    """A key is no list of characters, each of which would be a key."""
    assert read_options(tmp_path, "api_key: sk-abc\nadapter: a=folder\ncapacity: 1000") == {
        "api_key": ["sk-abc"],
        "adapter": ["a=folder"],
        "capacity": 1000,
    }


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"serve\.yaml: is not YAML: .*utf-8"):
        read_options(tmp_path, b"port: \xff")
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        _read_config(tmp_path / "none.yaml", set())
    with pytest.raises(ConfigError, match=r"none\.txt: cannot be read"):
        read_api_keys(tmp_path / "none.txt")
    (tmp_path / "keys.txt").write_bytes(b"sk-\xff")
    with pytest.raises(ConfigError, match=r"keys\.txt: is not UTF-8"):
        read_api_keys(tmp_path / "keys.txt")
    with pytest.raises(DataError, match=r"none\.json: cannot be read"):
        Budget(0.1).load(tmp_path / "none.json")


def test_records_that_are_nested_deep_are_refused(tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "traces.jsonl").write_text(f"{DEEP}\n")
    with pytest.raises(DataError, match="damaged trace"):
        load_traces(tmp_path)
    with pytest.raises(DataError, match="not JSON Lines"):
        load_examples(tmp_path / "traces.jsonl")
    (tmp_path / "budget.json").write_text(DEEP)
    with pytest.raises(DataError, match="not a saved budget"):
        Budget(0.1).load(tmp_path / "budget.json")
    (tmp_path / "traces.jsonl").unlink()
    (tmp_path / "settings.json").write_text(DEEP)
    with pytest.raises(DataError, match=r"settings\.json: damaged"):
        load_run(tmp_path)
    assert common.parse_options([f"depth={DEEP}", "digits=" + "9" * 5000]) == {"depth": DEEP, "digits": "9" * 5000}


@pytest.mark.parametrize("conditions", [[1], [None], [["a"]], "baseline", 7])
def test_conditions_of_a_run_are_names(tmp_path, conditions):
    (tmp_path / "settings.json").write_text(json.dumps({"conditions": conditions}))
    with pytest.raises(DataError, match="does not name them"):
        load_run(tmp_path)


def test_an_inconsistent_schema_is_named_by_its_file(tmp_path):
    (tmp_path / "trip.pml").write_text(
        '<schema name="s"><module name="a">x</module><module name="a">y</module></schema>'
    )
    with pytest.raises(PMLError, match=r"^trip\.pml: .*'a' is declared twice"):
        load_schema(tmp_path / "trip.pml")


def test_aliases_inside_of_their_own_anchor_hide_no_size():
    inside = "a: &a [*a, " + "1, " * 999 + "1]\n"
    repeated = "b: [" + "*a, " * 100 + "*a]\n"
    assert len(parse_yaml(inside, "serve")["a"]) == 1001
    with pytest.raises(ValueError, match="with those of aliases"):
        parse_yaml(inside + repeated, "serve")
