"""GGUF files of tiny models, written as llama.cpp's converter does: names, permutations, offsets, metadata."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {  # of a GGUF file by transformers' model type
    "mistral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}


def write(
    model: PreTrainedModel,
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    quantization: str = "F32",
    tensors: dict[str, np.ndarray] | None = None,
    vocabulary: dict[str, Any] | None = None,
    tensors_per_part: int = 0,
    blocks: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a model; its weights become those of the file where it is quantized.

    Args:
        metadata: further keys without the architecture, or in place of the usual ones.
        without: usual keys that are left out.
        vocabulary: keys under "tokenizer.".
        tensors_per_part: write a file in parts.
        blocks: quantized data and its type, in place of tensors.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    keys = {key: value for key, value in _metadata(config).items() if key not in without} | (metadata or {})
    for key, value in keys.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (vocabulary or {}).items():
        _add(writer, f"tokenizer.{key}", value)
    for name, values in {**_tensors(model, architecture, quantization), **(tensors or {})}.items():
        kind = gguf.GGMLQuantizationType[quantization]
        if blocks and name in blocks:
            writer.add_tensor(name, blocks[name][0], raw_dtype=blocks[name][1])
            continue
        if values.ndim < 2 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values.astype(np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value) if value < 0 else writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _metadata(config: Any) -> dict[str, Any]:
    get = lambda *names: next((v for name in names if (v := getattr(config, name, None)) is not None), None)  # noqa: E731
    rope = get("rope_parameters") or {}
    head_dim = get("head_dim") or config.hidden_size // config.num_attention_heads
    rope = rope.get("full_attention", rope)
    values = {
        "context_length": get("max_position_embeddings", "seq_length"),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": get("intermediate_size", "ffn_hidden_size", "n_inner") or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1 if config.model_type == "falcon" else get("num_key_value_heads"),
        "attention.key_length": get("head_dim") if config.model_type not in ("phi3", "falcon", "starcoder2") else None,
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps"),
        "attention.layer_norm_epsilon": get("layer_norm_epsilon", "norm_epsilon"),
        "attention.sliding_window": get("sliding_window"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "expert_count": get("num_experts"),
        "expert_used_count": get("num_experts_per_tok"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)) if rope else None,
    }
    return {key: value for key, value in values.items() if value is not None}


@torch.no_grad()
def _tensors(model: PreTrainedModel, architecture: str, quantization: str) -> dict[str, np.ndarray]:
    """Return the tensors by their names in the file, rounded as the file's type does."""
    config = model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantization]
    result = {}
    for path, parameter in model.named_parameters():
        if parameter.ndim >= 2 and parameter.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
            parameter.copy_(torch.from_numpy(rounded.reshape(parameter.shape)))
        values = parameter.numpy()
        if path.endswith("experts.gate_up_proj"):
            block = f"blk.{path.split('.')[2]}"
            result[f"{block}.ffn_gate_exps.weight"], result[f"{block}.ffn_up_exps.weight"] = np.split(values, 2, axis=1)
            continue
        base, _, suffix = path.rpartition(".")
        if path.endswith("experts.down_proj"):
            base, suffix = path, "weight"
        name = names.get_name(base) or names.get_name(base.removeprefix("transformer."))
        assert name is not None, path
        if architecture == "llama" and name.endswith((".attn_q", ".attn_k")):
            heads = config.num_attention_heads if name.endswith("q") else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        elif architecture in ("gemma2", "gemma3") and name.endswith("norm"):
            values = values + 1
        elif (
            architecture == "gpt2"
            and suffix == "weight"
            and name.endswith(("qkv", "attn_output", "ffn_up", "ffn_down"))
        ):
            values = values.T
        elif architecture == "bloom" and name.endswith("attn_qkv"):
            split = values.reshape(config.n_head, 3, -1, *values.shape[1:])
            values = split.swapaxes(0, 1).reshape(values.shape)
        result[f"{name}.{suffix}"] = np.ascontiguousarray(values)
    return result
