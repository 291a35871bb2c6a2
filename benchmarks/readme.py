"""Write the measured tables of README.md and docs/benchmarks.md from the JSON results."""

import json
from pathlib import Path

from .common import RESULTS
from .peer_programs import PROGRAMS
from .peers import DECODES, PREFILLS, VLLM_BFLOAT16
from .vllm import GOALS, MESSAGES, PLAIN, SPANS

README = Path(__file__).parents[1] / "README.md"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: python -m benchmarks.readme -->", "<!-- /measured -->"
SHAPE = "H200, Llama 3.1 8B's shape with random weights"
SHORT = {"Tree of Thoughts": " (short votes)", "iterative debate": " (short verdicts)"}  # not the paper's form
DEBATES_AND_TREE = ("Tree of Thoughts", "iterative debate", "parallel debate")
PEER_ROWS = (  # (measure, peer) -> what a reader calls it
    {
        ("decode, 1 request behind 512, int4", "llama.cpp Q4_1"): (
            "decode, 1 request behind 512, int4 (compiled): speed against llama.cpp Q4_1"
        ),
        ("decode, 1 request behind 512", VLLM_BFLOAT16): (
            "decode, 1 request behind 512 (compiled): speed against vLLM's CPU build in bfloat16"
        ),
    }
    | {
        (name, "vLLM"): f"{name} (compiled): speed against vLLM's CPU build"
        for name in (
            *DECODES,
            *PREFILLS,
            *(  # of random tokens
                f"{program}: {measure}, choreograph choreographed"
                for program in PROGRAMS
                for measure in ("end to end", "first token")
            ),
        )
    }
    | {(name, "llama.cpp Q4_1"): f"{name} (compiled): speed against llama.cpp Q4_1" for name in DECODES}
    | {(name, "Hugging Face"): f"{name} (compiled): speed against eager Hugging Face" for name in DECODES}
)
README_ROWS = {  # benchmark -> (measure, peer or None) -> what a reader calls it
    "peers": PEER_ROWS,
    "peers_avx2": {
        (measure, peer): f"{label}{' in float32' * (peer in ('vLLM', 'Hugging Face'))}, AVX2 only"
        for (measure, peer), label in PEER_ROWS.items()
    },
    "vllm": {
        (f"{program}: {measure}, {side}", PLAIN): f"{program}, {measure}: vLLM's CPU build with the connector "
        f"({side.removeprefix('connector, ')}) against vLLM with its prefix cache alone"
        for program in GOALS
        for measure in ("end to end", "first token")
        for side in (SPANS, MESSAGES)
    },
    "ttft": {
        (
            "home: first token in decode steps",
            None,
        ): "time to first token after 4096 cached tokens, in decode steps (less is better)",
        (
            "moved: first token in decode steps",
            None,
        ): "time to first token after 4096 cached tokens, all parents at other positions (less is better)",
    },
    "arena": {("64k over 2k slots", None): "time of a step in a cache of 64k slots over one of 2k (1 is ideal)"},
    "speed": {
        (
            f"{workflow}: {measure}",
            None,
        ): f"{workflow}{SHORT.get(workflow, '')}: {words}, prefix mode over choreographed"
        for workflow in DEBATES_AND_TREE
        for measure, words in (("TTFT, steps", "time to first token"), ("end to end", "end to end"))
    },
    "scaling": {
        (
            "best, timed again on 5 other problems: 64 branches, 4 voters",
            None,
        ): "Tree of Thoughts (short votes), 64 branches and 4 voters, on fresh problems: end to end, prefix mode over choreographed"
    },
    "prompt_cache": {
        (
            "5120 cached, 32 new: against no reuse",
            None,
        ): "time to first token, 5120 tokens in cached modules and 32 new: against no reuse",
        (
            "5120 cached, 32 new: against Hugging Face",
            None,
        ): "time to first token, 5120 tokens in cached modules and 32 new: against eager Hugging Face",
    },
    "kvflow": {
        (
            "2048/32/32: over device only",
            None,
        ): "ten agents whose prompts of 2048 tokens fill twice the cache: step graph with host memory over LRU that "
        "recomputes",
        ("2048/32/32: over host, reactive", None): "the ten agents: step graph over loading on demand",
    },
    "kvflow_peer": {
        ("8 desks: over device only", None): "eight desks of four agents, room for half: step graph with host memory "
        "over LRU that recomputes",
        ("8 desks: over host, reactive", None): "the eight desks: step graph over loading on demand",
    },
    "reuse": {
        (
            "base to adapter, again, qwen2.5-coder-0.5b-instruct-q4_k_m: first token behind 4096, fetched",
            None,
        ): "Qwen2.5-Coder-0.5B with an adapter: first token after 4096 tokens that its base computed in another "
        "process, half of the layers recomputed: speed against a full prefill",
    },
    "gpu": {
        (
            "decode step, batch 8: share of the limit",
            None,
        ): f"{SHAPE}: decode step of 8 requests, share of the speed of copying as many bytes",
        ("triton, prefill: SDPA over it", None): f"{SHAPE}: attention of a prefill of 2048 tokens, speed against SDPA",
        **{
            (
                f"{title}: {measure}",
                None,
            ): f"{SHAPE}: {title}{SHORT.get(title, '')}, {words}, prefix mode over choreographed"
            for title in DEBATES_AND_TREE
            for measure, words in (("TTFT", "time to first token"), ("end to end", "end to end"))
        },
        (
            "Tree of Thoughts, large: end to end",
            None,
        ): f"{SHAPE}: Tree of Thoughts (short votes) with 256 branches and 4 voters, "
        "end to end, prefix mode over choreographed",
        (
            "Prompt Cache: no reuse over modules",
            None,
        ): f"{SHAPE}: first token, 5120 tokens in cached modules and 32 new",
    },
    "distill": {
        (
            "multi_qa, trivia, qwen2.5-coder-0.5b-instruct-q4_k_m: gap closed",
            None,
        ): "Qwen2.5-Coder-0.5B, MultiQA without passages: share of the reuse gap that fine-tuning closes",
        (
            "multi_qa, qwen2.5-coder-0.5b-instruct-q4_k_m: gap closed",
            None,
        ): "Qwen2.5-Coder-0.5B, MultiQA with passages: share of the reuse gap that fine-tuning closes",
        (
            "tree_of_thoughts, qwen2.5-coder-0.5b-instruct-q4_k_m: gap closed",
            None,
        ): "Qwen2.5-Coder-0.5B, Tree of Thoughts (short votes): share of the reuse gap that fine-tuning closes",
    },
}
# label, benchmark, measure of ours, measure of the peer, ratio (measure, peer); None: no absolute number is recorded
SUMMARY_ROWS = [
    (
        "decode step (compiled, int4 weights), 1 request behind 512 tokens, against llama.cpp Q4_1",
        "peers",
        "decode, 1 request behind 512: choreograph compiled int4",
        "decode, 1 request behind 512: llama.cpp Q4_1",
        ("decode, 1 request behind 512, int4", "llama.cpp Q4_1"),
    ),
    (
        "decode step (compiled), 32 requests with contexts of 256 of their own, against vLLM's CPU build",
        "peers",
        "decode, 32 requests with own contexts of 256: choreograph compiled",
        "decode, 32 requests with own contexts of 256: vLLM",
        ("decode, 32 requests with own contexts of 256", "vLLM"),
    ),
    (
        "Tree of Thoughts (random tokens, short votes), end to end, against vLLM's CPU build",
        "peers",
        "Tree of Thoughts: end to end, choreograph choreographed",
        "Tree of Thoughts: end to end, vLLM",
        ("Tree of Thoughts: end to end, choreograph choreographed", "vLLM"),
    ),
    (
        "vLLM's CPU build with the connector, ten reordered passages in plain requests, time to first token, against vLLM",
        "vllm",
        "retrieval: first token, connector, messages",
        "retrieval: first token, vLLM",
        ("retrieval: first token, connector, messages", "vLLM"),
    ),
    (
        "the same, end to end",
        "vllm",
        "retrieval: end to end, connector, messages",
        "retrieval: end to end, vLLM",
        ("retrieval: end to end, connector, messages", "vLLM"),
    ),
    (
        "Tree of Thoughts (short votes), time to first token, against prefix caching in the same engine",
        "speed",
        None,
        None,
        ("Tree of Thoughts: TTFT, steps", None),
    ),
    (
        "Tree of Thoughts (short votes), end to end, against prefix caching in the same engine",
        "speed",
        None,
        None,
        ("Tree of Thoughts: end to end", None),
    ),
    (
        "attention of a prefill of 2,048 tokens, Llama-3.1-8B shape, against SDPA",
        "gpu",
        None,
        None,
        ("triton, prefill: SDPA over it", None),
    ),
]
RATIOS = ("x", "")  # units of what is a ratio, of times or of log-losses


def summary(results: Path = RESULTS) -> str:
    """Return the six-row table of the README in Markdown."""
    lines = ["| What | Ours | Peer | Ratio (95%) | Machine |", "|---|---|---|---|---|"]
    for label, name, ours, peer, ratio_key in SUMMARY_ROWS:
        record = json.loads((results / f"{name}.json").read_text())
        rows = {(row["measure"], row["peer"]): row for row in record["rows"]}
        absolute = [
            "" if measure is None else f"{rows[measure, None]['value']:,.4g} {rows[measure, None]['unit']}"
            for measure in (ours, peer)
        ]
        ratio = rows[ratio_key]
        span = f"{ratio['value']:.2f}x ({ratio['low']:.2f}, {ratio['high']:.2f})"
        lines.append(f"| {label} | {absolute[0]} | {absolute[1]} | {span} | {ratio['made']['hardware']} |")
    return "\n".join(lines)


def table(results: Path = RESULTS) -> str:
    """Return the full table in Markdown, from the results that exist."""
    lines = ["| What | Ratio (95%) | Machine | `make bench NAME=` |", "|---|---|---|---|"]
    for name, shown in README_ROWS.items():
        for path in results.glob(f"{name}.json"):
            record = json.loads(path.read_text())
            rows = {(row["measure"], row["peer"]): row for row in record["rows"] if row["unit"] in RATIOS}
            for key, label in shown.items():
                if row := rows.get(key):
                    ratio = f"{row['value']:.2f} ({row['low']:.2f}, {row['high']:.2f})"
                    machine = f"{row['made']['hardware']}, torch {record['torch']}"
                    lines.append(f"| {label} | {ratio} | {machine} | `{name.removesuffix('_avx2')}` |")
    return "\n".join(lines)


def main() -> None:
    for file, content in ((README, summary()), (PAGE, table())):
        before, _, rest = file.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        file.write_text(f"{before}{BEGIN}\n{content}\n{END}{after}")
        print(content)


if __name__ == "__main__":
    main()
