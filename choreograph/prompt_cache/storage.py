"""Save and load prompt caches: safetensors file and JSON manifest.

The manifest contains a digest of both files. A file is verified completely before any of it is used.
"""

import hashlib
import json
import reprlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as dump_tensors

from ..errors import CacheFileError, ConfigError
from ..messages.kv_export import KVSnapshot
from ..utils import atomic_write, atomic_write_text


class _Run(BaseModel, extra="forbid", strict=True):
    name: str
    base_position: int = Field(ge=0, lt=1 << 31)  # of token 0; keys are rotated to it
    content_hash: str


class _Manifest(BaseModel, extra="forbid", strict=True):
    version: Literal[5] = 5
    fingerprints: dict[str, str]  # of all that the keys and values depend on: model, tokenizer, schema, ...
    runs: list[_Run]  # in the order of the tensors
    sha256: str = ""  # of this manifest and the tensor file


def save(file: Path, fingerprints: Mapping[str, str], snapshots: Mapping[str, KVSnapshot]) -> int:
    """Write named snapshots and manifest; return the tensor file's size in bytes."""
    check_writable(file)
    tensors = {}
    for index, snapshot in enumerate(snapshots.values()):
        tensors[f"{index}.keys"] = torch.stack([keys for keys, _ in snapshot.layers])
        tensors[f"{index}.values"] = torch.stack([values for _, values in snapshot.layers])
    data = dump_tensors(tensors)
    runs = [
        _Run(name=name, base_position=snapshot.base_position, content_hash=snapshot.content_hash)
        for name, snapshot in snapshots.items()
    ]
    manifest = _Manifest(fingerprints=dict(fingerprints), runs=runs)
    manifest.sha256 = compute_digest(manifest.model_dump(), data)
    try:
        atomic_write(file, lambda part: part.write_bytes(data))
        atomic_write_text(_manifest_path(file), manifest.model_dump_json(indent=1))
    except ConfigError as exc:
        raise CacheFileError(str(exc)) from None
    return len(data)


def check_writable(file: Path) -> None:
    """Create the file's directory; raise CacheFileError if it is not writable."""
    manifest_path = _manifest_path(file)
    if manifest_path.is_dir():
        raise CacheFileError(f"{manifest_path}, where the manifest goes, is a folder: use another name")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as exc:
        raise CacheFileError(f"{file}: nothing can be written there ({exc}); use another folder") from None


def load(
    file: Path, fingerprints: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> list[KVSnapshot]:
    """Read saved snapshots.

    Args:
        fingerprints: expected fingerprints of the file, by name.
        shapes: (layers, T, heads, head_dim) of the keys and of the values, by name of the snapshot.

    Raises:
        CacheFileError: if the file is missing, damaged, or of another model, tokenizer or schema.
    """
    manifest_path = _manifest_path(file)
    try:
        text, data = manifest_path.read_bytes(), file.read_bytes()
        manifest = _Manifest.model_validate_json(text)
    except OSError as exc:
        raise CacheFileError(
            f"{exc.filename}: no such file can be read ({exc.strerror}): save the cache first"
        ) from None
    except ValidationError as exc:
        error = exc.errors()[0]
        where = f"{'.'.join(map(str, error['loc']))} {reprlib.repr(error['input'])}"
        raise CacheFileError(
            f"{manifest_path.name} is no manifest: {where}: {error['msg']}: save the cache again"
        ) from None
    for name, value in fingerprints.items():
        if manifest.fingerprints.get(name) != value:
            saved = manifest.fingerprints.get(name)
            raise CacheFileError(f"{file.name} was made for {name} {saved}, this is {value}: save the cache again")
    if [run.name for run in manifest.runs] != list(shapes):
        raise CacheFileError(f"{file.name} holds other modules than the schema: save the cache again")
    if compute_digest(manifest.model_dump(), data) != manifest.sha256:
        raise CacheFileError(f"{file.name} is cut off or changed (digest differs): save the cache again")
    tensors = parse_tensors(data)
    snapshots = []
    for index, (run, shape) in enumerate(zip(manifest.runs, shapes.values(), strict=True)):
        pair = []
        for name in (f"{index}.keys", f"{index}.values"):
            tensor = tensors.get(name)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                actual = "missing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise CacheFileError(f"{file.name}: {name} is {actual}, expected {shape} {dtype}")
            pair.append(tensor.unbind())
        layers = list(zip(*pair, strict=True))
        snapshots.append(KVSnapshot(run.base_position, layers, fingerprints["model"], run.content_hash))
    return snapshots


def compute_digest(manifest: Mapping[str, Any], data: bytes) -> str:
    """Return the digest of a tensor file and its manifest's other fields."""
    fields = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode() + b"\0" + data).hexdigest()


def _manifest_path(file: Path) -> Path:
    if file.is_dir():
        raise CacheFileError(f"{file} is a folder: name a file, as in {file / 'cache.safetensors'}")
    if file.suffix == ".json":
        raise CacheFileError(f"{file.name}: this name is the manifest's: use .safetensors")
    return file.with_suffix(".json") if file.suffix == ".safetensors" else file.with_name(f"{file.name}.json")
