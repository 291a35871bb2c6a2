"""Check that a tokenizer does what its files say.

Every field of `tokenizer_config.json` that changes token ids or text is in the tables below: it is applied, refused,
or named in a warning. transformers drops some of them silently where there is a `tokenizer.json`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ...errors import ModelError

_log = logging.getLogger("choreograph")

_APPLIED = {  # by transformers, for every tokenizer
    *("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens", "added_tokens_decoder"),
    *("chat_template", "split_special_tokens", "tokenizer_class", "tokenizer_file", "vocab_file", "merges_file"),
    *("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "post_processor"),
    *("clean_up_tokenization_spaces", "from_slow", "use_fast", "tokenizer_type", "fix_mistral_regex"),
}
_INERT = {  # of padding, truncation and training, which no request uses, or descriptions
    *("padding_side", "truncation_side", "pad_to_multiple_of", "pad_token_type_id", "max_length", "stride"),
    *("truncation_strategy", "model_max_length", "max_len", "model_input_names", "return_token_type_ids"),
    *("name_or_path", "processor_class", "auto_map", "special_tokens_map_file", "transformers_version", "verbose"),
    *(
        "is_local",
        "local_files_only",
        "files_loaded",
        "backend",
        "device_map",
        "trim_offsets",
        "unk_id",
        "_commit_hash",
    ),
    *("max_model_input_sizes", "response_template", "response_schema", "chat_control_tokens", "init_inputs"),
    *("spaces_between_special_tokens", "use_default_system_prompt", "image_token", "audio_token", "video_token"),
    *("legacy", "legacy_behaviour"),  # of the conversion from sentencepiece; `tokenizer.json` has its result
}
_CHECKED = {"add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case"}  # by `apply_tokenizer_fields`
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values of fields that are not applied and change nothing
    **dict.fromkeys(("remove_space", "keep_accents", "add_dummy_prefix_space", "strip_accents"), (None, False)),
    **dict.fromkeys(("sp_model_kwargs", "dropout"), (None, {}, 0)),
    "errors": (None, "replace"),
    "tokenize_chinese_chars": (None, True),
}
_BLANKS = ("\u0120", "\u2581")  # how byte-level and sentencepiece tokens write a leading space


def apply_tokenizer_fields(tokenizer: Any, source: str, name: str) -> None:
    """Apply or check the fields of a loaded tokenizer.

    Logs one warning that names the fields that are neither applied nor known.

    Args:
        source: folder or Hub id.
        name: of the model.

    Raises:
        ModelError: if the tokenizer splits text at random.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if dropout := getattr(getattr(backend, "model", None), "dropout", None):
        raise ModelError(f"model {name!r}: tokenizer.json has dropout={dropout}: token ids are random; set it to null")
    if type(getattr(backend, "model", None)).__name__ == "BPE" and not getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    ):
        tokenizer.clean_up_tokenization_spaces = False  # transformers ignores it for BPE, with a warning
    fields: Mapping[str, Any] = get_tokenizer_config(source)
    limit = getattr(tokenizer, "model_max_length", 0)
    if not isinstance(limit, (int, float)):  # it is compared with the length of every text
        raise ModelError(f"model {name!r}: tokenizer_config.json has model_max_length={limit!r}: use a number")
    ignored = [
        f"{key}={value!r}"
        for key, value in fields.items()
        if not (key in _APPLIED | _INERT | _CHECKED or key.endswith("_token"))
        and value not in _NEUTRAL.get(key, (None,))
    ]
    ignored += [
        f"{key}={fields[key]!r}" for key in sorted(_CHECKED & fields.keys()) if _differs(tokenizer, fields, key)
    ]
    if ignored:
        _log.warning(
            "%s: not applied of its tokenizer: %s; token ids may differ from the model's own", name, ", ".join(ignored)
        )


def _differs(tokenizer: Any, fields: Mapping[str, Any], key: str) -> bool:
    """Return whether the tokenizer does not do what a checked field says."""
    value = fields[key]
    if value is None:
        return False
    if key == "do_lower_case":
        return bool(value) != (_ids(tokenizer, "A") == _ids(tokenizer, "a"))
    if key == "add_prefix_space":
        first, spaced = (tokenizer.convert_ids_to_tokens(_ids(tokenizer, text)[:1]) for text in ("a", " a"))
        has_blanks = bool(spaced) and str(spaced[0]).startswith(_BLANKS)
        return has_blanks and bool(value) != str(first[0]).startswith(_BLANKS)
    if key == "add_bos_token" and value and tokenizer.bos_token_id is not None and not _adds(tokenizer, key):
        tokenizer.add_bos_token = True
        if hasattr(tokenizer, "update_post_processor"):
            tokenizer.update_post_processor()
    return bool(value) != _adds(tokenizer, key)


def _adds(tokenizer: Any, key: str) -> bool:
    """Return whether text gets the token of `add_bos_token` or `add_eos_token`."""
    ids, (number, index) = (
        tokenizer("a")["input_ids"],
        {
            "add_bos_token": (tokenizer.bos_token_id, 0),
            "add_eos_token": (tokenizer.eos_token_id, -1),
        }[key],
    )
    return number is not None and len(ids) > 1 and ids[index] == number


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
