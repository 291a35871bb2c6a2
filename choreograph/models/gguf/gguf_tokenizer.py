"""Tokenizer of a GGUF file, from its tokens, merges and pre-tokenizer name."""

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from ...errors import ModelError

_log = logging.getLogger("choreograph")

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type: tokens that are never split

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_DIGIT = pre_tokenizers.Digits(individual_digits=True)


def _split(*patterns: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


_CJK, _HAN = "[一-龥ࠀ-一가-퟿]+", "[一-龥\u3040-ゟ゠-ヿ]+"
_WORD_BEFORE_PUNCTUATION = r" ?[^(\s|[.,!?…。，、।۔،])]+"
# Cased letters of the scripts that the published expression of DeepSeek lists.
_CASED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}"
    r"\x{AB30}-\x{AB69}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DFFF}]]"
)
_DEEPSEEK3_SPLIT = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BY_PIPELINE: list[tuple[list[Any], tuple[str, ...]]] = [
    (
        [_GPT2],
        (
            *("gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2", "jina-es", "jina-de"),
            *("gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert", "exaone4"),
            *("jina-v1-en", "jina-v2-code", "roberta-bpe"),
        ),
    ),
    ([_DIGIT, _GPT2], ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")),
    ([*_split(r"[\p{P}$+<=>^~|]+"), _GPT2, *_split(r"\p{N}+", "[0-9][0-9][0-9]")], ("default",)),
    ([*_split(r"[\p{P}$+<=>^~|`]+"), _GPT2, *_split("[0-9][0-9][0-9]")], ("falcon",)),
    ([*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), _DIGIT, _BYTES], ("deepseek-coder",)),
    (
        [*_split(r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK), _DIGIT, _BYTES],
        ("deepseek-llm",),
    ),
    ([*_split(r"\p{N}{1,3}", _HAN, _DEEPSEEK3_SPLIT), _BYTES], ("deepseek-v3", "hunyuan-dense")),
    ([*_split(_WORD_BEFORE_PUNCTUATION), _BYTES], ("bloom", "gpt3-finnish", "poro-chat")),
    ([*_split(_WORD_BEFORE_PUNCTUATION), _DIGIT, _BYTES], ("viking",)),
    ([*_split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), _BYTES], ("chatglm-bpe", "glm4")),
    ([*_split(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), _BYTES], ("stablelm2", "hunyuan", "grok-2", "solar-open")),
]
PRE_TOKENIZERS: dict[str, list[Any]] = {  # steps by the value of tokenizer.ggml.pre
    **{name: [*_split(pattern), _BYTES] for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items()},
    **{name: steps for steps, names in _BY_PIPELINE for name in names},
}
_WITH_NFC = {"qwen2", "qwen35", "command-r", "olmo", "mpt"}  # their tokenizers compose characters first
_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
_IGNORES_MERGES = {*_LLAMA3, "tekken", "youtu"}  # a word that is a token is not merged from its parts
_ADDS_BOS = {*_LLAMA3, "tekken"}  # unless the file says otherwise


def build_tokenizer(metadata: Mapping[str, Any], name: str) -> PreTrainedTokenizerFast | None:
    """Build the tokenizer from GGUF metadata; None if they describe none.

    Raises:
        ModelError: if the kind of tokenizer is not supported.
    """
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, tokens = ggml.get("model"), ggml.get("tokens")
    if not tokens or kind in (None, "none", "no_vocab"):
        return None
    builders = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}
    if kind not in builders:
        raise ModelError(f"model {name!r}: tokenizer.ggml.model={kind!r} is not served, {list(builders)} are")
    backend: Tokenizer = builders[kind](ggml, metadata["general.architecture"], name)
    types = ggml.get("token_type") or []
    named = {role: _token(ggml, f"{key}_token_id") for role, key in _SPECIAL_TOKENS.items()}
    special = {token for token in named.values() if token is not None}
    special.update(token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens if t in special])
    whole = [token for token, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in whole])
    adds_bos = ggml.get("add_bos_token", kind == "llama" or ggml.get("pre") in _ADDS_BOS)
    bos, eos = (adds_bos and named["bos_token"]), (ggml.get("add_eos_token") and named["eos_token"])
    if bos or eos:
        ids = [(token, tokens.index(token)) for token in {bos, eos} if token]
        single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        pair = [*single, *[part if part != "$A" else "$B" for part in single]]
        template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
        backend.post_processor = processors.Sequence([template])  # transformers rebuilds a template on its own
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _token(ggml: Mapping[str, Any], key: str) -> str | None:
    """Return a special token by metadata key, with defaults for sentencepiece."""
    defaults = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} if ggml["model"] == "llama" else {}
    number = ggml.get(key, defaults.get(key))
    return ggml["tokens"][number] if number is not None and 0 <= number < len(ggml["tokens"]) else None


def _build_byte_level(ggml: Mapping[str, Any], _: str, name: str) -> Tokenizer:
    pre = ggml.get("pre")
    if pre not in PRE_TOKENIZERS:
        fallback = "gpt-2" if pre is None else "default"
        _log.warning(
            "%s: tokenizer.ggml.pre=%r is not known, text is split as by %r: give the tokenizer= of the original model",
            name,
            pre,
            fallback,
        )
        pre = fallback
    merges = [tuple(merge.split(" ", 1)) for merge in ggml.get("merges", [])]
    vocab = {token: index for index, token in enumerate(ggml["tokens"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORES_MERGES))
    backend.normalizer = normalizers.NFC() if pre in _WITH_NFC else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece(ggml: Mapping[str, Any], architecture: str, _: str) -> Tokenizer:
    """Return transformers' tokenizer with sentencepiece's normalization and decoding."""
    described = {"tokenizer_type": "llama", **{key: ggml[key] for key in ("tokens", "scores", "merges") if key in ggml}}
    backend, _unused = convert_gguf_tokenizer(architecture, described)
    if architecture.startswith("gemma"):
        return backend
    has_prefix = ggml.get("add_space_prefix", True)
    blank = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blank] if has_prefix else [blank])
    backend.pre_tokenizer = None
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend
