"""Saved caches: as good as computing, and refused where they are stale, cut off or changed."""

import json
from copy import deepcopy

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect
from safetensors.torch import load_file, save_file
from test_prompt_cache import STORY, answer

from choreograph import Engine
from choreograph.errors import CacheFileError, InvalidRequestError
from choreograph.prompt_cache import PromptCache, module, schema, storage


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
    (tmp_path / "taken.json").mkdir()
    with PromptCache(engine, STORY) as cache:
        for place, says in (
            (tmp_path, "is a folder: name a file"),
            (".", "is a folder: name a file"),
            (tmp_path / "taken.safetensors", "where the manifest goes, is a folder"),
            (tmp_path / "file" / "deep.safetensors", "nothing can be written there"),
            (tmp_path / "story.json", "the manifest's"),
        ):
            with pytest.raises(CacheFileError, match=says):
                cache.save(place)
    assert not engine.stats().num_batched_tokens and sorted(p.name for p in tmp_path.iterdir()) == [
        "file",
        "taken.json",
    ]


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
    manifest = json.loads(file.with_suffix(".json").read_text())
    file.with_suffix(".json").write_text(
        json.dumps({**manifest, "fingerprints": {**manifest["fingerprints"], "tokenizer": "0" * 16}})
    )
    with pytest.raises(CacheFileError, match="made for tokenizer"):
        PromptCache(engine, STORY).load(file)


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


def test_damage(engine, saved):
    file, expected = saved
    whole, manifest = file.read_bytes(), file.with_suffix(".json").read_text()
    flipped = bytearray(whole)
    flipped[-7] ^= 1

    def damage(data: bytes = whole, text: str = manifest) -> None:
        file.write_bytes(data)
        file.with_suffix(".json").write_text(text)

    def edited(**fields: object) -> str:
        runs = json.loads(manifest)["runs"]
        return json.dumps({**json.loads(manifest), "runs": [{**runs[0], **fields}, *runs[1:]]})

    with PromptCache(engine, STORY) as cache:
        for data, text, says in (
            (whole[:-10], manifest, "cut off"),
            (bytes(flipped), manifest, "digest differs"),
            (whole, "{", "Invalid JSON"),
            (whole, "[]", "no manifest"),
            (whole, manifest.replace('"version": 5', '"version": 4'), "version 4: .* save the cache again"),
            (whole, manifest.replace("b#0", "c#0"), "other modules"),
            (whole, edited(base_position=-1), r"runs\.0\.base_position -1"),
            (whole, edited(content_hash=0), r"runs\.0\.content_hash 0"),
            (whole, edited(base_position=1), "digest differs"),
        ):
            damage(data, text)
            with pytest.raises(CacheFileError, match=says):
                cache.load(file)
        damage()
        file.with_suffix(".json").unlink()
        with pytest.raises(CacheFileError, match=r"story\.json: no such file"):
            cache.load(file)
        damage()
        cache.load(file)
        assert answer(cache) == expected


def test_a_forged_manifest_leaves_nothing_behind(engine, saved):
    """It names content that these modules do not have, and its digest is right."""
    file, expected = saved
    manifest = json.loads(file.with_suffix(".json").read_text())
    first, *_, last = manifest["runs"]
    first["content_hash"], last["content_hash"] = last["content_hash"], first["content_hash"]
    manifest["sha256"] = storage.compute_digest(manifest, file.read_bytes())
    file.with_suffix(".json").write_text(json.dumps(manifest))
    with PromptCache(engine, STORY) as cache:
        with pytest.raises(InvalidRequestError, match="the copy has content hash"):
            cache.load(file)
        assert answer(cache) == expected


def test_a_forged_manifest_cannot_bring_in_other_shapes(engine, saved):
    """A file whose tensors and manifest were both rewritten is refused if the shapes do not fit."""
    file, _ = saved
    tensors = {name: tensor[:, :-1].contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    manifest = json.loads(file.with_suffix(".json").read_text())
    manifest["sha256"] = storage.compute_digest(manifest, file.read_bytes())
    file.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(CacheFileError, match="expected"):
        PromptCache(engine, STORY).load(file)
