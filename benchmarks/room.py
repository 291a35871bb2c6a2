"""Room on demand: chats without `max_tokens` against the same chats with their exact limits.

Every chat ends by itself after 200 to 400 tokens. Conditions:

- exact: each chat's length is its `max_tokens`, reserved at admission; no server knows it;
- on demand: no `max_tokens`, and pages are allocated as tokens come;
- reserved (with `--reserved`): no `max_tokens`, and the whole context is reserved at admission.

Prints steps, generated tokens per step, computed tokens and preemptions, which do not depend on the
machine, and seconds, which do. Exits with 1 if `on demand` has less than 90% of the tokens per step of
`exact`.

    python -m benchmarks.room [--model PATH] [--chats 64] [--capacity 16384] [--keep] [--reserved]
"""

import argparse
import random
import sys
import time
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.kv_cache.manager import KVCacheManager

VOCABULARY, NUM_POSITIONS = 64, 4096
STOP = 63  # token id
CONDITIONS = ("exact", "on demand", "reserved")
REQUIRED_RATIO = 0.9

allocate_entry = KVCacheManager.allocate_entry


def reserve_entry(self, *args, capacity, max_tokens=0, **options):
    """Allocate all pages that an entry can ever need."""
    return allocate_entry(self, *args, capacity=max(capacity, max_tokens), **options)


def tiny_model() -> LlamaForCausalLM:
    """Return a random model of two layers: scheduling depends on lengths only."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=NUM_POSITIONS,
    )
    return LlamaForCausalLM(config).float().eval()


def run(model: object, args: argparse.Namespace, condition: str) -> dict[str, float]:
    """Run all chats under a condition and return its counts."""
    picks = random.Random(args.seed)
    lengths = [picks.randint(200, 400) for _ in range(args.chats)]
    prompts = [[picks.randrange(STOP) for _ in range(picks.randint(8, args.prompt))] for _ in range(args.chats)]
    engine = Engine.from_pretrained(model, config=EngineConfig(cache=CacheConfig(capacity=args.capacity)))
    core, finished = engine.core, []
    engine.events.subscribe(lambda event: event.kind == "finished" and finished.append(event.data["request"]))
    allocate = allocate_entry if condition == "on demand" else reserve_entry
    with mock.patch.object(KVCacheManager, "allocate_entry", allocate), engine.session(seed=0) as session:
        messages = {}
        for prompt, length in zip(prompts, lengths, strict=True):
            sampling = SamplingParams(
                max_tokens=length if condition == "exact" else None,
                min_tokens=length - 1,
                logit_bias={STOP: 100},  # the first token that may end the message does
                stop_token_ids=[STOP],
            )
            message = session.decode(prompt, sampling=sampling)
            messages[message.id] = message
        start, num_steps, max_ranges, max_running = time.perf_counter(), 0, 0, 0
        while engine.step():
            num_steps += 1
            running = core.scheduler.running
            max_running = max(max_running, len(running))
            max_ranges = max([max_ranges, *(len(request.entry.slot_ranges) for request in running)])
            while finished and not args.keep:
                if message := messages.get(finished.pop()):  # else a recomputation
                    message.release()
        seconds = time.perf_counter() - start
        num_generated = sum(len(message.output_token_ids) for message in messages.values())
        assert num_generated == sum(lengths), "a chat did not end by itself"
        engine.check()
    return {
        "steps": num_steps,
        "tokens/step": num_generated / num_steps,
        "computed": core.num_batched_tokens,
        "running": max_running,
        "preempted": engine.events.counts["preempted"],
        "ranges": max_ranges,
        "seconds": seconds,
    }


def main() -> int:
    """Print a table of all conditions; return 1 if the ratio is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path of a model; default: a random model of two layers")
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="longest prompt in tokens")
    parser.add_argument("--capacity", type=int, default=16384, help="tokens of the cache")
    parser.add_argument("--keep", action="store_true", help="keep the messages of finished chats")
    parser.add_argument("--reserved", action="store_true", help="also run without pages on demand (slow)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = args.model or tiny_model()
    rows = {condition: run(model, args, condition) for condition in CONDITIONS[: 2 + args.reserved]}
    print(f"{args.chats} chats of 200 to 400 tokens, cache of {args.capacity} tokens")
    print(f"{'':10}" + "".join(f"{name:>13}" for name in rows["exact"]))
    for condition, row in rows.items():
        print(f"{condition:10}" + "".join(f"{value:13.1f}" for value in row.values()))
    ratio = rows["on demand"]["tokens/step"] / rows["exact"]["tokens/step"]
    print(f"on demand over exact, tokens per step: {ratio:.3f} (required: {REQUIRED_RATIO})")
    return int(ratio < REQUIRED_RATIO)


if __name__ == "__main__":
    sys.exit(main())
