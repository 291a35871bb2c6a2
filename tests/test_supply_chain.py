"""No file of others runs code: the package unpickles and evaluates nothing, and hostile files of each kind do nothing."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import char_tokenizer, tiny_models
from peft import LoraConfig, get_peft_model

from choreograph import Engine
from choreograph.agents import StepGraph
from choreograph.errors import ChoreographError
from choreograph.lab.evaluation.datasets import load as load_examples
from choreograph.layer_reuse.profile import Profile
from choreograph.messages.kv_export import KVSnapshot
from choreograph.models.loader import load, load_tokenizer
from choreograph.models.template_sandbox import ChatRejectedError, TemplateLimitError, render_template

ROOT = Path(__file__).parents[1]
UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "joblib", "cPickle", "_pickle"}
RUNNERS = {"eval", "exec", "compile", "__import__"}
REVIEWED = {("choreograph/utils.py", "yaml.load")}  # with a subclass of yaml.SafeLoader


def findings(tree):
    """Yield what unpickles, evaluates, or lets a library do so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in names if name.partition(".")[0] in UNPICKLERS)
        if not isinstance(node, ast.Call):
            continue
        called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called in RUNNERS or called in ("os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            yield called
        if called.endswith("torch.load") and options.get("weights_only") != "True":
            yield called
        if called in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
            yield called
        for name, value in (("trust_remote_code", "True"), ("weights_only", "False"), ("shell", "True")):
            if options.get(name) == value:
                yield f"{called}({name}={value})"


def test_the_package_unpickles_and_evaluates_nothing():
    found = {
        (str(file.relative_to(ROOT)), finding)
        for file in (ROOT / "choreograph").rglob("*.py")
        for finding in findings(ast.parse(file.read_text()))
    }
    assert found == REVIEWED


def test_the_search_finds_what_it_should():
    code = "import pickle\nx = eval('1')\ntorch.load(f)\nnp.load(f, allow_pickle=True)\nf(trust_remote_code=True)"
    assert len(list(findings(ast.parse(code)))) == 5


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


@pytest.fixture
def canary(tmp_path):
    """A file that hostile files try to create."""
    place = tmp_path / "ran"
    pickle.loads(pickle.dumps(Payload(place)))
    assert place.exists(), "the payload works"
    place.unlink()
    yield place
    assert not place.exists(), "a file has run code"


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    tiny_models.build().save_pretrained(folder)
    char_tokenizer.tokenizer().save_pretrained(folder)
    return folder


def forge(kind, canary):
    """Bytes of a file that runs code in a reader of pickles."""
    if kind == "pickle":
        return pickle.dumps(Payload(canary))
    place = canary.with_name("forged")
    if kind == "torch":
        torch.save({"weight": Payload(canary)}, place)
    else:
        with place.open("wb") as file:
            np.savez(file, weight=np.array([Payload(canary)], dtype=object))
    data = place.read_bytes()
    place.unlink()
    return data


@pytest.mark.parametrize("kind", ["pickle", "torch", "npz"])
def test_pickles_under_the_names_of_other_files_are_refused(tmp_path, canary, model_folder, monkeypatch, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = forge(kind, canary)
    for name, read in (
        ("a.gguf", load),
        ("kv.safetensors", KVSnapshot.load),
        ("examples.jsonl", lambda file: load_examples(str(file))),
        ("graph.yaml", StepGraph.read),
        ("graph.json", StepGraph.read),
        ("profile.json", Profile.load),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ChoreographError, match=Path(name).stem):
            read(tmp_path / name)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        whole = (model_folder / name).read_bytes()
        (model_folder / name).write_bytes(data)
        with pytest.raises(ChoreographError, match="'model'"):
            load(model_folder)
        (model_folder / name).write_bytes(whole)
    load(model_folder)


def test_weights_in_pickles_are_not_looked_at(tmp_path, canary, model_folder):
    (model_folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.bin", "pytorch_model.pt", "training_args.bin"):
        (model_folder / name).write_bytes(forge("torch", canary))
    with pytest.raises(ChoreographError, match="'model'"):
        load(model_folder)


def test_adapters_in_pickles_are_not_looked_at(tmp_path, canary):
    folder = tmp_path / "adapter"
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(tiny_models.build(), config).save_pretrained(str(folder))
    engine = Engine.from_pretrained(tiny_models.build())
    (folder / "adapter_model.bin").write_bytes(forge("torch", canary))
    engine.add_adapter("good", folder)
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(forge("torch", canary))
    with pytest.raises(ChoreographError, match="cannot be loaded"):
        engine.add_adapter("forged", folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ChoreographError, match=r"holds no adapter_model\.safetensors"):
        engine.add_adapter("pickled", folder)
    assert whole


def test_code_beside_a_model_is_not_imported(canary, model_folder):
    (model_folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(canary)!r}).touch()\n")
    for name, field, value in (
        ("config.json", "auto_map", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
        ("tokenizer_config.json", "auto_map", {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}),
        ("generation_config.json", "custom_generate", "evil"),
    ):
        file = model_folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    Engine.from_pretrained(model_folder, dtype="float32")
    load_tokenizer(model_folder)
    config = json.loads((model_folder / "config.json").read_text()) | {"model_type": "evil"}
    (model_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ChoreographError, match="'model'"):
        load(model_folder)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['__builtins__']['__import__']('os').system('touch CANARY') }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x.__init__.__globals__ }}{% endfor %}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum.__globals__ }}",
    ],
)
def test_templates_reach_nothing_of_the_interpreter(canary, source):
    try:
        text = render_template(
            source.replace("CANARY", str(canary)), {"messages": [{"role": "user", "content": "x"}]}
        ).text
    except (ChatRejectedError, TemplateLimitError):
        return
    assert not text.strip() or ("globals" not in text and "root:" not in text)


@pytest.mark.slow
def test_two_builds_give_equal_packages():
    command = [sys.executable, str(ROOT / ".ci" / "reproducible_wheel.py"), "--no-isolation"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
