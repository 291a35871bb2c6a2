"""A family of tiny random models that answer thousands of requests a minute: a base, a sibling, adapters."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .small_model import END_TOKEN, build, byte_tokenizer, perturbed, save_adapter

SPECIAL = ["<unk>", END_TOKEN, "<bos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
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
    return byte_tokenizer(SPECIAL, letters, TEMPLATE, SPECIAL[0])


def build_model() -> LlamaForCausalLM:
    """Return the base, a random Llama in float32."""
    return build(of=tokenizer())


def family_in(folder: Path) -> Family:
    """Return the folders of a family that `save_family` wrote."""
    return Family(folder / "base", folder / "sibling", tuple(folder / f"adapter-{i}" for i in range(NUM_ADAPTERS)))


def save_family(folder: Path) -> Family:
    """Write all models of the family below a folder."""
    family = family_in(folder)
    for path, model in ((family.base, build_model()), (family.sibling, perturbed(build_model(), 0.05))):
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
    for number, path in enumerate(family.adapters):
        targets = ("q_proj", "v_proj", "down_proj") if number % 2 else ("k_proj", "gate_proj")
        save_adapter(path, build_model(), targets, number)
    return family
