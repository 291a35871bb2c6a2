"""The container of keys and values: what was written comes back, and nothing else does."""

import gc
import json
import os
import struct
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from choreograph.errors import CacheFileError
from choreograph.kv_cache.container import (
    CHECKSUM_BYTES,
    FORMAT,
    ContainerFile,
    EntryInfo,
    Header,
    as_bytes,
    read_header,
)
from choreograph.messages.kv_export import KVSnapshot

FIX = "write it anew"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def entry_infos(draw):
    """Return an entry with any layers, some with hidden states, and heads of any number and width."""
    num_tokens, layers = draw(st.integers(1, 4)), st.sets(st.integers(0, 5), max_size=3)
    sizes = st.integers(1, 3)
    shapes = {(layer, "inputs"): (num_tokens, draw(sizes)) for layer in draw(layers)}
    for layer in draw(layers):
        shapes |= {(layer, kind): (num_tokens, draw(sizes), draw(sizes)) for kind in ("keys", "values")}
    tokens = st.lists(st.integers(0, 1 << 20), min_size=num_tokens, max_size=num_tokens)
    return EntryInfo(
        shapes=shapes,
        base_position=draw(st.integers(0, (1 << 31) - 1)),
        model_hash=draw(st.text(max_size=4)),
        content_hash=draw(st.text(max_size=4)),
        name=draw(st.text(max_size=4)),
        tokens=draw(st.none() | tokens),
        details=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
    )


@st.composite
def containers(draw):
    """Return a header and blocks with random tensors."""
    entries = draw(st.lists(entry_infos(), max_size=3))
    header = Header(
        entries, draw(st.sampled_from(DTYPES)), draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2))
    )
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    return header, blocks_of(header, rng)


def blocks_of(header, rng):
    return [
        header.seal(i, [rng.integers(0, 256, (info.num_tokens, size), np.uint8) for size in info.token_bytes])
        for i, info in enumerate(header.blocks)
    ]


def small(name="a", seed=0, base_position=0):
    """Return a container with two layers and the hidden states before one."""
    shapes = {(layer, kind): (3, 2, 4) for layer in (0, 1) for kind in ("keys", "values")} | {(1, "inputs"): (3, 8)}
    header = Header([EntryInfo(shapes=shapes, name=name, base_position=base_position)], torch.float32)
    return header, blocks_of(header, np.random.default_rng(seed))


def write(path, header, blocks):
    with ContainerFile.create(path, header) as file:
        for block in blocks:
            file.write(block)
    return path


def read(path):
    with ContainerFile.open(path, FIX) as file:
        return file.header, [file.read(number) for number in range(len(file.header.blocks))]


def to_raw(header, blocks):
    return header.raw + b"".join(piece for block in blocks for piece in (*block.tensors, block.checksum))


def assert_equal(result, expected):
    header, blocks = result
    assert (header.raw, header.entries, header.details, header.blocks) == (
        expected[0].raw,
        expected[0].entries,
        expected[0].details,
        expected[0].blocks,
    )
    for block, other in zip(blocks, expected[1], strict=True):
        assert (block.number, block.checksum) == (other.number, other.checksum)
        assert all(np.array_equal(a, b) for a, b in zip(block.tensors, other.tensors, strict=True))


def assert_refused(path, says=""):
    with pytest.raises(CacheFileError, match=rf"(?s){path}.*{says}.*{FIX}"):
        read(path)


@SETTINGS
@given(container=containers(), data=st.data())
def test_what_is_written_in_any_order_is_read_in_any_order(container, data, tmp_path):
    header, blocks = container
    path = write(tmp_path / "file", header, data.draw(st.permutations(blocks)))
    assert_equal(read(path), container)
    with ContainerFile.open(path, FIX) as file:
        assert_equal((header, file.read_all()), container)
    assert path.read_bytes() == to_raw(header, blocks)
    with ContainerFile.open(path, FIX) as file:  # some blocks only
        for number in data.draw(st.lists(st.sampled_from(range(len(blocks))), max_size=3) if blocks else st.just([])):
            assert_equal((header, [file.read(number)]), (header, [blocks[number]]))


def copy_into(block, kind, tensor):
    as_bytes(tensor)[:] = block.tensors[kind == "values"]


@SETTINGS
@given(container=containers())
def test_a_stream_is_read_in_pieces_as_a_file_is(container):
    stream = to_raw(*container)

    def receive(size):
        nonlocal stream
        piece, stream = stream[:size], stream[size:]
        return np.frombuffer(piece, np.uint8)

    frames = [container[0].seal_frame(block.number, partial(copy_into, block)) for block in container[1]]
    assert stream == container[0].raw + b"".join(frame.tobytes() for frame in frames)
    header = read_header(receive, "the stream", FIX)
    assert_equal((header, [header.read_block(receive, i) for i in range(len(header.blocks))]), container)
    assert not stream


@SETTINGS
@given(container=containers())
def test_safetensors_reads_the_same_tensors(container, tmp_path):
    header, blocks = container
    tensors = load_file(write(tmp_path / "file", header, blocks))
    names = {name for name in tensors if not name.endswith("checksum")}
    for block in blocks:
        info = header.blocks[block.number]
        for kind, rows in zip(info.kinds, block.tensors, strict=True):
            name, shape = f"{info.entry}.{info.layer}.{kind}", header.entries[info.entry].shapes[info.layer, kind]
            expected = header.as_tensor(info, kind, rows)
            assert tensors[name].dtype == header.dtype and tensors[name].shape == shape
            assert np.array_equal(as_bytes(tensors[name]), as_bytes(expected))
            names.remove(name)
    assert not names


@SETTINGS
@given(container=containers(), data=st.data())
def test_every_flipped_byte_is_found(container, data, tmp_path):
    raw = bytearray(to_raw(*container))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    (tmp_path / "file").write_bytes(raw)
    assert_refused(tmp_path / "file")


@SETTINGS
@given(container=containers(), data=st.data())
def test_every_truncated_or_longer_file_is_found(container, data, tmp_path):
    raw = to_raw(*container)
    end = data.draw(st.integers(0, len(raw) - 1))
    for content in (raw[:end], raw + raw[: end + 1]):
        (tmp_path / "file").write_bytes(content)
        assert_refused(tmp_path / "file")


@SETTINGS
@given(content=st.binary(max_size=200), size=st.none() | st.integers(0, (1 << 64) - 1))
def test_arbitrary_bytes_are_refused(content, size, tmp_path):
    prefix = b"" if size is None else struct.pack("<Q", size)
    (tmp_path / "file").write_bytes(prefix + content)
    assert_refused(tmp_path / "file")


def signed(listing):
    """Return the header with this JSON and a right checksum."""
    text = (listing if isinstance(listing, str) else json.dumps(listing, separators=(",", ":"))).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    return raw + xxhash.xxh3_64_digest(raw)


@SETTINGS
@given(data=st.data())
def test_forged_headers_are_refused_or_as_this_version_writes_them(data):
    header, _ = small()
    listing = json.loads(header.raw[8:-CHECKSUM_BYTES])
    metadata = listing["__metadata__"]
    metadata["entries"] = json.loads(metadata["entries"])
    place = listing
    while isinstance(place, (dict, list)) and place:  # any value inside becomes another one
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
            place[key] = data.draw(JSON | st.sampled_from([[], [1 << 41], [-1, 8], "BF16", 1 << 70]))
            break
        place = place[key]
    if isinstance(metadata, dict) and not isinstance(metadata.get("entries"), str):
        metadata["entries"] = json.dumps(metadata.get("entries"), separators=(",", ":"))
    raw = signed(listing)
    try:
        assert Header.parse(raw, "the forged one", FIX).raw == raw
    except CacheFileError as exc:
        assert str(exc).startswith("the forged one") and str(exc).endswith(FIX)


@pytest.mark.parametrize(
    "listing",
    ["[" * 100_000, '{"a":' * 100_000, "[]", "1", "{}", '{"__metadata__":3}', '{"__metadata__":{"format":[1]}}', "NaN"],
    ids=lambda text: text[:12],
)
def test_odd_json_is_refused(listing, tmp_path):
    (tmp_path / "file").write_bytes(signed(listing))
    assert_refused(tmp_path / "file")


def test_names_that_mean_the_same_are_refused(tmp_path):
    header, blocks = small()
    text = header.raw[8:-CHECKSUM_BYTES].decode()
    for new in (
        text.replace('"0.0.keys"', '"0.00.keys"'),
        text.replace(",", ", "),
        text.replace("choreo", "\\u0063horeo"),
    ):
        (tmp_path / "file").write_bytes(signed(new.strip()) + to_raw(header, blocks)[len(header.raw) :])
        assert_refused(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", ""),
        ("dtype", "U8"),
        ("dtype", None),
        ("entries", "[]"),
        ("entries", "{}"),
        ("details", "NaN"),
        ("more", ""),
    ],
)
def test_metadata_that_does_not_fit_is_refused(name, value, tmp_path):
    header, blocks = small()
    listing = json.loads(header.raw[8:-CHECKSUM_BYTES])
    listing["__metadata__"][name] = value
    (tmp_path / "file").write_bytes(signed(listing) + to_raw(header, blocks)[len(header.raw) :])
    assert_refused(tmp_path / "file", "no valid header")


def test_layers_that_are_not_there_take_no_memory(tmp_path):
    info = EntryInfo(shapes={}).model_dump() | {"shapes": [["inputs", [1, 1], [*range(100_000)]]]}
    metadata = {"format": FORMAT, "dtype": "F32", "entries": json.dumps([info]), "details": "{}"}
    (tmp_path / "file").write_bytes(signed({"__metadata__": metadata}))
    assert_refused(tmp_path / "file", "fewer tensors than its metadata")


def test_an_announced_size_takes_no_memory(tmp_path):
    shapes = {(0, kind): (1 << 39, 1 << 20, 8) for kind in ("keys", "values")}
    (tmp_path / "huge").write_bytes(Header([EntryInfo(shapes=shapes)], torch.float32).raw)
    (tmp_path / "long").write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    tracemalloc.start()
    try:
        for name in ("huge", "long"):
            assert_refused(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda raw: raw.replace(FORMAT.encode(), b"choreograph-kv-1"),
            "format 'choreograph-kv-1', this version reads",
        ),
        (
            lambda raw: raw.replace(FORMAT.encode(), b"choreograph-kv-3"),
            "format 'choreograph-kv-3', this version reads",
        ),
        (lambda raw: raw.replace(b'"format"', b'"farmat"'), "no format, this version reads 'choreograph-kv-2'"),
    ],
)
def test_other_versions_are_named(change, says, tmp_path):
    (tmp_path / "file").write_bytes(change(to_raw(*small())))
    assert_refused(tmp_path / "file", says)


def test_blocks_are_of_their_container_and_place(tmp_path):
    header, blocks = small()
    for other, _ in (small(name="b"), small(base_position=1)):
        for block in blocks:
            with pytest.raises(CacheFileError, match="checksum of layer"):
                other.verify(block)
    _, keys, more_keys = blocks
    for block in (keys._replace(number=2), more_keys._replace(number=1), keys._replace(tensors=keys.tensors[::-1])):
        with pytest.raises(CacheFileError, match="checksum of layer"):
            header.verify(block)
    for number in (-1, 3):
        with pytest.raises(CacheFileError, match="3 blocks, none with number"):
            header.verify(keys._replace(number=number))
    for tensors in (keys.tensors[:1], (), tuple(rows[:-1] for rows in keys.tensors)):
        with pytest.raises(CacheFileError, match="truncated, layer 0"):
            header.verify(keys._replace(tensors=tensors))
    raw = bytearray(to_raw(header, blocks))
    first, second, size = header.position(1), header.position(2), header.blocks[1].tensor_bytes + CHECKSUM_BYTES
    raw[first : first + size], raw[second : second + size] = raw[second : second + size], raw[first : first + size]
    (tmp_path / "file").write_bytes(raw)
    assert_refused(tmp_path / "file", "checksum of layer 0")


def test_hidden_states_come_first_and_layers_in_order():
    shapes = {(layer, kind): (1, 1, 1) for layer in (3, 1) for kind in ("keys", "values")} | {(3, "inputs"): (1, 2)}
    header = Header([EntryInfo(shapes=shapes), EntryInfo(shapes=shapes)], torch.float32)
    assert [(info.entry, info.layer, info.kinds[0]) for info in header.blocks] == [
        (0, 3, "inputs"),
        (1, 3, "inputs"),
        (0, 1, "keys"),
        (1, 1, "keys"),
        (0, 3, "keys"),
        (1, 3, "keys"),
    ]
    assert header.numbers[1, 3] == [1, 5]


@pytest.mark.parametrize(
    "fields",
    [
        {"shapes": {(0, "keys"): (1, 1, 1)}},
        {"shapes": {(0, "inputs"): (1, 1), (1, "inputs"): (2, 1)}},
        {"shapes": {(0, "inputs"): (0, 1)}},
        {"shapes": {(-1, "inputs"): (1, 1)}},
        {"shapes": {(0, "others"): (1, 1)}},
        {"shapes": {(0, "inputs"): (2, 1)}, "tokens": [1]},
        {"shapes": {}, "base_position": True},
    ],
)
def test_entries_that_cannot_be_are_not_described(fields):
    with pytest.raises(ValueError, match="EntryInfo"):
        EntryInfo(**fields)


def test_a_pipe_and_a_folder_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert_refused(path, "is no file")
    with pytest.raises(CacheFileError, match=r"absent.*No such file.*check the path"):
        read(tmp_path / "absent")


def test_a_snapshot_has_all_layers(tmp_path):
    shapes = {(layer, kind): (3, 2, 4) for layer in (0, 2) for kind in ("keys", "values")}
    for entries, says in (
        ([EntryInfo(shapes=shapes)], r"layers \[0, 2\] only"),
        ([EntryInfo(shapes=shapes)] * 2, "2 entries"),
        ([], "0 entries"),
    ):
        header = Header(entries, torch.float32)
        write(tmp_path / "file", header, blocks_of(header, np.random.default_rng(0)))
        with pytest.raises(CacheFileError, match=f"file .*{says}.*export the message again"):
            KVSnapshot.load(tmp_path / "file")


def test_a_file_that_is_no_longer_read_is_closed(tmp_path):
    path = write(tmp_path / "file", *small())
    before = len(os.listdir("/proc/self/fd"))
    files = [ContainerFile.open(path, FIX) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    reads = [partial(file.read, 0) for file in files]
    del files, reads
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
@pytest.mark.parametrize("num_details", [0, 1 << 15])
def test_a_file_that_cannot_be_written_is_closed_without_a_second_error(num_details, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    rows = np.zeros((4, 1 << 15), np.uint8)
    shapes = {(0, "keys"): (4, 1 << 13), (0, "values"): (4, 1 << 13)}
    header = Header([EntryInfo(shapes=shapes)], torch.float32, {"text": "x" * num_details})
    with pytest.raises(OSError, match="No space left"):
        ContainerFile.create(Path("/dev/full"), header).write(
            header.seal(0, [rows, rows][: len(header.blocks[0].kinds)])
        )
    gc.collect()
    assert unraisable == []
