"""Save and load prompt caches: a container with one entry for each token run.

Its details are fingerprints of all that the keys and values depend on: model, tokenizer, schema, ...
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import CacheFileError, ConfigError
from ..kv_cache.container import ContainerFile, Header
from ..messages.kv_export import KVSnapshot, to_snapshots, write_snapshots

FIX = "remove it and save the cache again"


def save(file: Path, fingerprints: Mapping[str, str], snapshots: Mapping[str, KVSnapshot]) -> int:
    """Write named snapshots; return the file's size in bytes."""
    check_writable(file)
    dtype = next((snapshot.layers[0][0].dtype for snapshot in snapshots.values()), None)
    entries = [snapshot.describe(name=name) for name, snapshot in snapshots.items()]
    header = Header(entries, dtype, {"fingerprints": dict(fingerprints)})
    try:
        write_snapshots(file, header, [*snapshots.values()])
    except ConfigError as exc:
        raise CacheFileError(str(exc)) from None
    return header.num_bytes


def check_writable(file: Path) -> None:
    """Create the file's directory; raise CacheFileError if it is not writable."""
    if file.is_dir():
        raise CacheFileError(f"{file} is a folder: name a file, as in {file / 'cache.safetensors'}")
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
        shapes: (layers, T, heads, width of a row) of the keys and of the values, by name of the snapshot.
        dtype: of the keys and values.

    Raises:
        CacheFileError: if the file is missing, damaged, or of another model, tokenizer or schema.
    """
    with ContainerFile.open(file, FIX) as container:
        header = container.header
        saved = header.details.get("fingerprints")
        if not isinstance(saved, dict):
            raise header.error("holds no prompt cache")
        for name, value in fingerprints.items():
            if saved.get(name) != value:
                raise header.error(f"was made for {name} {saved.get(name)}, this is {value}")
        if [entry.name for entry in header.entries] != list(shapes):
            raise header.error("holds other modules than the schema")
        for entry, (num_layers, *shape) in zip(header.entries, shapes.values(), strict=True):
            expected = {(layer, kind): tuple(shape) for layer in range(num_layers) for kind in ("keys", "values")}
            if entry.shapes != expected or entry.model_hash != fingerprints["model"] or header.dtype != dtype:
                raise header.error(
                    f"holds {entry.name} in another shape than {shape} in {num_layers} layers, or {dtype}"
                )
        return to_snapshots(header, container.read_all())
