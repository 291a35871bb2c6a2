"""The base model of an engine, its LoRA adapters and sibling models.

Siblings have their own weights. All models have the same layers, heads and rotary embedding, so their KV
shares one pool and is interchangeable.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..errors import ConfigError, ModelError
from ..outputs import BASE_MODEL
from .hf_model import HFModel

REMOTE_SUFFIX = "@elsewhere"  # of the fingerprint of a model in another process


class ModelSet:
    """Models by name: "base", its LoRA adapters, and sibling models."""

    def __init__(self, base: HFModel) -> None:
        self.base = base
        self._siblings: dict[str, HFModel] = {}  # by name
        self.by_group = {BASE_MODEL: base}  # models by weights group
        self.remote: dict[str, str] = {}  # fingerprints of models that run in other processes, by name

    @property
    def names(self) -> tuple[str, ...]:
        """Models that requests can name."""
        return (BASE_MODEL, *self.base.adapters, *self._siblings)

    def get(self, name: str) -> HFModel:
        """Return the local model for `name`; raise ModelError if there is none."""
        if name == BASE_MODEL or name in self.base.adapters:
            return self.base
        if name in self._siblings:
            return self._siblings[name]
        raise ModelError(f"model {name!r} does not compute here: there are {list(self.names)}")

    def captured_layers(self, name: str, layers: Iterable[int]) -> frozenset[int]:
        """Return the subset of `layers` whose inputs a forward pass saves."""
        requested = frozenset(layers)
        return requested & self.get(name).decoder_layers.captured if requested else requested

    def weights_group(self, name: str) -> str:
        """Return a key, equal for models that can share a forward pass."""
        return name if name in self._siblings else BASE_MODEL

    def fingerprint(self, name: str) -> str:
        """Return a model's KV cache key; raise ModelError for unknown names."""
        if name in self.remote:
            return self.remote[name]
        return self.get(name).fingerprint(BASE_MODEL if name in self._siblings else name)

    def weights_key(self, name: str) -> tuple[str, ...]:
        """Return what separates the KV cache by weights.

        Process, model and adapter: names of siblings are part of fingerprints, so these are not joined.
        """
        if name in self.remote:
            return "elsewhere", self.remote[name], ""
        hf_model = self.get(name)
        adapter = hf_model.adapters[name].fingerprint if name not in self._siblings and name != BASE_MODEL else ""
        return "", hf_model.model_info.fingerprint, adapter

    def weights_hash(self, name: str) -> str:
        """Return `fingerprint` plus a hash of all weights, computed on first use."""
        if name in self.remote:
            return self.remote[name]
        return self.get(name).weights_hash(BASE_MODEL if name in self._siblings else name)

    def add(self, name: str, hf_model: HFModel) -> None:
        """Add a sibling model.

        Raises:
            ConfigError: if the name is invalid or in use.
            ModelError: if its KV is not interchangeable, with the differences.
        """
        self.check_unused_name(name)
        differences = _incompatibilities(self.base, hf_model)
        if differences:
            raise ModelError(f"model {name!r} is not of {self.base.model_info.name}'s family: {'; '.join(differences)}")
        weights = dict(hf_model.model.named_parameters())
        for other in (self.base, *self._siblings.values()):
            info = hf_model.model_info
            if other.model_info.fingerprint == info.fingerprint and not all(
                torch.equal(weight, weights[path]) for path, weight in other.model.named_parameters()
            ):  # a fingerprint samples the weights only
                hf_model.model_info = replace(info, fingerprint=f"{info.fingerprint}-{name}")
        self._siblings[name] = self.by_group[name] = hf_model

    def check_unused_name(self, name: str) -> None:
        names = [*self.names, *self.remote]
        if not isinstance(name, str) or not name or name in names:
            raise ConfigError(f"model {name!r}: use a new name; there are {names}")

    def remove(self, name: str) -> None:
        if name not in self._siblings:
            raise ConfigError(f"model {name!r}: the sibling models are {list(self._siblings)}")
        del self._siblings[name], self.by_group[name]


def _incompatibilities(hf_model: HFModel, other: HFModel) -> list[str]:
    """List the differences that make two models' KV not interchangeable."""
    ours, theirs = _compared_properties(hf_model), _compared_properties(other)
    result = [
        f"{name}: {_abbreviate(value)} and {_abbreviate(theirs[name])}"
        for name, value in ours.items()
        if value != theirs[name]
    ]
    if not result:
        shapes, other_shapes = (
            {name: tuple(tensor.shape) for name, tensor in each.model.state_dict().items()}
            for each in (hf_model, other)
        )
        names = sorted(shapes.keys() | other_shapes.keys())
        pairs = ((name, shapes.get(name, "absent"), other_shapes.get(name, "absent")) for name in names)
        result += [f"{name}: {shape} and {other_shape}" for name, shape, other_shape in pairs if shape != other_shape][
            :3
        ]
    if hf_model.tokenizer is not None and other.tokenizer is not None:
        odd = hf_model.tokenizer.get_vocab().items() ^ other.tokenizer.get_vocab().items()
        if odd:
            tokens = sorted({str(token) for token, _ in odd})
            result.append(f"tokenizer: {len(tokens)} tokens differ, the first {tokens[0]!r}")
    return result


def _compared_properties(hf_model: HFModel) -> dict[str, Any]:
    info, config = hf_model.model_info, hf_model.model.config.get_text_config()
    specs = info.attention_specs
    return {
        "architecture": config.model_type,
        "layers": info.layers,
        "query heads": info.query_heads,
        "key-value heads": info.kv_heads,
        "head size": info.head_dim,
        "hidden size": config.hidden_size,
        "vocabulary": info.vocab_size,
        "positions": info.max_positions,
        "attention of the layers": tuple(dict.fromkeys(map(str, specs))),
        "rotary embedding": [spec.rope for spec in specs],
        "windows, caps and slopes": [(spec.sliding_window, spec.logit_softcap, spec.alibi_slopes) for spec in specs],
        "type": info.dtype,
        "device": info.device,
    }


def _abbreviate(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
