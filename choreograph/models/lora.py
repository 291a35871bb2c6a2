"""LoRA adapters over one base model, each for some rows of a step: several serve calls in the same pass.

The weights are those that `peft` saves. A hook behind every projection that an adapter changes adds the adapter's
part to the rows that asked for it; the model itself is not changed, and computes as ever where no adapter is asked for.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ConfigError, ModelError
from ..outputs import BASE_MODEL

_PREFIX = "base_model.model."

_SUPPORTED_OPTIONS = (  # options of peft that say nothing about the values, or that this module knows how to read
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "runtime_config", "megatron_core"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)

_FILES = ("adapter_config.json", "adapter_model.safetensors")

_SUPPORTED_INITS = (True, False, "gaussian", "orthogonal")  # other beginnings change the base weights too


@dataclass(frozen=True)
class LoraWeights:
    """Of every projection that it changes, by path: down (r, in) and up (out, r), which is scaled already."""

    name: str
    fingerprint: str
    weights: Mapping[str, tuple[Tensor, Tensor]]


class LoraManager:
    """The adapters of one model. Used by the caller that runs the model, one at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._adapters: dict[str, LoraWeights] = {}
        self._hooked_paths: set[str] = set()
        self._active: list[tuple[LoraWeights, slice | Tensor]] = []  # of the pass that is being computed: which rows
        self._num_tokens = 0  # of that pass

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def add(self, name: str, source: str | os.PathLike[str]) -> LoraWeights:
        """Reads an adapter from a folder or the Hub. Raises ModelError for one that does not fit the model."""
        if not isinstance(name, str) or not name or name == BASE_MODEL or name in self._adapters:
            raise ConfigError(f"adapter {name!r}: use a new name, other than {BASE_MODEL!r}")
        lora = read(name, source, self._model)
        for path in lora.weights.keys() - self._hooked_paths:
            self._model.get_submodule(path).register_forward_hook(self._make_hook(path))
            self._hooked_paths.add(path)
        self._adapters[name] = lora
        return lora

    def remove(self, name: str) -> None:
        """Forgets an adapter that nobody uses."""
        if name not in self._adapters:
            raise ConfigError(f"adapter {name!r}: there are {list(self._adapters)}")
        del self._adapters[name]

    def fingerprint(self, name: str) -> str:
        """Names the weights: two names of one adapter share what they encoded."""
        return "" if name == BASE_MODEL else self._adapters[name].fingerprint

    @contextmanager
    def activate(self, names: Sequence[str]) -> Iterator[bool]:
        """For one pass, gives every row the adapter that it names; tells whether there is any."""
        requested: dict[str, list[int]] = {}
        self._num_tokens = len(names)
        for row, name in enumerate(names):
            if name != BASE_MODEL:
                requested.setdefault(name, []).append(row)
        for name, rows in requested.items():
            lo, hi = rows[0], rows[-1] + 1
            here = slice(lo, hi) if hi - lo == len(rows) else torch.tensor(rows, device=self._model.device)
            self._active.append((self._adapters[name], here))
        try:
            yield bool(self._active)
        finally:
            self._active.clear()

    def _make_hook(self, path: str) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            for lora, rows in self._active:
                if path in lora.weights:
                    if out.shape[-2] != self._num_tokens:  # experts get some rows, in an order of their own
                        raise ModelError(
                            f"adapter {lora.name!r}: {path} gets {out.shape[-2]} of {self._num_tokens} rows of a step: "
                            "merge it into the weights instead"
                        )
                    down, up = lora.weights[path]
                    out[..., rows, :] += (given[0][..., rows, :] @ down.T) @ up.T  # (1, N, E), or (N, E)
            return out

        return hook


def _folder(name: str, source: str | os.PathLike[str]) -> Path:
    """The folder of an adapter, of one from the Hub that in which its files are kept."""
    from huggingface_hub import hf_hub_download

    if not Path(source).exists():
        paths = [hf_hub_download(str(source), file) for file in _FILES]
        return Path(paths[0]).parent
    for file in _FILES:
        if not (Path(source) / file).is_file():
            raise ModelError(f"adapter {name!r}: {source} holds no {file}: name a folder that peft saved")
    return Path(source)


def read(name: str, source: str | os.PathLike[str], model: PreTrainedModel) -> LoraWeights:
    """An adapter that `peft` saved, in the type and on the device of the model. Its weights are safetensors."""
    from peft import LoraConfig, PeftConfig
    from peft.utils import load_peft_weights

    try:
        folder = _folder(name, source)
        config = PeftConfig.from_pretrained(str(folder))
        tensors = load_peft_weights(str(folder), device="cpu")
    except ModelError:
        raise
    except Exception as exc:  # the library raises many kinds for what cannot be found or read
        raise ModelError(f"adapter {name!r} cannot be loaded: {type(exc).__name__}: {exc}") from exc
    if not isinstance(config, LoraConfig):
        raise ModelError(f"adapter {name!r} is of type {config.peft_type}: only LoRA is served")
    plain = LoraConfig()
    for field in fields(config):
        value, usual = getattr(config, field.name), getattr(plain, field.name, None)
        odd = (
            field.name not in _SUPPORTED_OPTIONS and value != usual and (value or usual)
        )  # an empty list is as good as None
        if odd and not (field.name == "init_lora_weights" and value in _SUPPORTED_INITS):
            raise ModelError(
                f"adapter {name!r}: {field.name}={value!r} is not served; merge it into the weights instead"
            )
    modules = dict(model.named_modules())
    weights, digest = {}, hashlib.sha256()
    for key in sorted(k for k in tensors if ".lora_A." in k):
        path = key.removeprefix(_PREFIX).partition(".lora_A.")[0]
        down, up = tensors[key], tensors.get(key.replace(".lora_A.", ".lora_B."))
        if up is None:
            raise ModelError(f"adapter {name!r}: {key} has no other half; the file is damaged")
        if modules.get(path) is model.get_output_embeddings():
            raise ModelError(f"adapter {name!r} changes {path}, the output layer: merge it into the weights instead")
        _check_fit(name, path, modules.get(path), down, up)
        scaled = up.float() * _scaling(config, path, down.shape[0])
        weight = modules[path].weight
        place: Any = {"dtype": model.dtype, "device": weight.device}
        weights[path] = down.to(**place), scaled.to(**place)
        digest.update(path.encode() + down.float().numpy().tobytes() + scaled.numpy().tobytes())
    if not weights or 2 * len(weights) != len(tensors):
        others = sorted(k for k in tensors if ".lora_A." not in k and ".lora_B." not in k)
        raise ModelError(
            f"adapter {name!r}: it changes {others[:3] or 'nothing'}; only LoRA of linear layers is served"
        )
    return LoraWeights(name, digest.hexdigest()[:16], weights)


def _check_fit(name: str, path: str, module: nn.Module | None, down: Tensor, up: Tensor) -> None:
    if not isinstance(module, nn.Linear):
        raise ModelError(f"adapter {name!r} changes {path}, which is no linear layer of this model")
    if (up.shape[0], down.shape[1]) != (module.out_features, module.in_features):
        requested = f"{module.in_features} to {module.out_features}"
        raise ModelError(
            f"adapter {name!r}: {path} goes from {down.shape[1]} to {up.shape[0]}; this model's from {requested}"
        )


def _scaling(config: Any, path: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r); alpha may differ from layer to layer."""
    from peft.utils.other import get_pattern_key

    patterns: Any = config.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(list(patterns), path), config.lora_alpha)
    return float(alpha / (rank**0.5 if config.use_rslora else rank))
