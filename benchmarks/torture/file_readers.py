"""Files that Choreograph reads: a valid input of each kind, and what reads it.

A kind writes its files into a folder (`write`), reads that folder as the library or the command line does (`read`), and
uses what was read (`use`). Errors of `read` must name the file; both may raise a `ChoreographError` only.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from choreograph import CacheConfig, Engine, EngineConfig, Message, SamplingParams
from choreograph.models.adapter_usage import USAGE_FILE

NAME = "subject"  # of the input's files, or of its folder

VOCABULARY, LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 110, 2, 32, 48, 4, 2, 8, 256
TEMPLATE = (
    "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}{% for m in messages %}"
    "{{ '<|' + m.role + '|>' + m.content | trim + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
GREEDY = SamplingParams(temperature=0, max_tokens=2)


@dataclass(frozen=True)
class FileKind:
    """One kind of input."""

    name: str
    files: Mapping[str, bytes]  # a valid input: contents by name in its folder
    read: Callable[[Path], Any]  # gets the folder
    use: Callable[[Any], object] = lambda value: None  # gets what `read` returned
    weight: int = 1  # how often it is drawn


# -- a tiny model -----------------------------------------------------------------------------------------


@cache
def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=None,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).float().eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters and a few merges."""
    special = ["<unk>", "<end>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>"]
    letters = [*map(chr, range(33, 127)), "Ġ", "th", "he", "Ċ"]
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("h", "e")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>", bos_token="<bos>")
    result.add_special_tokens({"additional_special_tokens": special[3:]})
    result.chat_template = TEMPLATE
    return result


@cache
def tiny_engine() -> Engine:
    return Engine.from_pretrained(tiny_model(), tokenizer=tiny_tokenizer(), config=engine_config())


def engine_config() -> EngineConfig:
    # PyTorch alone: kernels would be compiled for each size of a head
    return EngineConfig(backend="reference", cache=CacheConfig(capacity=256, page_size=16))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


# -- models -----------------------------------------------------------------------------------------------


def model_files(folder: Path) -> dict[str, bytes]:
    """Return a model folder as transformers saves it."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return contents(folder)


def read_model(folder: Path) -> Any:
    from choreograph.models.loader import load

    return load(str(folder), dtype=torch.float32)


def read_gguf(folder: Path) -> Any:
    from choreograph.models.loader import load

    return load(str(folder / f"{NAME}.gguf"), dtype=torch.float32)


def use_model(hf_model: Any) -> None:
    """Serve one short request, and text where there is a tokenizer."""
    engine = Engine(hf_model, engine_config())
    with engine.session(seed=0) as session:
        session.decode([1, 2, 3], sampling=GREEDY).tokens  # noqa: B018  (computes it)
    use_tokenizer(hf_model.tokenizer)


def use_tokenizer(tokenizer: Any) -> None:
    """Render a chat and encode it, as a server does."""
    from choreograph.models.template_sandbox import ChatRejectedError, TemplateLimitError, render_messages

    if isinstance(tokenizer, tuple):
        tokenizer = tokenizer[0]
    if tokenizer is None:
        return
    text = "the end"
    if tokenizer.chat_template is not None:
        try:
            text = render_messages(tokenizer, CHAT, add_generation_prompt=True).text
        except (ChatRejectedError, TemplateLimitError):  # the server's answer is 400
            return
    with_engine = tiny_engine()
    tokens = tokenizer(text[:2000], add_special_tokens=False).input_ids[:64]
    del with_engine
    tokenizer.decode(tokens)


def read_tokenizer(folder: Path) -> Any:
    from choreograph.models.loader import load_tokenizer

    return load_tokenizer(str(folder))


def read_adapter(folder: Path) -> Any:
    engine = tiny_engine()
    engine.add_adapter("a", folder)
    return engine


def use_adapter(engine: Engine) -> None:
    try:
        with engine.session(seed=0, model="a") as session:
            message = session.decode([1, 2, 3], sampling=GREEDY)
            message.result()
            message.release()
    finally:
        engine.remove_adapter("a")


def adapter_files(folder: Path) -> dict[str, bytes]:
    import copy

    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(copy.deepcopy(tiny_model()), config).save_pretrained(str(folder))
    return contents(folder)


def gguf_file() -> bytes:
    """Return the tiny model as GGUF, with the metadata and names of llama.cpp's converter."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.alignment": 32,
        "llama.context_length": POSITIONS,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10_000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [
            3 if token.startswith("<") and token.endswith(">") else 1 for token in vocabulary
        ],
        "tokenizer.ggml.merges": ["t h", "h e"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    data, infos = b"", b""
    tensors = list(_gguf_tensors(model))
    for name, values, kind in tensors:
        data += b"\0" * (-len(data) % 32)
        infos += _text(name) + struct.pack("<I", values.ndim)
        infos += b"".join(struct.pack("<Q", size) for size in reversed(values.shape)) + struct.pack(
            "<IQ", kind, len(data)
        )
        data += _quantized(values, kind)
    head = struct.pack("<IIQQ", 0x46554747, 3, len(tensors), len(keys))
    head += b"".join(_text(key) + _value(value) for key, value in keys.items()) + infos
    return head + b"\0" * (-len(head) % 32) + data


def _quantized(values: np.ndarray, kind: int) -> bytes:
    if kind == 0:
        return values.astype(np.float32).tobytes()
    import gguf

    return gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType(kind)).tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        item = _value(value[0])
        kind = struct.unpack_from("<I", item)[0]
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_value(x)[4:] for x in value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def _gguf_tensors(model: LlamaForCausalLM) -> Any:
    """Yield (name, values, type); one matrix is quantized (Q8_0)."""
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for path, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if path == "model.embed_tokens.weight":
            yield "token_embd.weight", values, 8
        elif path == "model.norm.weight":
            yield "output_norm.weight", values, 0
        elif path.startswith("model.layers."):
            _, _, layer, rest = path.split(".", 3)
            name = names[rest.removesuffix(".weight")]
            if name in ("attn_q", "attn_k"):
                heads = HEADS if name == "attn_q" else KV_HEADS
                values = values.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(values.shape)
            yield f"blk.{layer}.{name}.weight", np.ascontiguousarray(values), 0


# -- caches -----------------------------------------------------------------------------------------------


def _message(engine: Engine, session: Any) -> Message:
    return session.prefill([5, 6, 7, 8, 9])


def kv_files(folder: Path) -> dict[str, bytes]:
    engine = tiny_engine()
    with engine.session(seed=0) as session:
        _message(engine, session).export_kv().save(folder / f"{NAME}.safetensors")
    return contents(folder)


def read_kv(folder: Path) -> Any:
    from choreograph.messages.kv_export import KVSnapshot

    return KVSnapshot.load(folder / f"{NAME}.safetensors")


def use_kv(snapshot: Any) -> None:
    with tiny_engine().session(seed=0) as session:
        session.import_kv([5, 6, 7, 8, 9], snapshot)


SCHEMA = """<schema name="trip">
  You plan trips.
  <module name="plan">Plan a trip of <param name="days" length="5"/> days.
    <union required="false">
      <module name="miami" cache="true">It is warm in Miami.</module>
      <module name="paris">It rains in Paris &amp; around.</module>
    </union>
  </module>
  <scaffold><module name="a">One.</module><module name="b" src="b.txt"/></scaffold>
  <user>Any <module name="notes"><![CDATA[a < b]]></module></user>
</schema>
"""
PROMPT = '<prompt schema="trip"><plan days="3"><miami/></plan><a/><b/>And then?</prompt>'


def read_pml(folder: Path) -> Any:
    from choreograph.prompt_cache.parser import load_schema

    return load_schema(folder / f"{NAME}.pml"), folder / f"{NAME}-prompt.pml"


def use_pml(value: Any) -> None:
    from choreograph.prompt_cache.cache import layout_schema
    from choreograph.prompt_cache.layout import ChatTokenizer
    from choreograph.prompt_cache.parser import dumps, load_prompt
    from choreograph.prompt_cache.resolve import resolve_prompt

    schema, prompt_file = value
    engine = tiny_engine()
    layout = layout_schema(engine, schema)
    dumps(schema)
    prompt = load_prompt(prompt_file)
    resolve_prompt(prompt, layout, ChatTokenizer(engine.chat, engine.tokenizer))


def prompt_cache_files(folder: Path) -> dict[str, bytes]:
    from choreograph.prompt_cache import PromptCache

    with PromptCache(tiny_engine(), CACHED_SCHEMA) as cache:
        cache.warmup()
        cache.save(folder / f"{NAME}.safetensors")
    tiny_engine().clear_cache()
    return contents(folder)


CACHED_SCHEMA = '<schema name="s">Hi.<module name="m">One two</module></schema>'


def read_prompt_cache(folder: Path) -> Any:
    from choreograph.prompt_cache import PromptCache

    with PromptCache(tiny_engine(), CACHED_SCHEMA) as cache:
        return cache.load(folder / f"{NAME}.safetensors")


# -- graphs, options, records -----------------------------------------------------------------------------

GRAPH = {
    "agents": {
        "planner": None,
        "coder": "planner",
        "tester": "planner",
        "review": {"all_of": ["coder", {"any_of": ["tester"]}]},
    },
    "choosers": ["planner"],
    "repeats": True,
    "name": "work",
}
GRAPH_YAML = """# agents of a team
agents:
  planner:
  coder: planner
  tester: planner
  review: {all_of: [coder, {any_of: [tester]}]}
choosers: [planner]
repeats: true
"""
SERVE_YAML = """model: smollm2-135m-instruct
port: 8000
capacity: 4GiB
host-capacity: 1000
eviction: lru
max_model_len: 2048
draft_tokens: 0
adapter: [a=/nowhere/a]
layer_reuse: ["b=1,2,3"]
"""


def read_graph(folder: Path) -> Any:
    from choreograph.agents import StepGraph

    return StepGraph.read(next(folder.glob(f"{NAME}.*"), folder / f"{NAME}.yaml"))


def use_graph(graph: Any) -> None:
    from choreograph.agents.step_graph import Progress

    graph.steps(Progress.from_events((), graph.agents))
    assert graph.edges is not None


def read_serve_config(folder: Path) -> Any:
    """Read options as `choreograph serve --config` does, up to loading the model."""
    from choreograph.cli.serve_command import _option_names, _read_config

    return _read_config(folder / f"{NAME}.yaml", _option_names())


def use_serve_config(options: dict[str, Any]) -> None:
    import typer

    from choreograph.cli import common
    from choreograph.cli.serve_command import _parse_patterns
    from choreograph.server.server_config import ServerConfig, take_engine

    options = dict(options)
    try:
        for name in ("adapter", "sibling"):
            if name in options:
                options[name] = common.parse_options(options[name])
        if "layer_reuse" in options:
            options["layer_reuse"] = _parse_patterns(options["layer_reuse"])
        for name in ("port", "host", "log_level"):
            options.pop(name, None)
        take_engine(options)
        ServerConfig(**options)
    except typer.BadParameter:
        pass


def read_keys(folder: Path) -> Any:
    from choreograph.server.server_config import read_api_keys

    return read_api_keys(folder / f"{NAME}.txt")


def read_profile(folder: Path) -> Any:
    from choreograph.layer_reuse.profile import Profile

    return Profile.load(folder / f"{NAME}.json")


def use_profile(profile: Any) -> None:
    profile.points()
    profile.pareto_points()
    profile.frontier()
    profile.critical()


PROFILE = {
    "receiver": "r",
    "sender": "s",
    "layers": 4,
    "metric": "f1",
    "inputs": ["a", "b", "c"],
    "receiver_scores": [0.5, 0.6, 0.7],
    "full_reuse_scores": [0.2, 0.3, 0.1],
    "sender_scores": [0.1, 0.1, 0.2],
    "per_layer": [[0.5, 0.5, 0.5]] * 4,
    "receiver_f1": [0.5, 0.6, 0.7],
    "per_layer_f1": [[0.5, 0.5, 0.5]] * 4,
    "ranges": [],
    "costs": {},
    "facts": {"model": "x"},
    "version": 3,
}

RECORDS = [
    {"id": "q1", "question": "Who?", "answers": ["Ada"], "documents": [{"title": "Ada", "text": "She wrote it."}]},
    {"id": "q2", "question": "What is 1/2?", "answer": "0.5"},
    {"concepts": ["dog", "run"], "id": "c1"},
]


def read_dataset(folder: Path) -> Any:
    from choreograph.lab.evaluation.datasets import load

    return load(str(folder / f"{NAME}.jsonl"))


def read_questions(folder: Path) -> Any:
    from choreograph.lab.profiling.profiler import load_qa_examples

    return load_qa_examples(folder / f"{NAME}.jsonl", seed=1)


def read_calibration_set(folder: Path) -> Any:
    from choreograph.lab.evaluation import calibration

    return calibration.load_examples(folder / f"{NAME}.jsonl") if hasattr(calibration, "load_examples") else None


TRACE_SETTINGS = {"model": "m", "workflow": "multi_qa", "source": "x", "sampling": {}, "options": {}}
TRACE = {
    "version": 3,
    "id": "q1",
    "task": {"question": "Who?"},
    "seed": 4,
    "calls": [
        {
            "stage": "doc",
            "prompt": [5, 6],
            "start": 0,
            "parents": [],
            "generated": None,
            "footer": [],
            "logprobs": [],
            "top": [],
        },
        {
            "stage": "answer",
            "prompt": [7],
            "start": 2,
            "parents": [],
            "generated": [8, 9],
            "footer": [1],
            "logprobs": [-0.5, -0.25],
            "top": [],
        },
    ],
    "answer": 1,
    "outputs": {},
    "split": "train",
    "units": ["u"],
}


def read_traces(folder: Path) -> Any:
    from choreograph.lab.evaluation.explain_run import load_run

    return load_run(folder)


def use_traces(value: Any) -> None:
    for transcript in value[1]:
        repr(transcript)


RUN_SETTINGS = {"conditions": {"baseline": {"mode": "prefix"}, "reuse": {}}, "model": "m", "seed": 0}
RUN_RECORDS = [{"id": "q1", "task": {"question": "Who?"}, "tokens": {"answer": [[1, 2]]}, "scores": {"f1": 1.0}}]

BUDGET = {"version": 1, "strategies": ["blend"], "stages": {"answer": [[0.1, "blend", 3, 0.02, 0.001]]}}


def read_budget(folder: Path) -> Any:
    from choreograph.features.budget import VERSION, Budget

    assert VERSION is not None
    budget = Budget(0.1)
    budget.load(folder / f"{NAME}.json")
    return budget


def budget_files(folder: Path) -> dict[str, bytes]:
    from choreograph.features.budget import Budget

    budget = Budget(0.1)
    budget.observe("answer", {0.1: 0.02, 0.5: 0.01})
    budget.save(folder / f"{NAME}.json")
    return contents(folder)


def _read_in_cache(folder: Path, read: Callable[[], Any]) -> Any:
    """Read a file of the user's cache folder, which is the input's folder meanwhile."""
    earlier = os.environ["XDG_CACHE_HOME"]
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        return read()
    finally:
        os.environ["XDG_CACHE_HOME"] = earlier


def read_alignments(folder: Path) -> Any:
    from choreograph.features.repair.align import find_alignment

    return _read_in_cache(folder, lambda: find_alignment("abc", "m"))


def read_backends(folder: Path) -> Any:
    from choreograph.attention.autotune import _load_tables

    return _read_in_cache(folder, _load_tables)


def read_usage(folder: Path) -> Any:
    from choreograph.models.adapter_usage import read_usage

    return read_usage(str(folder))


USAGE = {
    "version": 2,
    "workflow": "multi_qa",
    "adapter_stages": [],
    "stages": ["answer"],
    "weights": "0" * 16,
    "dtype": "float32",
}


def read_training(folder: Path) -> Any:
    from choreograph.lab.training.train_config import TrainManifest, TrainReport
    from choreograph.models.adapter_usage import read_record

    return (
        read_record(TrainManifest, folder / f"{NAME}-train.json"),
        read_record(TrainReport, folder / f"{NAME}.json"),
    )


TRAIN_REPORT = {
    "before": 1.0,
    "after": 0.5,
    "baseline": 0.4,
    "divergence": [0.1, 0.05],
    "trained_share": 0.01,
    "seconds": 0.5,
    "peak_memory": 100,
    "updates": 3,
    "log": [{"step": 1, "loss": 0.9}],
}
TRAIN_MANIFEST = {"version": 2, "config": {"epochs": 1}, "model": "m", "examples": "e", "validation": "v"}


def read_template(folder: Path) -> Any:
    from choreograph.models.template_sandbox import ChatRejectedError, TemplateLimitError, render_template

    file = folder / f"{NAME}.jinja"  # a template comes with a tokenizer, never as a path
    source = file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""
    try:
        return render_template(source, {"messages": CHAT, "add_generation_prompt": True, "bos_token": "<bos>"})
    except (ChatRejectedError, TemplateLimitError):  # the server's answer is 400
        return None


TEMPLATE_FILE = """{% set ns = namespace(count=0) %}
{% macro turn(m) %}{{ '<|' + m['role'] + '|>' }}{{ m.content | trim | replace('a', 'b') }}{% endmacro %}
{{ bos_token }}
{% for m in messages %}
{% if m.role not in ['user', 'system'] %}{{ raise_exception('no ' + m.role) }}{% endif %}
{{ turn(m) ~ '<end>' * 2 }}
{% set ns.count = ns.count + 1 %}
{% for i in range(3) %}{{ i }}{{ [1, 2] | join(',') }}{{ "%s" | format(i) }}{% endfor %}
{% endfor %}
{{ messages | tojson }}{{ ns.count }}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def _dumped(**files: object) -> dict[str, bytes]:
    return {name: json.dumps(value, indent=1).encode() for name, value in files.items()}


def _lines(records: list[Any]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def create_kinds(folder: Path) -> list[FileKind]:
    """Return all kinds; folder: for the files of their valid inputs."""

    def place(name: str) -> Path:
        (folder / name).mkdir(parents=True)
        return folder / name

    model = model_files(place("model"))
    tokenizer = {name: data for name, data in model.items() if not name.endswith(".safetensors")}
    weights = {name: data for name, data in model.items() if name in ("config.json", "model.safetensors")}
    configs = {
        name: data
        for name, data in model.items()
        if name in ("config.json", "generation_config.json", "model.safetensors")
    }
    graph = f"{NAME}.json"
    return [
        FileKind("GGUF", {f"{NAME}.gguf": gguf_file()}, read_gguf, use_model, 3),
        FileKind("safetensors", weights, read_model, use_model, 2),
        FileKind("model configuration", configs, read_model, use_model, 4),
        FileKind("tokenizer", tokenizer, read_tokenizer, use_tokenizer, 5),
        FileKind("adapter", adapter_files(place("adapter")), read_adapter, use_adapter, 4),
        FileKind("chat template", {f"{NAME}.jinja": TEMPLATE_FILE.encode()}, read_template, weight=8),
        FileKind(
            "PML",
            {f"{NAME}.pml": SCHEMA.encode(), f"{NAME}-prompt.pml": PROMPT.encode(), "b.txt": b"Two."},
            read_pml,
            use_pml,
            10,
        ),
        FileKind("prompt cache", prompt_cache_files(place("cache")), read_prompt_cache, weight=5),
        FileKind("saved KV", kv_files(place("kv")), read_kv, use_kv, 8),
        FileKind("step graph, YAML", {f"{NAME}.yaml": GRAPH_YAML.encode()}, read_graph, use_graph, 8),
        FileKind("step graph, JSON", {graph: json.dumps(GRAPH).encode()}, read_graph, use_graph, 8),
        FileKind("options of serve", {f"{NAME}.yaml": SERVE_YAML.encode()}, read_serve_config, use_serve_config, 8),
        FileKind("API keys", {f"{NAME}.txt": b"# keys\nsk-one\nsk-two\n"}, read_keys, weight=2),
        FileKind("profile", _dumped(**{f"{NAME}.json": PROFILE}), read_profile, use_profile, 8),
        FileKind("dataset", {f"{NAME}.jsonl": _lines(RECORDS)}, read_dataset, weight=8),
        FileKind("questions of a profile", {f"{NAME}.jsonl": _lines(RECORDS[:1])}, read_questions, weight=8),
        FileKind(
            "traces",
            _dumped(**{"settings.json": TRACE_SETTINGS}) | {"traces.jsonl": _lines([TRACE])},
            read_traces,
            use_traces,
            8,
        ),
        FileKind(
            "run folder",
            _dumped(**{"settings.json": RUN_SETTINGS}) | {"baseline.jsonl": _lines(RUN_RECORDS)},
            read_traces,
            use_traces,
            8,
        ),
        FileKind("budget", budget_files(place("budget")), read_budget, lambda budget: budget.repair_for("answer"), 8),
        FileKind("usage of an adapter", _dumped(**{USAGE_FILE: USAGE}), read_usage, weight=4),
        FileKind(
            "training records",
            _dumped(**{f"{NAME}-train.json": TRAIN_MANIFEST, f"{NAME}.json": TRAIN_REPORT}),
            read_training,
            weight=4,
        ),
    ]
