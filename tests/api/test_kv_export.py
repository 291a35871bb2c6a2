"""Copies of encodings: they come back as what they were made of, and as nothing else."""

import pytest
import torch
from helpers import model_variants, tiny_models
from helpers.inspect_engine import inspect
from safetensors.torch import save_file

from choreograph import Engine, SamplingParams
from choreograph.api.call import Call
from choreograph.errors import CacheFileError, InvalidRequestError, SessionClosedError
from choreograph.kv_cache.entry import EntryLayers
from choreograph.kv_cache.tiers import TransferOps
from choreograph.messages import kv_export as copies
from choreograph.messages.kv_export import KVSnapshot
from choreograph.models.info import weights_hash

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TOKENS = [4, 5, 6, 7]


@pytest.fixture
def engine():
    return tiny_models.engine()


def said(session, tokens):
    return session.decode([9], [session.prefill(tokens)], sampling=GREEDY).output_token_ids


def test_a_copy_is_of_its_tokens_alone(engine):
    with tiny_models.engine().session() as session:
        expected = said(session, [8, 8, 8, 8])
    with engine.session() as session:
        copy = session.prefill(TOKENS).export_kv()
        for tokens, says in (([8, 8, 8, 8], "give the tokens"), ([4], "these 1 tokens"), ([*TOKENS, 7], "these 5")):
            with pytest.raises(InvalidRequestError, match=says):
                session.import_kv(tokens, copy)
        for odd in (None, tuple(copy)):
            with pytest.raises(InvalidRequestError, match=r"snapshot is of type .*export_kv"):
                session.import_kv(TOKENS, odd)
        cut = copy._replace(layers=copy.layers[:1])
        with pytest.raises(InvalidRequestError, match="in 1 layers"):
            session.import_kv(TOKENS, cut)
        wide = copy._replace(layers=[(keys[:, :1], values[:, :1]) for keys, values in copy.layers])
        with pytest.raises(InvalidRequestError, match="the copy has"):
            session.import_kv(TOKENS, wide)
        assert said(session, [8, 8, 8, 8]) == expected
        engine.check()


def test_a_copy_that_was_made_by_hand_is_refused_in_words(engine):
    with engine.session() as session:
        copy = session.prefill(TOKENS).export_kv()
        for field, values in {
            "base_position": (None, "0", 0.5, -1, 1 << 70, torch.zeros(1)),
            "layers": (None, 3, [None, None], [layer[:1] for layer in copy.layers], by_numpy(copy)),
            "model_hash": (None, 3),
            "content_hash": (None, 3, b"x"),
            "checksum": ("7", 7.0),
        }.items():
            for value in values:
                with pytest.raises(InvalidRequestError, match=rf"snapshot.{field} is .*export_kv"):
                    session.import_kv(TOKENS, copy._replace(**{field: value}))
        for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.float64):
            odd = copy._replace(layers=[(keys, values.to(dtype)) for keys, values in copy.layers])
            with pytest.raises(InvalidRequestError, match=rf"{dtype}.*the cache in torch.float32"):
                session.import_kv(TOKENS, odd)
        lists = copy._replace(layers=tuple(list(layer) for layer in copy.layers))
        assert session.import_kv(TOKENS, lists).usage.cached_tokens == 4
    assert engine.stats().num_referenced_entries == 0


def by_numpy(copy):
    return [(keys.numpy(), values.numpy()) for keys, values in copy.layers]


def flipped(copy, layer, part):
    """One bit of it is another."""
    layers = [tuple(tensor.clone() for tensor in pair) for pair in copy.layers]
    layers[layer][part].view(torch.uint8)[2, 1, -1] ^= 1
    return copy._replace(layers=layers)


def test_a_damaged_copy_is_found_out(engine):
    with tiny_models.engine().session() as session:
        copy = session.prefill(TOKENS).export_kv()
    layers = [tuple(tensor.permute(1, 0, 2).contiguous().permute(1, 0, 2) for tensor in pair) for pair in copy.layers]
    with engine.session() as session:
        for damaged in (
            flipped(copy, 0, 0),
            flipped(copy, 1, 1),
            copy._replace(base_position=3),
            copy._replace(checksum=7),
        ):
            with pytest.raises(InvalidRequestError, match="damaged"):
                session.import_kv(TOKENS, damaged)
        assert not engine.stats().num_unreferenced_entries
        message = session.import_kv(TOKENS, copy._replace(layers=layers))
        assert message.usage.cached_tokens == 4 and message.export_kv().checksum == copy.checksum
    engine.check()


def test_a_copy_without_a_checksum_is_taken_where_somebody_vouches_for_it(engine):
    with tiny_models.engine().session() as session:
        copy = session.prefill(TOKENS).export_kv()
    old = KVSnapshot(*copy[:4])  # as it was written once
    with engine.session() as session:
        with pytest.raises(InvalidRequestError, match=r"no checksum.*export_kv.*check=False"):
            session.import_kv(TOKENS, old)
        assert session.import_kv(TOKENS, old, check=False).usage.cached_tokens == 4
    engine.check()


def test_what_a_closed_engine_does_not_take_back_leaves_nothing_held(engine):
    with tiny_models.engine().session() as session:
        copy = session.prefill(TOKENS).export_kv()
    with engine.session() as session:
        coming, work = session.build(Call("prefill", [1, 2, 3])).request, TransferOps(lambda layer: None)
        entry = copies.reserve(inspect(engine).core, coming)
        engine.close()
        with pytest.raises(SessionClosedError):
            session.import_kv(TOKENS, copy)
        with pytest.raises(SessionClosedError):
            copies.start_remote_load(
                inspect(engine).core,
                coming,
                entry,
                work,
                inspect(engine).offload_manager.executor,
                EntryLayers(),
            )
        engine.check()
        engine.clear_cache()
        counts = inspect(engine).cache_manager.stats
        assert (
            counts["num_referenced_entries"] == counts["num_unreferenced_entries"] == 0
            and counts["num_free_pages"] == counts["num_pages"]
        )
        engine.check()


def test_a_copy_is_of_what_its_tokens_saw(engine):
    with engine.session() as session:
        seen, other = session.prefill([1, 2, 3]), session.prefill([3, 2, 1])
        copy = session.prefill(TOKENS, [seen]).export_kv()
        for parents, offsets in (((), None), ([other], None), ([seen], [1]), ([seen[0:2]], [0])):
            with pytest.raises(InvalidRequestError, match="give the tokens, parents and offsets"):
                session.import_kv(TOKENS, copy, parents, offsets, 3)
        assert session.import_kv(TOKENS, copy, [seen]).usage.cached_tokens == 4
        assert session.import_kv(TOKENS, copy, [seen], [10], 13).usage.cached_tokens == 4, "equal work elsewhere"


def test_a_copy_crosses_clients_and_engines(engine):
    with engine.session(client_id="one") as one:
        first = one.decode([1], sampling=GREEDY)
        second = one.prefill(TOKENS, [first, one.prefill([2, 2])])
        tokens, copies = first.tokens, (first.export_kv(), second.export_kv())
        expected = one.decode([9], [second], sampling=GREEDY).output_token_ids
    for other in (engine, tiny_models.engine()):
        rows = other.stats().num_batched_tokens
        with other.session(client_id="other") as session:
            first = session.import_kv(tokens, copies[0])
            second = session.import_kv(TOKENS, copies[1], [first, session.prefill([2, 2])])
            again = second.export_kv()
            assert again.content_hash == copies[1].content_hash and other.stats().num_batched_tokens == rows + 2
            assert all(torch.equal(a, b) for a, b in zip(again.layers[1], copies[1].layers[1], strict=True))
            assert session.decode([9], [second], sampling=GREEDY).output_token_ids == expected
        other.check()


def test_a_copy_behind_another_models_encoding_is_of_that():
    engine = model_variants.engine()
    with engine.session(model="math") as session:
        seen = session.prefill([1, 2, 3], model="base")
        reused = session.prefill(TOKENS, [seen], kv_reuse="reuse").export_kv()
        own = session.prefill(TOKENS, [seen]).export_kv()
        assert reused.content_hash != own.content_hash
        with pytest.raises(InvalidRequestError, match="give the tokens, parents and offsets"):
            session.import_kv(TOKENS, reused, [seen])
        assert session.import_kv(TOKENS, own, [seen]).usage.cached_tokens == 4
        engine.check()


@pytest.fixture
def near():
    """The tiny model with one embedding changed, between the values that a fingerprint samples."""
    model = tiny_models.build()
    with torch.no_grad():
        model.get_input_embeddings().weight[TOKENS[0], 1] += 1.0
    return Engine.from_pretrained(model)


def test_a_copy_is_of_all_weights_of_its_model(engine, near):
    assert near.model_info.fingerprint == engine.model_info.fingerprint
    assert inspect(engine).model_set.weights_hash("base") == inspect(tiny_models.engine()).model_set.weights_hash(
        "base"
    )
    with engine.session() as session, near.session() as other:
        copy = session.prefill(TOKENS).export_kv()
        with pytest.raises(InvalidRequestError, match="another model"):
            other.import_kv(TOKENS, copy)


def test_weights_that_a_checkpoint_holds_as_buffers_count():
    """As quantised ones do."""
    model = tiny_models.build()
    model.register_buffer("packed", torch.zeros(1000, dtype=torch.int8))
    before = weights_hash(model)
    model.packed[77] = 1
    assert weights_hash(model) != before


def test_the_name_of_a_copy_knows_deep_chains(engine):
    with engine.session() as session:
        message = session.prefill([1])
        for _ in range(1100):
            message = session.prefill([2], [message], offsets=[0], new_offset=1)
        copy = message.export_kv()
        assert session.import_kv([2], copy, message.parents, [0], 1).usage.cached_tokens == 1


def test_a_snapshot_is_saved_and_loaded(tmp_path):
    file = tmp_path / "folder" / "message.safetensors"
    with tiny_models.engine().session() as session:
        message = session.prefill([1, 2, 3, 4])
        snapshot = message.export_kv()
        snapshot.save(file)
    loaded = KVSnapshot.load(file)
    assert loaded[0] == snapshot[0] and loaded[2:] == snapshot[2:]
    assert all(
        torch.equal(a, b)
        for old, new in zip(snapshot.layers, loaded.layers, strict=True)
        for a, b in zip(old, new, strict=True)
    )
    with tiny_models.engine().session() as session:
        assert session.import_kv([1, 2, 3, 4], loaded).usage.computed_tokens == 0


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("truncated", "truncated"),
        ("flipped", "checksum of layer 1 differs"),
        ("empty", "truncated"),
        ("other format", "no format, this version reads 'choreograph-kv-2': remove it and export"),
        ("older format", "format 'choreograph-kv-1', this version reads 'choreograph-kv-2': remove it and export"),
        ("absent", "No such file"),
    ],
)
def test_a_damaged_snapshot_file_is_refused(damage, says, tmp_path):
    file = tmp_path / "message.safetensors"
    with tiny_models.engine().session() as session:
        session.prefill([1, 2, 3, 4]).export_kv().save(file)
    content = file.read_bytes()
    if damage == "flipped":
        content = content[:-13] + bytes([content[-13] ^ 1]) + content[-12:]
    file.write_bytes({"truncated": content[:-9], "empty": b""}.get(damage, content))
    if damage == "other format":
        save_file({"x": torch.zeros(9)}, file)
    if damage == "older format":
        save_file({"layers.0.keys": torch.zeros(9)}, file, {"format": "choreograph-kv-1", "base_position": "0"})
    if damage == "absent":
        file.unlink()
    with pytest.raises(CacheFileError, match=f"{file}.*{says}"):
        KVSnapshot.load(file)


def test_a_snapshot_that_has_changed_is_not_saved(engine, tmp_path):
    file = tmp_path / "message.safetensors"
    with engine.session() as session:
        snapshot = session.prefill(TOKENS).export_kv()
    snapshot.save(file)
    content = file.read_bytes()
    for changed, says in (
        (flipped(snapshot, 1, 0), "damaged, its checksum differs: export it again"),
        (snapshot._replace(base_position=3), "damaged"),
        (snapshot._replace(base_position=-1), "base_position.*use what Message.export_kv gave"),
        (snapshot._replace(layers=[]), "use what Message.export_kv gave"),
        (snapshot._replace(layers=[(k, v.half()) for k, v in snapshot.layers]), "torch.float16.*use what"),
        (snapshot._replace(layers=[(k.long(), v.long()) for k, v in snapshot.layers]), "torch.int64.*use what"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            changed.save(file)
        assert file.read_bytes() == content and [*tmp_path.iterdir()] == [file]
    snapshot._replace(checksum=None).save(file)
    assert KVSnapshot.load(file).checksum == snapshot.checksum
