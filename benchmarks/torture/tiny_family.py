"""A family of tiny random models that answer thousands of requests a minute: a base, a sibling, adapters."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<end>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{{ '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
POSITIONS = 2048
NUM_ADAPTERS = 4
LAYER_PATTERN = (0, 1, 2)  # layers that the sibling computes of what the base has read: [0, 0) and [1, 2)


class Family(NamedTuple):
    """Folders of the models."""

    base: Path
    sibling: Path
    adapters: tuple[Path, ...]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single ASCII characters with a chat template."""
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # space and newline, as bytes are written
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")
    result.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    result.chat_template = TEMPLATE
    return result


def build_model(seed: int = 1, layers: int = 3) -> LlamaForCausalLM:
    """Return a random Llama in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.25,
        eos_token_id=SPECIAL.index("<end>"),
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).float().eval()


def save_family(folder: Path) -> Family:
    """Write all models of the family below a folder."""
    from peft import LoraConfig, get_peft_model

    base, sibling = folder / "base", folder / "sibling"
    build_model().save_pretrained(base)
    tokenizer().save_pretrained(base)
    tuned, noise = build_model(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.05)
    tuned.save_pretrained(sibling)
    tokenizer().save_pretrained(sibling)
    adapters = tuple(folder / f"adapter-{number}" for number in range(NUM_ADAPTERS))
    for number, path in enumerate(adapters):
        torch.manual_seed(number)
        targets = ["q_proj", "v_proj", "down_proj"] if number % 2 else ["k_proj", "gate_proj"]
        options = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
        get_peft_model(build_model(), options).save_pretrained(str(path))
    return Family(base, sibling, adapters)
