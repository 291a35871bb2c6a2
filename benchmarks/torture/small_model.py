"""A tiny random model in float32 with a tokenizer of bytes: thousands of cases in minutes."""

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_TOKEN = "<end>"
SPECIAL = (END_TOKEN, "<|system|>", "<|user|>", "<|assistant|>")
END = 0  # id of the token that ends a message
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
POSITIONS = 2048
LAYERS = 3


def byte_tokenizer(
    special: Sequence[str], alphabet: Sequence[str], template: str, unknown: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer without merges.

    Args:
        special: tokens that the template writes, one of them `END_TOKEN`.
        alphabet: tokens of single bytes, as byte-level tokenizers write them.
        unknown: token of all other bytes.
    """
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unknown, eos_token=END_TOKEN)
    others = [token for token in special if token not in (END_TOKEN, unknown)]
    result.add_special_tokens({"additional_special_tokens": others})
    result.chat_template = template
    return result


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and a chat template."""
    return byte_tokenizer(SPECIAL, sorted(pre_tokenizers.ByteLevel.alphabet()), TEMPLATE)


def build(seed: int = 1, of: PreTrainedTokenizerFast | None = None) -> LlamaForCausalLM:
    """Return a new random Llama for a tokenizer, by default that of this module."""
    of = of or tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(of),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.25,
        eos_token_id=of.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).float().eval()


@cache
def model() -> LlamaForCausalLM:
    """Return the model that all engines of a process share."""
    return build()


@cache
def sibling() -> LlamaForCausalLM:
    """Return the model with noise on its weights, as a fine-tuned one."""
    return perturbed(model(), 0.1)


def perturbed(source: LlamaForCausalLM, scale: float) -> LlamaForCausalLM:
    """Return a copy of a model with normal noise of a standard deviation on its weights."""
    result, noise = copy.deepcopy(source), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * scale)
    return result


def save_adapter(
    folder: Path,
    source: LlamaForCausalLM | None = None,
    targets: Sequence[str] = ("q_proj", "v_proj", "down_proj"),
    seed: int = 1,
) -> Path:
    """Write a random LoRA adapter of a model, strong enough to change tokens; adds layers to `source`."""
    from peft import LoraConfig, get_peft_model

    source = source or build()
    torch.manual_seed(seed)
    options = LoraConfig(r=4, lora_alpha=16, target_modules=[*targets], init_lora_weights=False)
    get_peft_model(source, options).save_pretrained(str(folder))
    return folder


def save_folder(folder: Path) -> Path:
    """Write model and tokenizer where other processes load them."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
