"""Public reports on files of GGUF: a size, a count or a type that lies is refused by name."""

import pytest

from benchmarks.torture.file_mutations import GGUFField, split_gguf
from benchmarks.torture.file_readers import gguf_file
from choreograph.errors import ModelError
from choreograph.models.loader import load


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Loads a file from its fields."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def convert(fields):
        head, valid = b"".join(field.pack() for field in fields[:-1]), split_gguf(gguf_file())
        padding = -sum(len(field.pack()) for field in valid[:-1]) % 32
        data = b"\0" * (-len(head) % 32) + fields[-1].value[padding:]
        (tmp_path / "tiny.gguf").write_bytes(head + data)
        return load(tmp_path / "tiny.gguf")

    return convert


def fields_of(name):
    """The fields of the valid file, and those behind a key or tensor of a name."""
    fields = split_gguf(gguf_file())
    group = next(field.group for field in fields if field.kind == "text" and field.value == name.encode())
    return fields, [field for field in fields if field.group == group]


def sizes_of(tensor):
    """Number of dimensions, and the dimensions."""
    counts = [field for field in tensor if field.kind == "count"]
    return counts[1], [field for field in tensor if field.kind == "number"]


def test_the_valid_file_is_read(convert):
    assert convert(split_gguf(gguf_file())).model_info.layers == 2


@pytest.mark.parametrize("size", [0, (1 << 42) + 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1])
@pytest.mark.parametrize("place", [0, 1])
def test_a_dimension_of_zero_or_one_whose_product_wraps(convert, size, place):
    fields, tensor = fields_of("blk.0.attn_q.weight")
    sizes_of(tensor)[1][place].value = size
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        convert(fields)


@pytest.mark.parametrize("sizes", [(1 << 32, 1 << 32), ((1 << 63) - 1, 2), (1 << 62, 4), (1 << 33, 1 << 31)])
def test_dimensions_whose_product_is_small_modulo_two_to_64(convert, sizes):
    fields, tensor = fields_of("token_embd.weight")
    for field, size in zip(sizes_of(tensor)[1], sizes, strict=True):
        field.value = size
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        convert(fields)


@pytest.mark.parametrize("count", [0, 5, 1_000_000, (1 << 32) - 1])
def test_any_number_of_dimensions(convert, count):
    fields, tensor = fields_of("blk.1.ffn_up.weight")
    sizes_of(tensor)[0].value = count
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        convert(fields)


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.head_count"])
@pytest.mark.parametrize("value", [0, 513, 1 << 20, (1 << 32) - 1])
def test_more_layers_or_heads_than_the_file_has_tensors_for(convert, key, value):
    fields, group = fields_of(key)
    group[-1].value = value
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        convert(fields)


def test_an_empty_key(convert):
    fields, group = fields_of("general.name")
    group[0].value, group[1].value = 0, b""
    assert convert(fields).model_info.layers == 2  # a key that nothing reads


@pytest.mark.parametrize(("kind", "format"), [(0, "B"), (2, "H"), (10, "Q")])
def test_types_of_tokens_in_an_array_of_another_width(convert, kind, format):
    """The type that the file says is read, never the one that the reader expects."""
    fields, group = fields_of("tokenizer.ggml.token_type")
    [field for field in group if field.kind == "type"][1].value = kind
    with pytest.raises(ModelError, match=r"tiny\.gguf"):  # what follows stands elsewhere
        convert(fields)
    for place, field in enumerate(fields):
        if field.group == group[0].group and field.kind == "number":
            fields[place] = GGUFField("number", format, field.value, field.group)
    assert convert(fields).tokenizer("<|user|>", add_special_tokens=False).input_ids == [4]
