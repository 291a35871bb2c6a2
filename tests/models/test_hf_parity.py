"""Ordinary prompts against Hugging Face itself: logits, greedy tokens, and bits where nothing moves."""

import copy

import pytest
import torch
from helpers import tiny_models
from helpers.inspect_engine import inspect

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a valley between two mountains,",
]


@pytest.fixture(scope="module")
def plain():
    """The embedded model in float32, in an engine of its own."""
    return Engine.from_pretrained(
        dtype="float32", config=EngineConfig(cache=CacheConfig(capacity=4096, poison_freed_pages=True))
    )


def distribution(message, size: int) -> torch.Tensor:
    return torch.tensor([[got.top[token] for token in range(size)] for got in message.logprobs])


def test_one_message_and_a_chain_give_the_logits_of_hugging_face(plain):
    model, tokenizer = inspect(plain).model, plain.tokenizer
    ids = tokenizer("Water boils at one hundred degrees. Ice melts at zero. Steam condenses when it cools.")[
        "input_ids"
    ]
    size = model.config.vocab_size
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    with plain.session() as session:
        once = session.decode(ids, sampling=SamplingParams(max_tokens=1, logprobs=size, temperature=0))
        chain = []
        for first, last in ((0, 5), (5, 6), (6, 12)):
            chain.append(session.prefill(ids[first:last], parents=list(chain)))
        last = session.decode(ids[12:], parents=chain, sampling=SamplingParams(max_tokens=1, logprobs=size))
        for message in (once, last):
            torch.testing.assert_close(distribution(message, size)[0], expected[-1], atol=2e-4, rtol=0)
        assert last.position == 12
    plain.check()


@pytest.mark.parametrize("prompt", [PROMPTS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in PROMPTS[1:])])
def test_greedy_decode_gives_the_tokens_of_generate(plain, prompt):
    """64 tokens, the second one included: it is the first that a gap behind the header would change."""
    model, tokenizer = inspect(plain).model, plain.tokenizer
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    greedy = SamplingParams(temperature=0, max_tokens=64)
    with plain.session() as session:
        whole = session.decode(ids[0].tolist(), sampling=greedy)
        split = session.decode(ids[0, -1:].tolist(), [session.prefill(ids[0, :-1].tolist())], sampling=greedy)
        for message in (whole, split):
            assert message.output_token_ids == expected[0, ids.shape[1] :].tolist()


def test_the_model_stays_usable_by_its_owner(plain):
    """Hooked only while a step runs."""
    model = inspect(plain).model
    assert model.config._attn_implementation == "sdpa"
    with plain.session() as session:
        session.prefill([1, 2, 3]).result()
    assert model.config._attn_implementation == "sdpa"
    copy.deepcopy(model)  # nothing was hung on it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_home_placement_is_bit_identical_to_a_plain_model(dtype):
    """With the flash backend, which calls the kernel that transformers calls: same keys, values and logits."""
    model = tiny_models.model(dtype)
    ids = torch.randint(0, tiny_models.VOCABULARY, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    engine = Engine.from_pretrained(model, config=EngineConfig(backend="sdpa", cache=CacheConfig(capacity=512)))
    with engine.session() as session:
        everything = SamplingParams(max_tokens=1, logprobs=tiny_models.VOCABULARY)
        message = session.decode(ids, sampling=everything)
        assert torch.equal(
            distribution(message, tiny_models.VOCABULARY)[0], expected.logits[0, -1].float().log_softmax(-1)
        )
        arena, entry = inspect(engine).pool, inspect(message).entry
        slots = [entry.slot(j) for j in range(len(ids))]
        for layer, kept in enumerate(expected.past_key_values.layers):
            assert torch.equal(arena.keys[layer][slots].transpose(0, 1), kept.keys[0])
            assert torch.equal(arena.values[layer][slots].transpose(0, 1), kept.values[0])
