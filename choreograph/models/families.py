"""The architectures that are proved, as a table of facts. A row is added with a tiny configuration that the tests run.

What a layer does with positions, windows and scores is measured on every model that is loaded (`probe`); the table says
what has to be found, so that neither a new version of transformers nor an odd configuration goes unseen.
"""

from typing import Literal, NamedTuple

PROOF = "tests/models/test_families.py"
Positions = Literal["rotary", "alibi", "learned"]


class Family(NamedTuple):
    """positions: how tokens are told apart. what: what is special, for people. bridge: its attention predates the
    interface and is computed by a function of `bridges`. proof: the test that runs this family."""

    what: str = ""
    positions: tuple[Positions, ...] = ("rotary",)
    bridge: bool = False
    proof: str = PROOF


FAMILIES: dict[str, Family] = {
    "llama": Family("scaled rotary (llama3, linear, yarn)"),
    "mistral": Family("sliding window"),
    "mixtral": Family("mixture of experts, sliding window"),
    "qwen2": Family("key biases, windows on upper layers"),
    "qwen3": Family("query and key norms"),
    "qwen3_moe": Family("query and key norms, mixture of experts"),
    "phi": Family("partial rotary, parallel blocks"),
    "phi3": Family("joint projections, long-rope, sliding window"),
    "gemma2": Family("capped scores, alternating windows"),
    "gemma3_text": Family("two rotary bases, windows on five of six layers"),
    "olmo2": Family("norms behind the blocks"),
    "granite": Family("scaled residuals and scores"),
    "smollm3": Family("some layers without rotary"),
    "gpt_neox": Family("partial rotary, joint projections"),
    "gpt_oss": Family("attention sinks, alternating windows, yarn, mixture of experts"),
    "falcon": Family("multi-query or grouped, rotary or ALiBi", ("rotary", "alibi"), bridge=True),
    "mpt": Family("ALiBi", ("alibi",), bridge=True),
    "bloom": Family("ALiBi", ("alibi",), bridge=True),
    "gpt2": Family("learned positions: messages stay where they were encoded", ("learned",)),
    "opt": Family("learned positions: messages stay where they were encoded", ("learned",)),
}
