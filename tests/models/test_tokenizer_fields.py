"""Fields of a tokenizer's files are applied, refused, or named in one warning."""

import json
import logging

import pytest
from helpers import tiny_models
from helpers.gguf_vocabularies import original
from transformers import AutoTokenizer

from choreograph.errors import ModelError
from choreograph.models.loader import load, load_tokenizer

END = 0  # token id of <|end|>


@pytest.fixture(scope="module")
def files() -> dict:
    return json.loads(original("gpt-2").to_str())


def write(folder, files, *, model=None, kind="PreTrainedTokenizerFast", **fields):
    """A folder with a byte-level tokenizer; model: further options of its BPE."""
    tokenizer = files | {"model": files["model"] | (model or {})}
    config = {"tokenizer_class": kind, "bos_token": "<|end|>", "eos_token": "<|end|>", **fields}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def loaded(folder, files, caplog, **options):
    with caplog.at_level(logging.WARNING, "choreograph"):
        tokenizer, _ = load_tokenizer(write(folder, files, **options))
    return tokenizer, [record.getMessage() for record in caplog.records if record.name == "choreograph"]


INERT = {
    "padding_side": "left",
    "truncation_side": "left",
    "model_max_length": 5,
    "legacy": False,
    "clean_up_tokenization_spaces": True,
    "add_bos_token": False,
    "add_eos_token": False,
    "add_prefix_space": False,
    "do_lower_case": False,
    "errors": "replace",
    "sp_model_kwargs": {},
    "additional_special_tokens": ["<|end|>"],
    "pad_token": None,
    "image_token": None,
    "future": None,
}


@pytest.mark.parametrize("key", INERT)
def test_fields_that_change_nothing_are_accepted(tmp_path, files, caplog, key):
    tokenizer, warnings = loaded(tmp_path, files, caplog, **{key: INERT[key]})
    assert not warnings
    text = "a cat , 12 hats !"
    ids = original("gpt-2").encode(text).ids
    assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text


NOT_APPLIED = {
    "add_eos_token": True,
    "add_prefix_space": True,
    "do_lower_case": True,
    "add_dummy_prefix_space": True,
    "remove_space": True,
    "errors": "ignore",
    "sp_model_kwargs": {"alpha": 0.1},
    "future_split": 3,
}


@pytest.mark.parametrize("key", NOT_APPLIED)
def test_fields_that_are_not_applied_are_named_in_a_warning(tmp_path, files, caplog, key):
    _, warnings = loaded(tmp_path, files, caplog, **{key: NOT_APPLIED[key]})
    assert len(warnings) == 1 and f"{key}={NOT_APPLIED[key]!r}" in warnings[0]


def test_several_fields_give_one_warning(tmp_path, files, caplog):
    _, warnings = loaded(tmp_path, files, caplog, future_split=3, future_join=4)
    assert len(warnings) == 1 and "future_split=3, future_join=4" in warnings[0]


def test_text_starts_with_bos_where_the_configuration_says_so(tmp_path, files, caplog):
    tokenizer, warnings = loaded(tmp_path, files, caplog, add_bos_token=True)
    assert tokenizer("The cat")["input_ids"] == [END, *original("gpt-2").encode("The cat").ids]
    assert not warnings


def test_bos_that_the_configuration_excludes_is_named(tmp_path, files, caplog):
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [END], "tokens": ["<|end|>"]}},
    }
    tokenizer, warnings = loaded(tmp_path, files | {"post_processor": processor}, caplog, add_bos_token=False)
    assert tokenizer("The cat")["input_ids"][0] == END
    assert len(warnings) == 1 and "add_bos_token=False" in warnings[0]


def test_a_prefix_space_that_the_tokenizer_puts_is_no_warning(tmp_path, files, caplog):
    tokenizer, warnings = loaded(tmp_path, files, caplog, kind="GPT2Tokenizer", add_prefix_space=True)
    assert tokenizer("cat")["input_ids"] == tokenizer(" cat")["input_ids"]
    assert not warnings


@pytest.mark.parametrize("splits", [False, True])
def test_special_tokens_in_text_are_split_where_the_configuration_says_so(tmp_path, files, caplog, splits):
    tokenizer, warnings = loaded(tmp_path, files, caplog, split_special_tokens=splits)
    ids = tokenizer("a<|end|>")["input_ids"]
    assert (END in ids) != splits and tokenizer.decode(ids) == "a<|end|>"
    assert not warnings


def test_an_added_token_takes_the_spaces_that_its_fields_say(tmp_path, files, caplog):
    added = [token | {"lstrip": True} if token["id"] == END else token for token in files["added_tokens"]]
    tokenizer, warnings = loaded(tmp_path, files | {"added_tokens": added}, caplog)
    assert tokenizer("a  <|end|>")["input_ids"] == [*tokenizer("a")["input_ids"], END]
    assert not warnings


def test_dropout_of_merges_is_refused(tmp_path, files):
    with pytest.raises(ModelError, match=r"dropout=0\.5"):
        load_tokenizer(write(tmp_path, files, model={"dropout": 0.5}))


def test_a_model_is_loaded_with_the_same_checks(tmp_path, files, caplog):
    size = original("gpt-2").get_vocab_size()
    tiny_models.build(vocabulary=size).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    write(tmp_path, files, future_split=3)
    (tmp_path / "config.json").write_text(config)
    assert (
        load(tmp_path).tokenizer("The cat")["input_ids"]
        == AutoTokenizer.from_pretrained(tmp_path)("The cat")["input_ids"]
    )
    assert "future_split=3" in caplog.text
