"""The models that one engine serves: a base with its adapters, and others of the same family with weights of their own.

All of them have the same layers, heads and rotary embedding, so their encodings lie in one arena and can stand for each
other. Whether they should is not asked here.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..errors import ConfigError, ModelError
from ..outputs import BASE_MODEL
from .hf_model import HFModel


class ModelSet:
    """Models by name: "base", its LoRA adapters, and models with weights of their own."""

    def __init__(self, base: HFModel) -> None:
        self.base = base
        self._siblings: dict[str, HFModel] = {}
        self.remote: dict[str, str] = {}  # models that compute in other processes: names and fingerprints

    @property
    def names(self) -> tuple[str, ...]:
        """What calls may ask for."""
        return (*self.base.models, *self._siblings)

    def get(self, name: str) -> HFModel:
        """What computes for a name. Raises ModelError for one that does not compute here."""
        if name in self._siblings:
            return self._siblings[name]
        if name not in self.base.models:
            raise ModelError(f"model {name!r} does not compute here: there are {list(self.names)}")
        return self.base

    def captured_layers(self, name: str, layers: Iterable[int]) -> frozenset[int]:
        """Of these layers, those whose inputs a step of a model keeps."""
        some = frozenset(layers)
        return some & self.get(name).decoder_layers.captured if some else some

    def weights_group(self, name: str) -> str:
        """Names whose rows one pass can compute together have the same weights."""
        return name if name in self._siblings else BASE_MODEL

    def fingerprint(self, name: str) -> str:
        """Names what computes: nothing that one computed is ever found by another. Raises ModelError for what nothing
        here is called."""
        if name in self.remote:
            return self.remote[name]
        return self.get(name).fingerprint(BASE_MODEL if name in self._siblings else name)

    def weights_hash(self, name: str) -> str:
        """Names what computes by all its weights: for encodings that leave the engine. The first time, reads them."""
        if name in self.remote:
            return self.remote[name]
        other = self._siblings.get(name)
        return self.base.weights_hash(name) if other is None else other.weights_hash(BASE_MODEL)

    def add(self, name: str, hf_model: HFModel) -> None:
        """Raises ModelError for a model of another family, with what differs."""
        self.check_unused_name(name)
        result = incompatibilities(self.base, hf_model)
        if result:
            raise ModelError(f"model {name!r} is not of {self.base.model_info.name}'s family: {'; '.join(result)}")
        for known in (self.base, *self._siblings.values()):
            if known.model_info.fingerprint == hf_model.model_info.fingerprint and not same_weights(known, hf_model):
                hf_model.model_info = replace(
                    hf_model.model_info, fingerprint=f"{hf_model.model_info.fingerprint}-{name}"
                )
        self._siblings[name] = hf_model

    def check_unused_name(self, name: str) -> None:
        if not isinstance(name, str) or not name or name in (*self.names, *self.remote):
            raise ConfigError(f"model {name!r}: use a new name; there are {[*self.names, *self.remote]}")

    def remove(self, name: str) -> None:
        if name not in self._siblings:
            raise ConfigError(f"model {name!r}: there are {list(self._siblings)} beside the base and its adapters")
        del self._siblings[name]


def incompatibilities(hf_model: HFModel, other: HFModel) -> list[str]:
    """Why encodings of one cannot stand for the other's; empty where they can."""
    result = []
    for what, of in _COMPARED_PROPERTIES.items():
        mine, theirs = of(hf_model), of(other)
        if mine != theirs:
            result.append(f"{what}: {_abbreviate(mine)} and {_abbreviate(theirs)}")
    if not result:
        shapes, others = _tensor_shapes(hf_model), _tensor_shapes(other)
        odd = sorted(name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name))
        result += [f"{name}: {shapes.get(name, 'absent')} and {others.get(name, 'absent')}" for name in odd[:3]]
    vocabulary, others_vocabulary = _vocabulary(hf_model), _vocabulary(other)
    if vocabulary is not None and others_vocabulary is not None and vocabulary != others_vocabulary:
        odd = sorted(map(str, dict(vocabulary.items() ^ others_vocabulary.items())))
        result.append(f"tokenizer: {len(odd)} tokens differ, the first {odd[0]!r}")
    return result


def same_weights(hf_model: HFModel, other: HFModel) -> bool:
    """A fingerprint samples the weights: two that changed little from each other may have the same."""
    theirs = dict(other.model.named_parameters())
    return all(torch.equal(weight, theirs[name]) for name, weight in hf_model.model.named_parameters())


_COMPARED_PROPERTIES: dict[str, Any] = {
    "architecture": lambda a: a.model.config.get_text_config().model_type,
    "layers": lambda a: a.model_info.layers,
    "query heads": lambda a: a.model_info.query_heads,
    "key-value heads": lambda a: a.model_info.kv_heads,
    "head size": lambda a: a.model_info.head_dim,
    "hidden size": lambda a: a.model.config.get_text_config().hidden_size,
    "vocabulary": lambda a: a.model_info.vocab_size,
    "positions": lambda a: a.model_info.max_positions,
    "attention of the layers": lambda a: tuple(dict.fromkeys(map(str, a.model_info.attention_specs))),
    "rotary embedding": lambda a: [kind.rope for kind in a.model_info.attention_specs],
    "windows, caps and slopes": lambda a: [
        (kind.sliding_window, kind.logit_softcap, kind.alibi_slopes) for kind in a.model_info.attention_specs
    ],
    "type": lambda a: a.model_info.dtype,
    "device": lambda a: a.model_info.device,
}


def _tensor_shapes(hf_model: HFModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in hf_model.model.state_dict().items()}


def _vocabulary(hf_model: HFModel) -> dict[str, int] | None:
    return None if hf_model.tokenizer is None else hf_model.tokenizer.get_vocab()


def _abbreviate(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
