"""Tokenizers with the splits of published ones, and their metadata in a GGUF file."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
    "The cat's 12 dogs didn't see 10 20  30   40 hats!\n\n123 (and 4567) über 你好, WE'LL see x=1;\n\tTwo words  here"
)
SAMPLES = ("   12", "\n\n123", "\n 12", "10 20  30   40", TEXT, "WE'LL don't", " ", "a!!\n\nb", "12345678", "e\u0301 é")
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def split(pattern: str):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINALS = {  # the published tokenizers
    "gpt-2": [GPT2],
    "smollm": [DIGITS, GPT2],
    "starcoder": [DIGITS, GPT2],
    "llama-bpe": [split(CL100K % "{1,3}"), BYTES],
    "qwen2": [split(CL100K % ""), BYTES],
    "deepseek-coder": [split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥]+"), DIGITS, BYTES],
    "deepseek-llm": [
        *map(split, (r"[\r\n]", r"\s?[A-Za-zÀ-ÖØ-öø-ÿ]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥]+")),
        *(DIGITS, BYTES),
    ],
    "falcon": [split(r"[\p{P}$+<=>^~|`]+"), GPT2, split("[0-9][0-9][0-9]")],
}


def original(name: str) -> Tokenizer:
    """Return a byte-level tokenizer that is trained with the splits of a published one."""
    result = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    result.normalizer = normalizers.NFC() if name == "qwen2" else None
    result.pre_tokenizer, result.decoder = pre_tokenizers.Sequence(ORIGINALS[name]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<｜end▁of▁turn｜>"]  # the second is not of the alphabet
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=special)
    result.train_from_iterator([*SAMPLES, TEXT] * 5, trainer)
    return result


def vocabulary(tokenizer: Tokenizer, pre: str | None, **further) -> dict:
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "ggml.model": "gpt2",
        "ggml.tokens": tokens,
        "ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "ggml.merges": [" ".join(merge) for merge in merges],
        "ggml.eos_token_id": 0,
        **({"ggml.pre": pre} if pre else {}),
        **further,
    }


def sentencepiece_vocabulary(**further) -> dict:
    """Pieces by frequency, bytes for all other characters, as a sentencepiece model has them."""
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    learner.train_from_iterator([TEXT.replace("\n", " ")] * 5, trainer)
    pieces = [learner.id_to_token(index) for index in range(learner.get_vocab_size())]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<turn>", *pieces]
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.scores": [0.0] * 260 + [float(-index) for index in range(len(pieces))],
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * len(pieces),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **further,
    }
