"""What is measured: the exact shape of Llama-3.1-8B, and how long texts, contexts and prompts are. A tiny shape beside
it is a trial of the program, on any machine. Owns sizes; measures nothing."""

from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig


@dataclass(frozen=True)
class Flow:
    """One workflow as it is timed. said: tokens of every message, by stage; others say `short`. verdict: whether the
    short ones have to be read as "no"."""

    workflow: str
    stage_tokens: dict[str, int]
    default_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    verdict: bool = False


@dataclass(frozen=True)
class Shape:
    """A model's shape and all sizes. context: tokens that a decode step sees. cached: tokens of cached messages,
    modules and shared prefills, with `new` behind them. fixed, varying, agents: of KVFlow's prompts. task: words of a
    problem. most: rounds of any measurement."""

    name: str
    config: LlamaConfig
    context: int
    num_cached_tokens: int
    num_new_tokens: int
    agents: int
    fixed: int
    dynamic: int
    task_words: int
    flows: dict[str, Flow]
    cache_tokens: int
    rows: tuple[int, ...]
    max_rounds: int

    @property
    def head_dim(self) -> int:
        """Of one head."""
        return int(self.config.hidden_size // self.config.num_attention_heads)

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of one token, in bfloat16."""
        return int(2 * 2 * self.config.num_hidden_layers * self.config.num_key_value_heads * self.head_dim)


ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}


def flows(long: int, short: int, branches: int, large_branches: int, solution: int) -> dict[str, Flow]:
    """The papers' workflows in their own numbers of agents and rounds. long, short: tokens of a message that argues,
    and of one that only answers. scaled: branches of the large tree, with solutions of so many tokens."""
    said = dict.fromkeys(("solve", "affirmative", "negative", "round 1", "round 2", "round 3"), long)
    plain = {"prompt": "plain"}
    few_words = {**plain, "form": "short"}  # of votes and verdicts
    large = {**few_words, "branches": large_branches, "voters": 4}
    return {
        "tree_of_thoughts": Flow("tree_of_thoughts", said, short, {**few_words, "branches": branches}),
        "debate_iterative": Flow("debate_iterative", said, short, few_words, verdict=True),
        "debate_parallel": Flow("debate_parallel", said, short, plain),
        "scaled": Flow("tree_of_thoughts", {"solve": solution}, short, large),
    }


FULL = Shape(
    name="shape of Llama-3.1-8B, random weights, bfloat16",
    config=LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_parameters=ROPE,
        tie_word_embeddings=False,
        eos_token_id=None,
    ),
    context=2048,
    num_cached_tokens=5120,
    num_new_tokens=32,
    agents=6,
    fixed=8192,
    dynamic=32,
    task_words=70,
    flows=flows(384, 16, 8, 256, 256),
    cache_tokens=147_456,
    rows=(2, 4, 8, 16, 32, 64, 128, 256),
    max_rounds=12,
)
TINY = Shape(
    name="tiny shape, a trial that says nothing of speed",
    config=LlamaConfig(
        vocab_size=50_000,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        rope_parameters={**ROPE, "original_max_position_embeddings": 512},
        eos_token_id=None,
    ),
    context=64,
    num_cached_tokens=80,
    num_new_tokens=4,
    agents=3,
    fixed=64,
    dynamic=4,
    task_words=5,
    flows=flows(4, 2, 2, 4, 3),
    cache_tokens=4096,
    rows=(2, 4),
    max_rounds=1,
)
