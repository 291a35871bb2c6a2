"""A tiny random model in float32 with a tokenizer of bytes: thousands of cases in minutes."""

import copy
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<end>", "<|system|>", "<|user|>", "<|assistant|>")
END = 0  # id of the token that ends a message
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
POSITIONS = 2048
LAYERS = 3


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate([*SPECIAL, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[END])
    result.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    result.chat_template = TEMPLATE
    return result


def build(seed: int = 1) -> LlamaForCausalLM:
    """Return a new random Llama."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.25,
        eos_token_id=END,
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
    result, noise = copy.deepcopy(model()), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return result


def save_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of the model, strong enough to change tokens."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    options = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(build(), options).save_pretrained(str(folder))
    return folder


def save_folder(folder: Path) -> Path:
    """Write model and tokenizer where other processes load them."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
