"""LoRA adapters over one base model, selected per token.

The weights are those saved by `peft`. A forward hook on every adapted projection adds the adapter's part
to the tokens that use it. The model itself is unchanged and computes as before without adapters.
"""

import hashlib
import json
import math
import os
import re
import reprlib
import warnings
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
from ..utils import hub_or_cache, require

_SUPPORTED_OPTIONS = {  # of peft: those that do not change the values, and those that this module reads
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "runtime_config", "megatron_core"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}

_SUPPORTED_INITS = (True, False, "gaussian", "orthogonal")  # others change the base weights too

_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class LoraWeights:
    """Weights of one adapter in the model's dtype, on its device."""

    name: str
    fingerprint: str  # hash of the weights: equal for two names of one adapter
    weights: Mapping[str, tuple[Tensor, Tensor]]  # by module path: A (r, in), and B (out, r) including the scale


class LoraManager:
    """Adapters of one model; not thread-safe: only the model thread uses it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.adapters: dict[str, LoraWeights] = {}
        self._hooked_paths: set[str] = set()
        self._active: list[tuple[LoraWeights, slice | Tensor]] = []  # adapters of the running batch, with their tokens
        self._num_tokens = 0  # of the running batch

    def add(self, name: str, source: str | os.PathLike[str]) -> LoraWeights:
        """Load an adapter from a folder or the Hub.

        Raises:
            ConfigError: if the name is invalid or in use.
            ModelError: if the adapter cannot be read, or does not fit the model.
        """
        if not isinstance(name, str) or not name or name == BASE_MODEL or name in self.adapters:
            raise ConfigError(f"adapter {name!r}: use a new name, other than {BASE_MODEL!r}")
        lora = _load(name, source, self._model)
        for path in lora.weights.keys() - self._hooked_paths:
            self._model.get_submodule(path).register_forward_hook(self._make_hook(path))
            self._hooked_paths.add(path)
        self.adapters[name] = lora
        return lora

    def remove(self, name: str) -> None:
        """Remove an adapter that no message uses."""
        if name not in self.adapters:
            raise ConfigError(f"adapter {name!r}: there are {list(self.adapters)}")
        del self.adapters[name]

    @contextmanager
    def activate(self, names: Sequence[str]) -> Iterator[bool]:
        """Apply each token's adapter inside the block; yield True if any."""
        self._num_tokens, tokens_by_name = len(names), dict[str, list[int]]()
        for index, name in enumerate(names):
            if name != BASE_MODEL:
                tokens_by_name.setdefault(name, []).append(index)
        for name, tokens in tokens_by_name.items():
            is_contiguous = tokens[-1] + 1 - tokens[0] == len(tokens)
            rows = (
                slice(tokens[0], tokens[-1] + 1) if is_contiguous else torch.tensor(tokens, device=self._model.device)
            )
            self._active.append((self.adapters[name], rows))
        try:
            yield bool(self._active)
        finally:
            self._active.clear()

    def changes_any(self, paths: Sequence[str]) -> bool:
        """Return whether an active adapter changes one of the layers."""
        return bool(self._active) and any(path in lora.weights for lora, _ in self._active for path in paths)

    def apply(self, path: str, x: Tensor, out: Tensor) -> None:
        """Add the running batch's adapters to a layer's output, (1, N, F) or (N, F)."""
        for lora, rows in self._active:
            if path in lora.weights:
                if out.shape[-2] != self._num_tokens:  # experts get some tokens, in their own order
                    raise ModelError(
                        f"adapter {lora.name!r}: {path} gets {out.shape[-2]} of {self._num_tokens} rows of a step: "
                        "merge it into the weights instead"
                    )
                a, b = lora.weights[path]
                out[..., rows, :] += (x[..., rows, :] @ a.T) @ b.T

    def _make_hook(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            self.apply(path, args[0], out)
            return out

        return hook


def _load(name: str, source: str | os.PathLike[str], model: PreTrainedModel) -> LoraWeights:
    require("peft", "train")
    config, tensors = _read_files(name, source)
    label = f"adapter {name!r} of {source}"
    modules = dict(model.named_modules())
    weights, digest = {}, hashlib.sha256()
    for key in sorted(key for key in tensors if ".lora_A." in key):
        path = key.removeprefix("base_model.model.").partition(".lora_A.")[0]
        module, a, b = modules.get(path), tensors[key], tensors.get(key.replace(".lora_A.", ".lora_B."))
        if b is None:
            raise ModelError(f"{label}: {key} has no other half; get the file again")
        if isinstance(module, nn.Linear) and not (a.ndim == b.ndim == 2 and 0 < a.shape[0] == b.shape[1]):
            raise ModelError(
                f"{label}: {key} and its other half have shapes {list(a.shape)} and {list(b.shape)}; get its files again"
            )
        if module is model.get_output_embeddings():
            raise ModelError(f"{label} changes {path}, the output layer: merge it into the weights instead")
        if not isinstance(module, nn.Linear):
            raise ModelError(
                f"{label} changes {path}, which is no linear layer of this model: use the model it was trained for"
            )
        if (b.shape[0], a.shape[1]) != (module.out_features, module.in_features):
            raise ModelError(
                f"{label}: {path} goes from {a.shape[1]} to {b.shape[0]}; this model's from "
                f"{module.in_features} to {module.out_features}: use the model it was trained for"
            )
        rank, alpha = a.shape[0], _alpha_of(config, path, label)
        scaled = b.float() * float(alpha / (rank**0.5 if config.use_rslora else rank))
        placement: Any = {"dtype": model.dtype, "device": module.weight.device}
        weights[path] = a.to(**placement), scaled.to(**placement)
        digest.update(path.encode() + a.float().numpy().tobytes() + scaled.numpy().tobytes())
    if not weights or 2 * len(weights) != len(tensors):
        others = sorted(key for key in tensors if ".lora_A." not in key and ".lora_B." not in key)
        raise ModelError(
            f"{label}: it changes {others[:3] or 'nothing'}; only LoRA of linear layers is served: merge it into the weights"
        )
    return LoraWeights(name, digest.hexdigest()[:16], weights)


def _alpha_of(config: Any, path: str, label: str) -> float:
    """Return `lora_alpha` of a layer."""
    from peft.utils.other import get_pattern_key

    try:
        patterns = dict(config.alpha_pattern or {})
        alpha = patterns.get(get_pattern_key(list(patterns), path), config.lora_alpha)
    except (TypeError, ValueError, re.error) as exc:
        raise ModelError(f"{label}: alpha_pattern cannot be read ({exc}); get its files again") from None
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ModelError(f"{label}: lora_alpha={reprlib.repr(alpha)} of {path}: use a number")
    return alpha


def _read_files(name: str, source: str | os.PathLike[str]) -> tuple[Any, dict[str, Tensor]]:
    """Read an adapter's peft configuration and tensors; refuse unsupported options."""
    from huggingface_hub import hf_hub_download
    from peft import LoraConfig, PeftConfig
    from safetensors.torch import load

    folder, label = Path(source), f"adapter {name!r} of {source}"
    for file in _FILES if folder.exists() else ():
        if not (folder / file).is_file():
            raise ModelError(f"adapter {name!r}: {source} holds no {file}: name a folder that peft saved")
    try:
        if not folder.exists():
            with hub_or_cache():
                paths = [hf_hub_download(str(source), file) for file in _FILES]  # safetensors only
            folder = Path(paths[0]).parent
        saved = json.loads((folder / _FILES[0]).read_text(encoding="utf-8"))
        with warnings.catch_warnings(action="ignore"):  # peft warns of options that it does not know, refused below
            config = PeftConfig.from_pretrained(str(folder))
        tensors = load((folder / _FILES[1]).read_bytes())  # `safe_open` of safetensors 0.8 leaks a KiB a call
    except Exception as exc:  # peft raises many types for missing and unreadable files
        reason = (str(exc).strip().splitlines() or ["no message"])[0][:300]
        raise ModelError(f"{label} cannot be loaded: {type(exc).__name__}: {reason}; get its files again") from exc
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{label} is of type {config.peft_type}: only LoRA is served, merge it into the weights")
    defaults = LoraConfig()
    for option in dict.fromkeys([*(field.name for field in fields(config)), *saved]):  # saved by a newer peft
        value, default = getattr(config, option, saved.get(option)), getattr(defaults, option, None)
        is_default = value == default or not (value or default)  # [] is as good as None
        is_supported = option in _SUPPORTED_OPTIONS or (option == "init_lora_weights" and value in _SUPPORTED_INITS)
        if not is_default and not is_supported:
            shown = reprlib.repr(value)
            raise ModelError(f"{label}: {option}={shown} is not served; merge it into the weights instead")
    return config, tensors
