"""Encodings in a file: safetensors, and a JSON manifest that says what they are. Trusts neither.

`name.safetensors` holds the keys and values of each run, `name.json` the fingerprints that they belong to and a
digest of both. Everything is checked before anything is used; each file appears whole or not at all.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as dump

from ..engine.kv_export import KVSnapshot
from ..errors import CacheFileError
from ..kv_cache.pool import LayerKeyValues

VERSION = 3


def save(file: Path, info: Mapping[str, str], names: list[str], snapshots: list[KVSnapshot]) -> int:
    """Writes both files; returns the bytes of the larger one."""
    check_writable(file)
    tensors = {}
    for number, copy in enumerate(snapshots):
        tensors[f"{number}.keys"] = torch.stack([keys for keys, _ in copy.layers])
        tensors[f"{number}.values"] = torch.stack([values for _, values in copy.layers])
    manifest = {"version": VERSION, **info, "runs": names, "starts": [copy.base_position for copy in snapshots]}
    manifest["works"] = [copy.content_hash for copy in snapshots]
    data = dump(tensors)
    manifest["bytes"] = len(data)
    manifest["sha256"] = _digest(data, manifest)
    try:
        _atomic_write(file, data)
        _atomic_write(_manifest_path(file), json.dumps(manifest, indent=1).encode())
    except OSError as exc:
        raise CacheFileError(f"{file}: cannot be written ({exc})") from None
    return len(data)


def check_writable(file: Path) -> None:
    """Makes the folder of a file; raises CacheFileError where a cache cannot be saved under this name."""
    if _manifest_path(file).is_dir():
        raise CacheFileError(f"{_manifest_path(file)}, where the manifest goes, is a folder: use another name")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as exc:
        raise CacheFileError(f"{file}: nothing can be written there ({exc}); use another folder") from None


def load(
    file: Path,
    info: Mapping[str, str],
    names: list[str],
    shapes: list[tuple[int, int, int]],
    layers: int,
    dtype: torch.dtype,
) -> list[KVSnapshot]:
    """The runs of a file. shapes: (T, G, D) of every run."""
    manifest = _read_manifest(file)
    if manifest.get("version") != VERSION:
        raise CacheFileError(f"{file.name}: version {manifest.get('version')!r}, this program reads {VERSION}")
    for name, value in info.items():
        if manifest.get(name) != value:
            raise CacheFileError(f"{file.name} was made for {name} {manifest.get(name)}, this is {value}: warm anew")
    if manifest.get("runs") != names:
        raise CacheFileError(f"{file.name} holds other modules than the schema: warm anew")
    starts = manifest.get("starts")
    if not isinstance(starts, list) or len(starts) != len(names) or not all(_is_position(at) for at in starts):
        raise CacheFileError(f"{_manifest_path(file).name}: starts={starts!r} are no positions: warm anew")
    works = manifest.get("works")
    if not isinstance(works, list) or len(works) != len(names) or not all(isinstance(work, str) for work in works):
        raise CacheFileError(f"{_manifest_path(file).name}: works={works!r} does not name every run: warm anew")
    data = file.read_bytes()  # what is checked is what is used
    if len(data) != manifest.get("bytes"):
        raise CacheFileError(f"{file.name} has {len(data)} bytes, its manifest says {manifest.get('bytes')}: cut off?")
    if _digest(data, manifest) != manifest.get("sha256"):
        raise CacheFileError(f"{file.name} is not what was saved (digest differs): warm anew")
    try:
        tensors = parse(data)
    except SafetensorError as exc:
        raise CacheFileError(f"{file.name} is no safetensors file: {exc}") from None
    runs = [_read_run(tensors, file, i, (layers, *shape), dtype) for i, shape in enumerate(shapes)]
    return [KVSnapshot(start, run, info["model"], work) for start, run, work in zip(starts, runs, works, strict=True)]


def _digest(data: bytes, manifest: Mapping[str, Any]) -> str:
    """Of what is in both files."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode() + b"\0" + data).hexdigest()


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _read_run(
    tensors: Mapping[str, torch.Tensor], file: Path, number: int, shape: tuple[int, ...], dtype: torch.dtype
) -> list[LayerKeyValues]:
    result = []
    for name in (f"{number}.keys", f"{number}.values"):
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            got = "missing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise CacheFileError(f"{file.name}: {name} is {got}, expected {shape} {dtype}")
        result.append(tensor)
    return list(zip(*(tensor.unbind() for tensor in result), strict=True))


def _read_manifest(file: Path) -> dict[str, Any]:
    path = _manifest_path(file)
    for one in (file, path):
        if not one.is_file():
            raise CacheFileError(f"{one.name}: no such file beside {file.parent.name or 'here'}; save the cache first")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise CacheFileError(f"{path.name} is not JSON: {exc}") from None
    if not isinstance(manifest, dict):
        raise CacheFileError(f"{path.name} is no manifest")
    return manifest


def _manifest_path(file: Path) -> Path:
    if file.is_dir():
        raise CacheFileError(f"{file} is a folder: name a file, as in {file / 'cache.safetensors'}")
    if file.suffix == ".json":
        raise CacheFileError(f"{file.name}: this name is the manifest's: use .safetensors")
    return file.with_suffix(".json") if file.suffix == ".safetensors" else file.with_name(f"{file.name}.json")


def _atomic_write(path: Path, data: bytes) -> None:
    """Under another name first, so that a file is there whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".draft", delete=False) as draft:
        try:
            draft.write(data)
            draft.close()
            os.chmod(draft.name, 0o644)
            os.replace(draft.name, path)
        except BaseException:
            Path(draft.name).unlink(missing_ok=True)
            raise
