"""Saved caches: as good as computing, and refused where they are stale, cut off or changed."""

import struct
from copy import deepcopy

import pytest
import torch
import xxhash
from helpers import tiny_models
from helpers.inspect_engine import inspect
from safetensors.torch import save as save_tensors
from test_prompt_cache import STORY, answer

from choreograph import Engine
from choreograph.errors import CacheFileError, InvalidRequestError
from choreograph.kv_cache.container import CHECKSUM_BYTES, FORMAT, ContainerFile, Header
from choreograph.prompt_cache import PromptCache, module, schema


@pytest.fixture
def saved(engine, tmp_path):
    with PromptCache(engine, STORY) as cache:
        cache.warmup()
        expected = answer(cache)
        cache.save(tmp_path / "story.safetensors")
    engine.clear_cache()
    return tmp_path / "story.safetensors", expected


@pytest.mark.parametrize("keep", ["device", "host"])
def test_a_file_is_as_good_as_computing(engine, saved, keep):
    file, expected = saved
    with PromptCache(engine, STORY, location=keep) as cache:
        rows = engine.stats().num_batched_tokens
        assert cache.load(file) == cache.layout.num_cached_tokens
        assert cache.warmup() == 0 and engine.stats().num_batched_tokens == rows
        assert answer(cache) == expected


def test_names_with_dots_do_not_meet(engine, tmp_path):
    changed = schema("story", *STORY.children[:-1], module("b", "There was a cat. "))
    with PromptCache(engine, STORY) as first, PromptCache(engine, changed) as second:
        for cache, name in ((first, "story.v1"), (second, "story.v2")):
            cache.save(tmp_path / name)
        assert first.load(tmp_path / "story.v1") and second.load(tmp_path / "story.v2")


def test_a_place_that_cannot_be_is_refused_before_anything_is_computed(engine, tmp_path):
    (tmp_path / "file").write_text("")
    with PromptCache(engine, STORY) as cache:
        for place, says in (
            (tmp_path, "is a folder: name a file"),
            (".", "is a folder: name a file"),
            (tmp_path / "file" / "deep.safetensors", "nothing can be written there"),
        ):
            with pytest.raises(CacheFileError, match=says):
                cache.save(place)
    assert not engine.stats().num_batched_tokens and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_another_schema_model_or_tokenizer(engine, model, characters, saved):
    file, _ = saved
    other = Engine.from_pretrained(
        tiny_models.build(seed=9, vocabulary=len(characters), positions=400), tokenizer=characters
    )
    changed = schema("story", *STORY.children[:-1], module("b", "There was a cat. "))
    for cache, says in (
        (PromptCache(engine, changed), "made for schema"),
        (PromptCache(other, STORY), "made for model"),
    ):
        with pytest.raises(CacheFileError, match=says):
            cache.load(file)
    header, blocks = read(file)
    fingerprints = header.details["fingerprints"] | {"tokenizer": "0" * 16}
    rewrite(file, Header(header.entries, header.dtype, {"fingerprints": fingerprints}), blocks)
    with pytest.raises(CacheFileError, match=r"made for tokenizer 0000000000000000, this is .*: remove it and save"):
        PromptCache(engine, STORY).load(file)


def read(file):
    with ContainerFile.open(file, "") as container:
        return container.header, [container.read(index) for index in range(len(container.header.blocks))]


def rewrite(file, header, blocks):
    """Write other blocks, with right checksums."""
    with ContainerFile.create(file, header) as container:
        for block in blocks:
            container.write(header.seal(block.number, block.tensors))


def test_another_dtype_is_told_as_one(model, characters, saved):
    half = Engine.from_pretrained(deepcopy(model).bfloat16(), tokenizer=characters)
    with pytest.raises(CacheFileError, match="made for dtype float32, this is bfloat16"):
        PromptCache(half, STORY).load(saved[0])


def test_a_model_that_changed_little_is_another_one(engine, characters, saved):
    file, _ = saved
    model = deepcopy(inspect(engine).model)
    with torch.no_grad():
        model.get_input_embeddings().weight.view(-1)[1] += 1.0  # between two samples of a fingerprint
    other = Engine.from_pretrained(model, tokenizer=characters)
    assert other.model_info.fingerprint == engine.model_info.fingerprint
    with pytest.raises(CacheFileError, match="made for model"):
        PromptCache(other, STORY).load(file)


def test_a_damaged_file_is_refused(engine, saved):
    file, expected = saved
    whole = file.read_bytes()
    header = read(file)[0]

    def flipped(place: int) -> bytes:
        return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]

    def with_number_as_hash() -> bytes:
        text = whole[8 : len(header.raw) - CHECKSUM_BYTES].replace(
            f'\\"{header.entries[0].content_hash}\\"'.encode(), b"0"
        )
        return (raw := struct.pack("<Q", len(text)) + text) + xxhash.xxh3_64_digest(raw) + whole[len(header.raw) :]

    def renamed(name: str, value: object) -> bytes:
        entries = [header.entries[0].model_copy(update={name: value}), *header.entries[1:]]
        return Header(entries, header.dtype, header.details).raw + whole[len(header.raw) :]

    with PromptCache(engine, STORY) as cache:
        for data, says in (
            (whole[:-10], "truncated"),
            (whole + b"x", "truncated or damaged"),
            (whole[:30], "truncated|no container"),
            (b"", "truncated"),
            (b"{}" * 50, "no container"),
            (flipped(len(whole) - 7), "checksum of layer . differs"),
            (flipped(len(whole) - 17), "checksum of layer . differs"),
            (flipped(len(header.raw) + 3), "checksum of layer 0 differs"),
            (flipped(whole.index(b"base_position") + 16), "checksum of its header differs"),
            (whole.replace(FORMAT.encode(), b"choreograph-kv-1"), "has format 'choreograph-kv-1', this version reads"),
            (save_tensors({"0.keys": torch.zeros(2)}), "has no format, this version reads"),  # as it was before
            (renamed("name", "c#0"), "other modules"),
            (renamed("base_position", -1), r"no valid header \(.*base_position"),
            (with_number_as_hash(), r"no valid header \(.*content_hash"),
            (renamed("base_position", 1), "checksum of layer 0 differs"),
        ):
            file.write_bytes(data)
            with pytest.raises(
                CacheFileError, match=rf"story\.safetensors.*({says}).*: remove it and save the cache again"
            ):
                cache.load(file)
        file.unlink()
        with pytest.raises(CacheFileError, match=r"story\.safetensors cannot be read \(No such file"):
            cache.load(file)
        file.write_bytes(whole)
        cache.load(file)
        assert answer(cache) == expected


def test_a_forged_header_leaves_nothing_behind(engine, saved):
    """It names content that these modules do not have, and its checksums are right."""
    file, expected = saved
    header, blocks = read(file)
    first, *others, last = header.entries
    entries = [
        first.model_copy(update={"content_hash": last.content_hash}),
        *others,
        last.model_copy(update={"content_hash": first.content_hash}),
    ]
    rewrite(file, Header(entries, header.dtype, header.details), blocks)
    with PromptCache(engine, STORY) as cache:
        with pytest.raises(InvalidRequestError, match="the copy has content hash"):
            cache.load(file)
        assert answer(cache) == expected


def test_a_forged_header_cannot_bring_in_other_shapes(engine, saved):
    """A file whose tensors and header were both rewritten is refused if the shapes do not fit."""
    file, _ = saved
    header, blocks = read(file)
    shapes = {
        key: (num_tokens, heads, width // 2) for key, (num_tokens, heads, width) in header.entries[0].shapes.items()
    }
    entries = [header.entries[0].model_copy(update={"shapes": shapes}), *header.entries[1:]]
    halves = [
        block._replace(tensors=tuple(rows[:, : rows.shape[1] // 2].copy() for rows in block.tensors))
        if header.blocks[block.number].entry == 0
        else block
        for block in blocks
    ]
    rewrite(file, Header(entries, header.dtype, header.details), halves)
    with pytest.raises(CacheFileError, match="in another shape than"):
        PromptCache(engine, STORY).load(file)
