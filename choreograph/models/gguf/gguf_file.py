"""Convert a GGUF file to a folder that transformers can load.

The folder holds weights, configuration and tokenizer. Every metadata key that changes the model's output
is in the tables below: it is applied, or the file is refused.
"""

import glob
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from platformdirs import user_cache_path
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ...errors import ConfigError, ModelError
from ...utils import atomic_write_text, require

_log = logging.getLogger("choreograph")

ROW_BYTES = 1 << 15  # rows of this size are dequantized at a time
MAX_LAYER_RATIO = 16  # layers by the metadata over those with tensors; fewer that lack are named
FORMAT = 2  # of the converted folder; another one is converted again


class _Family(NamedTuple):
    """Rules for reading files of one GGUF architecture."""

    model_type: str  # of transformers
    fields: Mapping[str, str] = {}  # configuration field by metadata key, in addition to `_FIELDS`
    settings: Mapping[str, Any] = {}  # configuration fields of the family that no key names
    neutral: Mapping[str, tuple[Any, ...]] = {}  # as `_NEUTRAL`
    rotary: str = "full"  # part of a head that may be rotated: "full", "partial" or "none"


_EPSILON = "attention.layer_norm_epsilon"
_FAMILIES = {
    "llama": _Family("llama"),
    "qwen2": _Family("qwen2", settings={"use_sliding_window": False}),
    "qwen3": _Family("qwen3", settings={"use_sliding_window": False}),
    "qwen3moe": _Family(
        "qwen3_moe",
        settings={"use_sliding_window": False, "norm_topk_prob": True},
        neutral={"expert_gating_func": (0, 1)},
    ),
    "gemma2": _Family("gemma2"),
    "gemma3": _Family("gemma3_text"),
    "phi3": _Family("phi3", rotary="partial"),
    "starcoder2": _Family("starcoder2", {_EPSILON: "norm_epsilon"}, {"sliding_window": None}),
    "gpt2": _Family("gpt2", {_EPSILON: "layer_norm_epsilon", "feed_forward_length": "n_inner"}, rotary="none"),
    "bloom": _Family(
        "bloom", {_EPSILON: "layer_norm_epsilon"}, neutral={"attention.max_alibi_bias": (0, 8)}, rotary="none"
    ),
    "falcon": _Family(
        "falcon",
        {_EPSILON: "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"},
        neutral={"attention.head_count_kv": (1,), "tensor_data_layout": ("jploski",)},
    ),
}

_FIELDS = {  # configuration field by metadata key without the architecture
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}

_OFF, _ONE = (0, None), (0, 1)
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values that change nothing where no field takes the key; others are refused
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"), _OFF),
    **dict.fromkeys(("attention.temperature_length", "attention.temperature_scale"), _OFF),
    **dict.fromkeys(("attention.relative_buckets_count", "attention.shared_kv_layers"), _OFF),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "attention.decay_lora_rank"), _OFF),
    **dict.fromkeys(("attention.iclr_lora_rank", "attention.gate_lora_rank"), _OFF),
    **dict.fromkeys(("attention.value_residual_mix_lora_rank", "attention.indexer.head_count"), _OFF),
    **dict.fromkeys(("attention.indexer.key_length", "attention.indexer.top_k"), _OFF),
    **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"), _OFF),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), _OFF),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), _OFF),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count"), _OFF),
    **dict.fromkeys(("expert_feed_forward_length", "expert_shared_feed_forward_length", "moe_latent_size"), _OFF),
    **dict.fromkeys(("expert_chunk_feed_forward_length", "experts_per_group", "moe_every_n_layers"), _OFF),
    **dict.fromkeys(("expert_gating_func", "expert_weights_norm", "nextn_predict_layers", "n_deepstack_layers"), _OFF),
    **dict.fromkeys(("full_attention_interval", "embedding_length_per_layer_input", "altup.num_inputs"), _OFF),
    **dict.fromkeys(("altup.active_idx", "activation_sparsity_scale", "swiglu_clamp_exp", "swiglu_clamp_shexp"), _OFF),
    **dict.fromkeys(("rescale_every_n_layers", "time_mix_extra_dim", "time_decay_extra_dim"), _OFF),
    **dict.fromkeys(("token_shift_count", "swin_norm", "decoder_block_count", "embedding_length_out"), _OFF),
    **dict.fromkeys(("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"), _OFF),
    **dict.fromkeys(("ssm.group_count", "ssm.dt_b_c_rms", "wkv.head_size", "shortconv.l_cache"), _OFF),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale"), _ONE),
    **dict.fromkeys(("expert_weights_scale", "expert_group_count", "expert_group_used_count"), _ONE),
    **dict.fromkeys(("expert_group_scale", "interleave_moe_layer_step"), _ONE),
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),
}
_ROPE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"), _OFF),
    "rope.scaling.yarn_ext_factor": (1, -1),  # -1: by the type of scaling
    # Converters disagree whether these replace or multiply YaRN's own factor.
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1, -1),
    "rope.scaling.finetuned": (True, False),
}
_ROPE_KEYS = {  # read by `_rope_parameters`
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_sections", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *_ROPE_NEUTRAL,
}
_CHECKED_KEYS = {"attention.value_length", "attention.scale", "attention.sliding_window_pattern"}  # by `_read_config`
_INERT_KEYS = {"vocab_size", "pooling_type", "decoder_start_token_id", "features_length"}
_TOKENIZER_NEUTRAL: dict[str, tuple[Any, ...]] = {  # neutral values of unapplied options; others cause a warning
    **dict.fromkeys(("remove_extra_whitespaces", "treat_whitespace_as_suffix", "add_sep_token"), (False,)),
    "escape_whitespaces": (True,),
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def convert_gguf(gguf: Path) -> Path:
    """Convert a GGUF file, or return the folder of an earlier conversion.

    That is found by path, size and times of the file, and by its hash if these have changed.

    Args:
        gguf: the file, or one of its parts `name-00001-of-00002.gguf`.
    """
    parts, models = _find_parts(gguf), user_cache_path("choreograph") / "models"
    stats = [(part.resolve(), part.stat()) for part in parts]
    files = [[str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in stats]
    for folder in models.glob(f"{glob.escape(parts[0].stem)}-*-{FORMAT}"):
        with suppress(OSError, ValueError):
            if (folder / "complete.json").is_file() and json.loads((folder / "files.json").read_text()) == files:
                return folder
    folder = _convert_by_hash(gguf.name, parts, models)
    with suppress(ConfigError):  # a folder that cannot be written
        atomic_write_text(folder / "files.json", json.dumps(files))
    return folder


def _convert_by_hash(name: str, parts: list[Path], models: Path) -> Path:
    digests = []
    for part in parts:
        with part.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    digest = digests[0] if len(parts) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    folder = models / f"{parts[0].stem}-{digest[:16]}-{FORMAT}"
    if (folder / "complete.json").is_file():
        return folder
    require("gguf", "gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        draft = Path(temporary) / "model"
        _write_converted(name, parts, draft)
        (draft / "complete.json").write_text(json.dumps({"source": name, "sha256": digest}))
        try:
            os.replace(draft, folder)
        except OSError:  # another process was first, or left an incomplete folder
            if not (folder / "complete.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(draft, folder)
    return folder


def _find_parts(gguf: Path) -> list[Path]:
    """Return a model's files in order; raise ModelError naming missing ones."""
    match = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.gguf)", gguf.name, re.IGNORECASE)
    if match is None:
        return [gguf]
    start, number, middle, count, end = match.groups()
    names = [f"{start}{index:0{len(number)}}{middle}{count}{end}" for index in range(1, int(count) + 1)]
    parts = [gguf.with_name(name) for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"model {gguf.name!r}: {', '.join(missing[:3])} is missing in its directory; get all parts of the model"
        )
    return parts


def _write_converted(name: str, parts: list[Path], folder: Path) -> None:
    """Write config.json, model.safetensors (float32, exact) and the tokenizer."""
    from .gguf_tokenizer import build_tokenizer

    readers = [_open_reader(part) for part in parts]
    metadata = {key: field.contents() for key, field in readers[0].fields.items()}
    count = metadata.get("split.count", 1)
    if max(count, 1) != len(parts):
        raise ModelError(f"model {name!r} is one of {count} parts: their names must end in -00001-of-{count:05}.gguf")
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"model {name!r}: its parts hold {len(tensors)} of {expected} tensors; get all of them again")
    config = _read_config(metadata, tensors, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = _read_weights(model, metadata["general.architecture"], tensors, name)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.dtype = torch.float32
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation_config = GenerationConfig.from_model_config(config)
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    generation_config.eos_token_id = list(dict.fromkeys(token for token in ids if token is not None)) or None
    generation_config.save_pretrained(folder)
    tokenizer = build_tokenizer(metadata, name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _open_reader(part: Path) -> Any:
    """Return a `GGUFReader` that slices a plain array: each slice of a memmap runs Python code of NumPy."""
    from gguf import GGUFReader

    class ArrayReader(GGUFReader):
        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, value: Any) -> None:
            self._array = np.asarray(value)

    return ArrayReader(part)


def _read_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any], name: str) -> Any:
    """Return transformers' configuration; refuse keys that it cannot express."""
    architecture = metadata.get("general.architecture")
    family = _FAMILIES.get(architecture or "")
    if family is None or metadata.get("general.type", "model") != "model":
        kind = metadata.get("general.type", "model")
        raise ModelError(
            f"model {name!r}: a GGUF file of a {kind} of architecture {architecture!r} is not served; models of "
            f"{', '.join(_FAMILIES)} are: use the model's safetensors"
        )
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}

    def refuse(key: str, reason: str = "is not served") -> None:
        raise ModelError(f"model {name!r}: {prefix}{key}={keys[key]!r} {reason}: use the model's safetensors")

    num_layers = len({key.split(".")[1] for key in tensors if key.startswith("blk.")})
    if not isinstance(keys.get("block_count"), int) or not 0 < keys["block_count"] <= MAX_LAYER_RATIO * max(
        num_layers, 1
    ):
        keys.setdefault("block_count", None)
        refuse("block_count", f"does not fit its tensors, which are of {num_layers} layers")
    window, context = keys.get("attention.sliding_window") or 0, keys.get("context_length", 0)
    if window and architecture == "llama" and window < context:
        family = _Family("mistral")
    elif "use_sliding_window" in family.settings and 0 < window < context:
        refuse("attention.sliding_window")
    elif window >= context and family.model_type not in ("gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = 0
    fields = {**_FIELDS, **family.fields}
    known = AutoConfig.for_model(family.model_type)
    values: dict[str, Any] = {}
    neutral = {**_NEUTRAL, **family.neutral}
    for key, value in keys.items():
        if key in family.neutral:
            if value not in family.neutral[key]:
                refuse(key)
        elif key in fields and (hasattr(known, fields[key]) or key == "context_length"):
            values[fields[key]] = value or None if key == "attention.sliding_window" else value
        elif key in neutral and value not in neutral[key]:
            refuse(key)
    values = {**family.settings, **values} | {
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]) if "token_embd.weight" in tensors else 0,
        "tie_word_embeddings": "output.weight" not in tensors,
        **{f"{kind}_token_id": metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")},
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    heads, width = keys.get("attention.head_count"), keys.get("embedding_length")
    if not isinstance(heads, int) or not isinstance(width, int):
        raise ModelError(f"model {name!r}: {prefix}attention.head_count or embedding_length is missing or no number")
    head_dim = keys.get("attention.key_length", width // heads)
    if hasattr(known, "num_key_value_heads"):
        values.setdefault("num_key_value_heads", heads)
    is_derived = family.rotary == "none" or isinstance(getattr(type(known), "head_dim", None), property)
    if head_dim != width // heads and is_derived:
        refuse("attention.key_length", f"differs from the size of a head, {width // heads}")
    if not is_derived:
        values["head_dim"] = head_dim
    if keys.get("attention.value_length", head_dim) != head_dim:
        refuse("attention.value_length", f"differs from the size of keys, {head_dim}")
    if hasattr(known, "query_pre_attn_scalar"):
        is_largest = (architecture, keys["block_count"]) in (("gemma2", 46), ("gemma3", 62))
        scale = keys.get("attention.scale") or (width // heads if is_largest else head_dim) ** -0.5
        values["query_pre_attn_scalar"] = round(scale**-2)
        if abs(values["query_pre_attn_scalar"] ** -0.5 - scale) > 1e-6:
            refuse("attention.scale")
    elif keys.get("attention.scale") and abs(keys["attention.scale"] - head_dim**-0.5) > 1e-6:
        refuse("attention.scale")
    if (pattern := keys.get("attention.sliding_window_pattern")) is not None:
        if not hasattr(known, "query_pre_attn_scalar"):
            refuse("attention.sliding_window_pattern")
        layers = range(keys["block_count"])
        slides = [bool((layer + 1) % pattern) for layer in layers] if isinstance(pattern, int) else pattern
        values["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
    for option, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        if hasattr(known, option):
            values[option] = tensor in tensors
    if family.rotary != "none":
        rope = values["rope_parameters"] = _rope_parameters(keys, family, head_dim, tensors, refuse)
        if hasattr(known, "original_max_position_embeddings"):
            values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", context)
    applied = fields.keys() | neutral.keys() | _ROPE_KEYS | _CHECKED_KEYS | _INERT_KEYS
    unknown = [f"{prefix}{key}={value!r}" for key, value in keys.items() if key not in applied]
    for option, allowed in _TOKENIZER_NEUTRAL.items():
        key = f"tokenizer.ggml.{option}"
        unknown += [f"{key}={metadata[key]!r}"] if key in metadata and metadata[key] not in allowed else []
    if unknown:
        _log.warning("%s: not known and ignored: %s; answers may differ from the model's", name, ", ".join(unknown))
    return AutoConfig.for_model(family.model_type, **values)


def _rope_parameters(keys: Mapping[str, Any], family: _Family, head_dim: int, tensors: Any, refuse: Any) -> Any:
    """Translate RoPE metadata to transformers' `rope_parameters`."""
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1
    if kind is None and factor != 1:
        kind = "linear"
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        refuse("rope.scaling.type")
    context = keys.get("context_length", 0)
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10_000.0)}
    original = keys.get("rope.scaling.original_context_length") or context
    rotated = keys.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        if family.rotary != "partial":
            refuse("rope.dimension_count", f"differs from the size of a head, {head_dim}")
        result["partial_rotary_factor"] = rotated / head_dim
    if any(keys.get("rope.dimension_sections", ())):
        refuse("rope.dimension_sections")
    factors = {
        tensor: tensors[tensor].data.astype(np.float64).reshape(-1).tolist()
        for tensor in _ROPE_TENSORS
        if tensor in tensors
    }
    is_long = "rope_factors_long.weight" in factors
    for key, allowed in _ROPE_NEUTRAL.items():
        if key in keys and keys[key] not in allowed and not (is_long and key == "rope.scaling.attn_factor"):
            refuse(key)
    if factors:
        if kind == "yarn":
            refuse("rope.scaling.type", "with factors of frequencies is not served")
        scale = factor if kind == "linear" else 1
        long, short = (
            [scale * value for value in factors.get(f"rope_factors_{length}.weight") or factors["rope_freqs.weight"]]
            for length in ("long", "short")
        )
        result |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        result |= {"original_max_position_embeddings": original if is_long else context}
        result |= {"attention_factor": keys.get("rope.scaling.attn_factor", 1.0)}
    elif kind == "longrope":
        refuse("rope.scaling.type", "without tensors of factors is not served")
    elif kind == "linear":
        result |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        result |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        result |= {
            f"beta_{speed}": keys[key]
            for speed in ("fast", "slow")
            if (key := f"rope.scaling.yarn_beta_{speed}") in keys
        }
    if family.model_type != "gemma3_text":
        if keys.get("rope.freq_base_swa", result["rope_theta"]) != result["rope_theta"]:
            refuse("rope.freq_base_swa")
        return result
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": result, "sliding_attention": local}


def _dequantize(tensor: Any) -> np.ndarray:
    """Dequantize a tensor of a GGUF file; blocks do not depend on rows, and gguf computes 16 rows at a time."""
    from gguf import dequantize

    data = tensor.data
    num_joined = math.gcd(data.size // data.shape[-1], max(1, ROW_BYTES // data.shape[-1]))
    values = dequantize(data.reshape(-1, num_joined * data.shape[-1]), tensor.tensor_type)
    return values.reshape(*data.shape[:-1], -1)


def _read_weights(model: Any, architecture: str, tensors: Mapping[str, Any], name: str) -> dict[str, torch.Tensor]:
    """Return dequantized parameters by name; raise ModelError unless all match the model."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    heads = model.config.num_attention_heads
    config = {"hidden_size": model.config.hidden_size, "n_head": heads, "num_attention_heads": heads}
    config["num_key_value_heads"] = getattr(model.config, "num_key_value_heads", heads)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)
    # The function visits the children of each module and builds the table of all names again for each: two levels suffice.
    base = SimpleNamespace(state_dict=model.base_model.state_dict, named_children=list)
    top = SimpleNamespace(state_dict=model.state_dict, named_children=lambda: [(model.base_model_prefix, base)])
    names = get_gguf_hf_weights_map(top, processor, architecture, model.config.num_hidden_layers)
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}  # tied ones once
    targets = {
        key: names.get(key) or names.get(key.removesuffix(".weight")) for key in tensors
    }  # joined ones have none

    def refuse(problem: str, odd: Collection[str]) -> None:
        if odd:
            more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            raise ModelError(f"model {name!r}: {problem} {', '.join(sorted(odd)[:3])}{more}")

    refuse("its weights lack", shapes.keys() - set(targets.values()))
    unused = [key for key, target in targets.items() if target not in shapes and key not in _ROPE_TENSORS]
    refuse("its configuration knows nothing of the weights", unused)
    _log.warning("converting %s, once; later starts are fast", name)
    weights: dict[str, torch.Tensor] = {}
    for tensor in tensors.values():
        result = processor.process(
            weights=_dequantize(tensor),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": weights},
        )
        if result.name in names:
            weights[names[result.name]] = torch.from_numpy(np.array(result.weights, np.float32, order="C"))
    refuse("its weights lack", shapes.keys() - weights.keys())
    odd = [key for key in shapes if shapes[key] != tuple(weights[key].shape)]
    refuse("its weights have other shapes than its metadata say:", odd)
    return weights
