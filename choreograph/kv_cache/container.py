"""One container for keys and values that leave the device.

A container is a safetensors file that is written and read front to back, as a file or over a link:

    8 bytes         length of the JSON
    JSON            names, dtypes, shapes and places of all tensors; as metadata the format, entries and details
    8 bytes         checksum of all before
    for each block
        tensors     the hidden states before one layer of one entry, or its keys and values
        8 bytes     checksum of the header's checksum, the block's number and its tensors

Blocks are in the order of their use: first the hidden states of all entries, then keys and values layer by layer.
Each is verified alone: a reader may read any of them, and use a layer before the next one is there. A block that
belongs to another container or another place is damaged, too.
"""

import json
import math
import os
import reprlib
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
import xxhash
from pydantic import BaseModel, Field, NonNegativeInt, model_validator
from torch import Tensor

from ..errors import CacheFileError

FORMAT = "choreograph-kv-2"  # the last number is the version
MAX_HEADER_BYTES = 100_000_000  # as in safetensors
CHECKSUM_BYTES = 8  # XXH3 of 64 bits

TensorKind = Literal["inputs", "keys", "values"]
TensorKey = tuple[NonNegativeInt, TensorKind]  # layer, and kind as in `KVPool.tensors`
Receive = Callable[[int], np.ndarray]  # returns the next so many bytes, or raises

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I8": torch.int8}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = '{"__metadata__":'
_MIN_TENSOR_BYTES = 50  # of the JSON of a tensor
_INPUTS: tuple[TensorKind, ...] = ("inputs",)
_KEYS_AND_VALUES: tuple[TensorKind, ...] = ("keys", "values")
_Size = Annotated[int, Field(gt=0, lt=1 << 40)]


class EntryInfo(BaseModel, extra="forbid", frozen=True, strict=True):
    """What the keys and values of one KV entry are."""

    # (T, G, D) of keys and values, (T, E) of inputs
    shapes: dict[TensorKey, Annotated[tuple[_Size, ...], Field(min_length=1, max_length=4)]] = Field(exclude=True)
    base_position: int = Field(default=0, ge=0, lt=1 << 31)  # of token 0; keys are rotated to it
    model_hash: str = ""  # of the weights that computed them
    content_hash: str = ""  # of tokens and context
    name: str = ""  # among the entries of the container
    tokens: list[int] | None = None  # None where the reader knows them
    details: dict[str, Any] = {}  # of the writer, as JSON

    @model_validator(mode="after")
    def _check_shapes(self) -> "EntryInfo":
        if len({shape[0] for shape in self.shapes.values()}) > 1:
            raise ValueError("the tensors differ in their number of tokens")
        keys, values = ({layer for layer, kind in self.shapes if kind == name} for name in _KEYS_AND_VALUES)
        if keys != values:
            raise ValueError(f"layers {sorted(keys ^ values)} have either keys or values")
        if self.tokens is not None and self.shapes and len(self.tokens) != self.num_tokens:
            raise ValueError(f"{len(self.tokens)} tokens have tensors of {self.num_tokens}")
        return self

    @property
    def num_tokens(self) -> int:
        return next(iter(self.shapes.values()), (0,))[0]


class BlockInfo(NamedTuple):
    """Place and size of one block."""

    entry: int  # in `Header.entries`
    layer: int
    kinds: tuple[TensorKind, ...]  # ("inputs",) or ("keys", "values")
    num_tokens: int
    token_bytes: tuple[int, ...]  # bytes of a token in each tensor
    start: int  # first byte after the JSON

    @property
    def tensor_bytes(self) -> int:
        return self.num_tokens * sum(self.token_bytes)


class Block(NamedTuple):
    """Tensors that are written, read and verified together."""

    number: int  # in `Header.blocks`
    tensors: tuple[np.ndarray, ...]  # bytes, (T, bytes of a token)
    checksum: bytes


class Header:
    """What a container holds and where.

    Args:
        dtype: of all tensors; None without tensors.
        details: of the writer, about all entries, as JSON.
        origin: name of the container in errors.
        fix: what to do where the container cannot be used, in errors.
    """

    def __init__(
        self,
        entries: Sequence[EntryInfo],
        dtype: torch.dtype | None = None,
        details: Mapping[str, Any] | None = None,
        *,
        origin: str = "the container",
        fix: str = "write it again",
    ) -> None:
        self.entries, self.dtype, self.details = tuple(entries), dtype, dict(details or {})
        self.origin, self.fix = origin, fix
        metadata = {
            "format": FORMAT,
            "dtype": "" if dtype is None else _DTYPE_NAMES[dtype],
            "entries": _to_json([{**entry.model_dump(), "shapes": _group(entry.shapes)} for entry in self.entries]),
            "details": _to_json(self.details),
        }
        listing = [
            f"{_METADATA}{_to_json(metadata)}",
            _to_place("checksum", "U8", [CHECKSUM_BYTES], 0, CHECKSUM_BYTES),
        ]
        blocks, start = list[BlockInfo](), CHECKSUM_BYTES
        places = {(kind != "inputs", layer, i) for i, entry in enumerate(entries) for layer, kind in entry.shapes}
        for is_kv, layer, i in sorted(places):
            if dtype is None:
                raise ValueError("tensors without a dtype")
            kinds, prefix = _KEYS_AND_VALUES if is_kv else _INPUTS, f"{i}.{layer}."
            shapes = [self.entries[i].shapes[layer, kind] for kind in kinds]
            token_bytes = tuple(math.prod(shape[1:]) * dtype.itemsize for shape in shapes)
            blocks.append(BlockInfo(i, layer, kinds, shapes[0][0], token_bytes, start))
            for kind, shape, size in zip(kinds, shapes, token_bytes, strict=True):
                end = start + shape[0] * size
                listing.append(_to_place(prefix + kind, _DTYPE_NAMES[dtype], shape, start, end))
                start = end
            end = start + CHECKSUM_BYTES
            name = f"{prefix}{'kv' if is_kv else 'inputs'}.checksum"
            listing.append(_to_place(name, "U8", [CHECKSUM_BYTES], start, end))
            start = end
        text = f"{','.join(listing)}}}".encode()
        text += b" " * (-len(text) % 8)
        raw = struct.pack("<Q", len(text)) + text
        self.blocks = tuple(blocks)
        self.checksum = xxhash.xxh3_64_digest(raw)
        self.raw = raw + self.checksum  # as it is written
        self.num_bytes = len(raw) + start  # of the whole container

    @classmethod
    def parse(cls, raw: bytes, origin: str, fix: str) -> "Header":
        """Return the header that was written as `raw`.

        Raises:
            CacheFileError: if it has another format or is damaged.
        """
        try:
            text = raw[8:-CHECKSUM_BYTES].decode()
            if text.startswith(_METADATA):  # the rest follows from it
                metadata, _ = json.JSONDecoder().raw_decode(text, len(_METADATA))
            else:
                metadata = json.loads(text).get("__metadata__", {})
            if (written := metadata.get("format")) != FORMAT:
                was = "no format" if written is None else f"format {reprlib.repr(written)}"
                raise CacheFileError(f"{origin} has {was}, this version reads {FORMAT!r}: {fix}")
            if xxhash.xxh3_64_digest(raw[:-CHECKSUM_BYTES]) != raw[-CHECKSUM_BYTES:]:
                raise CacheFileError(f"{origin} is damaged, the checksum of its header differs: {fix}")
            infos = json.loads(metadata["entries"])
            if len(raw) < _MIN_TENSOR_BYTES * sum(len(layers) for info in infos for _, _, layers in info["shapes"]):
                raise ValueError("it has fewer tensors than its metadata")
            entries = [EntryInfo(**{**info, "shapes": _ungroup(info["shapes"])}) for info in infos]
            dtype = _DTYPES[metadata["dtype"]] if metadata["dtype"] else None
            header = cls(entries, dtype, json.loads(metadata["details"]), origin=origin, fix=fix)
            if header.raw != raw:
                raise ValueError("it is not as this version would write it")
        except CacheFileError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as exc:
            reason = " ".join(str(exc).split())
            raise CacheFileError(f"{origin} has no valid header ({reason[:200]}): {fix}") from None
        return header

    @cached_property
    def numbers(self) -> dict[tuple[int, int], list[int]]:
        """Numbers of blocks, by entry and layer."""
        numbers: dict[tuple[int, int], list[int]] = {}
        for number, info in enumerate(self.blocks):
            numbers.setdefault((info.entry, info.layer), []).append(number)
        return numbers

    def position(self, number: int) -> int:
        """Return the place of a block's first byte."""
        return len(self.raw) - CHECKSUM_BYTES + self.blocks[number].start

    def seal(self, number: int, tensors: Sequence[np.ndarray]) -> Block:
        """Return the block of these tensors with its checksum."""
        tensors = tuple(map(np.ascontiguousarray, tensors))
        return Block(number, tensors, self._digest(number, tensors))

    def verify(self, block: Block) -> Block:
        """Return a block, unless it is not the one that was written.

        Raises:
            CacheFileError: if it is damaged, truncated or of another container.
        """
        if not 0 <= block.number < len(self.blocks):
            raise self.error(f"has {len(self.blocks)} blocks, none with number {block.number}")
        info = self.blocks[block.number]
        shapes = [tensor.shape for tensor in block.tensors]
        expected = [(info.num_tokens, size) for size in info.token_bytes]
        if shapes != expected:
            raise self.error(f"is truncated, layer {info.layer} has {shapes} bytes, not {expected}")
        if self._digest(block.number, block.tensors) != block.checksum:
            raise self.error(f"is damaged, the checksum of layer {info.layer} differs")
        return block

    def seal_frame(self, number: int, fill: Callable[[TensorKind, Tensor], object]) -> np.ndarray:
        """Return a block with its checksum as one array, without further copies.

        Args:
            fill: writes the tensor of a kind into the one that it gets.
        """
        info = self.blocks[number]
        frame = np.empty(info.tensor_bytes + CHECKSUM_BYTES, np.uint8)
        tensors = self._split(info, frame)
        for kind, rows in zip(info.kinds, tensors, strict=True):
            fill(kind, self.as_tensor(info, kind, rows))
        frame[info.tensor_bytes :] = np.frombuffer(self._digest(number, tensors), np.uint8)
        return frame

    def read_block(self, receive: Receive, number: int) -> Block:
        """Receive the block of a number, and verify it."""
        info = self.blocks[number]
        frame = receive(info.tensor_bytes + CHECKSUM_BYTES)
        return self.verify(Block(number, self._split(info, frame), frame[info.tensor_bytes :].tobytes()))

    def as_tensor(self, info: BlockInfo, kind: TensorKind, rows: np.ndarray) -> Tensor:
        """View a tensor of a block in its dtype and shape."""
        assert self.dtype is not None
        return torch.from_numpy(rows).view(self.dtype).reshape(self.entries[info.entry].shapes[info.layer, kind])

    def _split(self, info: BlockInfo, frame: np.ndarray) -> tuple[np.ndarray, ...]:
        """View the tensors of a block that is one array."""
        tensors, start = [], 0
        for size in info.token_bytes:
            end = start + info.num_tokens * size
            tensors.append(frame[start:end].reshape(info.num_tokens, size))
            start = end
        return tuple(tensors)

    def combine(self, checksums: Iterable[bytes]) -> int:
        """Return one checksum of the container from those of its blocks."""
        return xxhash.xxh3_64_intdigest(b"".join([self.checksum, *checksums]))

    def error(self, reason: str) -> CacheFileError:
        return CacheFileError(f"{self.origin} {reason}: {self.fix}")

    def _digest(self, number: int, tensors: Iterable[np.ndarray]) -> bytes:
        digest = xxhash.xxh3_64(self.checksum + struct.pack("<Q", number))
        for tensor in tensors:
            digest.update(np.ascontiguousarray(tensor).data)
        return digest.digest()


def _group(shapes: Mapping[TensorKey, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """Return kind, shape and layers of tensors of equal shapes."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (layer, kind), shape in sorted(shapes.items()):
        groups.setdefault((kind, shape), []).append(layer)
    return [(kind, shape, layers) for (kind, shape), layers in groups.items()]


def _ungroup(groups: Iterable[tuple[str, list[int], list[int]]]) -> dict[tuple[int, str], tuple[int, ...]]:
    return {(layer, kind): tuple(shape) for kind, shape, layers in groups for layer in layers}


def _to_place(name: str, dtype: str, shape: Sequence[int], start: int, end: int) -> str:
    """Return where a tensor is, as safetensors writes it."""
    sizes = ",".join(map(str, shape))
    return f'"{name}":{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{start},{end}]}}'


def _to_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read_header(receive: Receive, origin: str, fix: str, limit: int = MAX_HEADER_BYTES) -> Header:
    """Receive a header.

    Args:
        limit: bytes that it may have.

    Raises:
        CacheFileError: if it has another format or is damaged.
    """
    prefix = receive(8).tobytes()
    (size,) = struct.unpack("<Q", prefix)
    if not 0 < size <= limit:
        raise CacheFileError(f"{origin} is no container, its header would have {size} bytes of {limit} at most: {fix}")
    return Header.parse(prefix + receive(size + CHECKSUM_BYTES).tobytes(), origin, fix)


class ContainerFile:
    """Container in an open file, whose blocks are written or read in any order.

    A file that is no longer used is closed.
    """

    def __init__(self, path: Path, file: BinaryIO, header: Header) -> None:
        self.path, self.header, self._file = path, header, file
        self.close = weakref.finalize(self, file.close)

    @classmethod
    def create(cls, path: Path, header: Header) -> "ContainerFile":
        """Write the header; all blocks must be written then."""
        file = path.open("wb")
        try:
            file.write(header.raw)
        except BaseException:
            _close_failed(file)
            raise
        return cls(path, file, header)

    @classmethod
    def open(cls, path: Path, fix: str) -> "ContainerFile":
        """Open a complete file.

        Raises:
            CacheFileError: if it is unreadable, truncated, of another format, or has a damaged header.
        """
        try:
            if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
                raise CacheFileError(f"{path} is no file: {fix}")
            file = path.open("rb")
        except OSError as exc:
            raise CacheFileError(f"{path} cannot be read ({exc.strerror}): check the path, or {fix}") from None
        try:
            size = os.fstat(file.fileno()).st_size
            header = read_header(_receive_from(file, path, fix), str(path), fix, min(size, MAX_HEADER_BYTES))
            if size != header.num_bytes:
                raise header.error(f"is truncated or damaged, it has {size} bytes, not {header.num_bytes}")
        except BaseException:
            file.close()
            raise
        return cls(path, file, header)

    def __enter__(self) -> "ContainerFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, block: Block) -> None:
        try:
            self._file.seek(self.header.position(block.number))
            self._file.writelines([*(tensor.data for tensor in block.tensors), block.checksum])
        except BaseException:
            self.close.detach()
            _close_failed(self._file)
            raise

    def read(self, number: int) -> Block:
        """Read and verify a block.

        Raises:
            CacheFileError: if it is damaged.
        """
        self._file.seek(self.header.position(number))
        return self.header.read_block(_receive_from(self._file, self.path, self.header.fix), number)

    def read_all(self) -> list[Block]:
        """Read and verify all blocks, at once into one array.

        Raises:
            CacheFileError: if one is damaged.
        """
        self._file.seek(len(self.header.raw))
        data = _receive_from(self._file, self.path, self.header.fix)(self.header.num_bytes - len(self.header.raw))
        start = 0

        def receive(num_bytes: int) -> np.ndarray:
            nonlocal start
            start += num_bytes
            return data[start - num_bytes : start]

        return [self.header.read_block(receive, number) for number in range(len(self.header.blocks))]


def _close_failed(file: BinaryIO) -> None:
    """Close a file that could not be written, and drop what is still buffered."""
    with suppress(OSError):
        file.close()


def _receive_from(file: BinaryIO, path: Path, fix: str) -> Receive:
    """Return a function that reads the next bytes of a file."""

    def receive(num_bytes: int) -> np.ndarray:
        data = np.empty(num_bytes, np.uint8)
        try:
            if file.readinto(data) != num_bytes:  # type: ignore[attr-defined]
                raise CacheFileError(f"{path} is truncated: {fix}")
        except OSError as exc:
            raise CacheFileError(f"{path} cannot be read ({exc.strerror}): {fix}") from None
        return data

    return receive


def as_bytes(rows: Tensor) -> np.ndarray:
    """View the rows of a host tensor as a uint8 array, (T, bytes of a row)."""
    return rows.detach().reshape(rows.shape[0], -1).view(torch.uint8).numpy()
