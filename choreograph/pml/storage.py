"""Encodings in a file: safetensors, and a JSON manifest that says what they are. Trusts neither.

`name.safetensors` holds the keys and values of each run, `name.json` the fingerprints that they belong to and the
digest of the other file. Everything is checked before anything is used; both files appear whole or not at all.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CacheFileError
from ..kv.arena import Layer

VERSION = 1


def save(file: Path, facts: Mapping[str, str], names: list[str], runs: list[list[Layer]]) -> int:
    """Writes both files, each under another name first; returns the bytes of the larger one."""
    tensors = {}
    for number, layers in enumerate(runs):
        tensors[f"{number}.keys"] = torch.stack([keys for keys, _ in layers])
        tensors[f"{number}.values"] = torch.stack([values for _, values in layers])
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkstemp(dir=file.parent, suffix=".draft")[1])
    try:
        save_file(tensors, draft)
        size = draft.stat().st_size
        manifest = {"version": VERSION, **facts, "runs": names, "bytes": size, "sha256": _digest(draft)}
        os.replace(draft, file)
        _write_whole(_manifest(file), json.dumps(manifest, indent=1))
    finally:
        draft.unlink(missing_ok=True)
    return size


def load(
    file: Path,
    facts: Mapping[str, str],
    names: list[str],
    shapes: list[tuple[int, int, int]],
    layers: int,
    dtype: torch.dtype,
) -> list[list[Layer]]:
    """The runs of a file, each a list over layers. shapes: (T, G, D) of every run."""
    manifest = _read_manifest(file)
    if manifest.get("version") != VERSION:
        raise CacheFileError(f"{file.name}: version {manifest.get('version')!r}, this program reads {VERSION}")
    for name, value in facts.items():
        if manifest.get(name) != value:
            raise CacheFileError(f"{file.name} was made for {name} {manifest.get(name)}, this is {value}: warm anew")
    if manifest.get("runs") != names:
        raise CacheFileError(f"{file.name} holds other modules than the schema: warm anew")
    size = file.stat().st_size
    if size != manifest.get("bytes"):
        raise CacheFileError(f"{file.name} has {size} bytes, its manifest says {manifest.get('bytes')}: cut off?")
    if _digest(file) != manifest.get("sha256"):
        raise CacheFileError(f"{file.name} is not what was saved (digest differs): warm anew")
    try:
        with safe_open(file, framework="pt") as tensors:
            return [_run(tensors, file, i, (layers, *shape), dtype) for i, shape in enumerate(shapes)]
    except SafetensorError as problem:
        raise CacheFileError(f"{file.name} is no safetensors file: {problem}") from None


def _run(tensors: Any, file: Path, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Layer]:
    keys, values = (tensors.get_tensor(f"{number}.{kind}") for kind in ("keys", "values"))
    for tensor in (keys, values):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise CacheFileError(f"{file.name}: run {number} is {got}, expected {shape} {dtype}")
    return list(zip(keys.unbind(), values.unbind(), strict=True))


def _read_manifest(file: Path) -> dict[str, Any]:
    path = _manifest(file)
    for one in (file, path):
        if not one.is_file():
            raise CacheFileError(f"{one.name}: no such file beside {file.parent.name or 'here'}; save the cache first")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise CacheFileError(f"{path.name} is not JSON: {problem}") from None
    if not isinstance(manifest, dict):
        raise CacheFileError(f"{path.name} is no manifest")
    return manifest


def _manifest(file: Path) -> Path:
    return file.with_suffix(".json")


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
