"""A tokenizer of single characters with a chat template."""

from functools import cache

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<end>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<end>' }}{% endfor %}"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(.|\n)"), "isolated")
    backend.decoder = Fuse()
    result = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")
    result.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    result.chat_template = TEMPLATE
    return result
