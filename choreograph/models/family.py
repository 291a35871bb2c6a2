"""The models that one engine serves: a base with its adapters, and others of the same family with weights of their own.

All of them have the same layers, heads and rotary embedding, so their encodings lie in one arena and can stand for each
other. Whether they should is not asked here.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..errors import ConfigError, ModelError
from ..types import BASE
from .adapter import Adapter


class Family:
    """Models by name: "base", its LoRA adapters, and models with weights of their own."""

    def __init__(self, base: Adapter) -> None:
        self.base = base
        self._others: dict[str, Adapter] = {}
        self.elsewhere: dict[str, str] = {}  # models that compute in other processes: names and fingerprints

    @property
    def names(self) -> tuple[str, ...]:
        """What calls may ask for."""
        return (*self.base.models, *self._others)

    def of(self, name: str) -> Adapter:
        """What computes for a name. Raises ModelError for one that does not compute here."""
        if name in self._others:
            return self._others[name]
        if name not in self.base.models:
            raise ModelError(f"model {name!r} does not compute here: there are {list(self.names)}")
        return self.base

    def keeps(self, name: str, layers: Iterable[int]) -> frozenset[int]:
        """Of these layers, those whose inputs a step of a model keeps."""
        some = frozenset(layers)
        return some & self.of(name).depth.watched if some else some

    def weights(self, name: str) -> str:
        """Names whose rows one pass can compute together have the same weights."""
        return name if name in self._others else BASE

    def fingerprint(self, name: str) -> str:
        """Names what computes: nothing that one computed is ever found by another. Raises ModelError for what nothing
        here is called."""
        if name in self.elsewhere:
            return self.elsewhere[name]
        return self.of(name).fingerprint(BASE if name in self._others else name)

    def identity(self, name: str) -> str:
        """Names what computes by all its weights: for encodings that leave the engine. The first time, reads them."""
        if name in self.elsewhere:
            return self.elsewhere[name]
        other = self._others.get(name)
        return self.base.identity(name) if other is None else other.identity(BASE)

    def add(self, name: str, other: Adapter) -> None:
        """Raises ModelError for a model of another family, with what differs."""
        self.check_new(name)
        found = differences(self.base, other)
        if found:
            raise ModelError(f"model {name!r} is not of {self.base.facts.name}'s family: {'; '.join(found)}")
        for known in (self.base, *self._others.values()):
            if known.facts.fingerprint == other.facts.fingerprint and not same_weights(known, other):
                other.facts = replace(other.facts, fingerprint=f"{other.facts.fingerprint}-{name}")
        self._others[name] = other

    def check_new(self, name: str) -> None:
        if not isinstance(name, str) or not name or name in (*self.names, *self.elsewhere):
            raise ConfigError(f"model {name!r}: use a new name; there are {[*self.names, *self.elsewhere]}")

    def remove(self, name: str) -> None:
        if name not in self._others:
            raise ConfigError(f"model {name!r}: there are {list(self._others)} beside the base and its adapters")
        del self._others[name]


def differences(one: Adapter, other: Adapter) -> list[str]:
    """Why encodings of one cannot stand for the other's; empty where they can."""
    found = []
    for what, of in _FACTS.items():
        mine, theirs = of(one), of(other)
        if mine != theirs:
            found.append(f"{what}: {_short(mine)} and {_short(theirs)}")
    if not found:
        shapes, others = _shapes(one), _shapes(other)
        odd = sorted(name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name))
        found += [f"{name}: {shapes.get(name, 'absent')} and {others.get(name, 'absent')}" for name in odd[:3]]
    vocabulary, others_vocabulary = _vocabulary(one), _vocabulary(other)
    if vocabulary is not None and others_vocabulary is not None and vocabulary != others_vocabulary:
        odd = sorted(map(str, dict(vocabulary.items() ^ others_vocabulary.items())))
        found.append(f"tokenizer: {len(odd)} tokens differ, the first {odd[0]!r}")
    return found


def same_weights(one: Adapter, other: Adapter) -> bool:
    """A fingerprint samples the weights: two that changed little from each other may have the same."""
    theirs = dict(other.model.named_parameters())
    return all(torch.equal(weight, theirs[name]) for name, weight in one.model.named_parameters())


_FACTS: dict[str, Any] = {
    "architecture": lambda a: a.model.config.get_text_config().model_type,
    "layers": lambda a: a.facts.layers,
    "query heads": lambda a: a.facts.query_heads,
    "key-value heads": lambda a: a.facts.kv_heads,
    "head size": lambda a: a.facts.head_dim,
    "hidden size": lambda a: a.model.config.get_text_config().hidden_size,
    "vocabulary": lambda a: a.facts.vocab_size,
    "positions": lambda a: a.facts.max_positions,
    "attention of the layers": lambda a: tuple(dict.fromkeys(map(str, a.facts.kinds))),
    "rotary embedding": lambda a: [kind.rotary for kind in a.facts.kinds],
    "windows, caps and slopes": lambda a: [(kind.window, kind.softcap, kind.slopes) for kind in a.facts.kinds],
    "type": lambda a: a.facts.dtype,
    "device": lambda a: a.facts.device,
}


def _shapes(adapter: Adapter) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in adapter.model.state_dict().items()}


def _vocabulary(adapter: Adapter) -> dict[str, int] | None:
    return None if adapter.tokenizer is None else adapter.tokenizer.get_vocab()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
