"""One of two processes that compute models together. Writes what came of it as JSON, scenario by scenario.

Run with a meeting file, its rank and a folder of models. `graph` and `under_pressure` are what a process alone does
too; `scenarios` says what else is done.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from choreograph.kv_cache.tiers import HostTier, TransferOps
from choreograph.kv_cache.transfer import Transfer
from choreograph.lab.replay.packed_forward import forward_no_grad, pack
from choreograph.lab.replay.traced_calls import TracedCall
from choreograph.layer_reuse.remote import RemoteSender, serve
from choreograph.models import hf_model as adapter_module
from helpers.inspect_engine import inspect

MODES = ("choreographed", "prefix", "naive")
FAMILIES = ("llama", "qwen2", "gemma2")
CACHE = CacheConfig(capacity=1024, page_size=4, poison_freed_pages=True)


def oldest_first(candidates):
    """A user's own eviction policy, of which every process has its own object."""
    return [candidate.id for candidate in sorted(candidates, key=lambda candidate: candidate.created)]


SMALL = CacheConfig(
    capacity=48, page_size=4, poison_freed_pages=True, host_capacity=32, disk_capacity=4096, eviction=oldest_first
)
CONTEXT = [5, 9, 17, 3, 44, 21, 8, 30, 2, 11]
BELOW = [12, 13, 14]
KEYS_WHOLE = {f"model.layers.*.self_attn.{name}": "replicate" for name in ("k_proj", "v_proj")}


def options(cache=CACHE, **more):
    return EngineConfig(cache=cache, scheduler=SchedulerConfig(max_num_batched_tokens=16), **more)


def engine(folder, name, **more):
    config = more.pop("config", None) or options()
    return Engine.from_pretrained(str(folder / name), dtype="float32", tp_plan="auto", config=config, **more)


def said(messages):
    return [[m.tokens, [one.logprob for one in m.logprobs] if m.logprobs else []] for m in messages]


def ways():
    greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    sampled = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=6, logprobs=0)
    return greedy, sampled, SamplingParams(temperature=0.8, max_tokens=5, frequency_penalty=0.5, logprobs=0)


def graph(engine, mode, seed=7):
    """Shared, reordered and moved parents, calls side by side, everything read at the end."""
    with engine.session(mode=mode, seed=seed) as session:
        first, second = session.prefill(CONTEXT), session.prefill(BELOW)
        below = session.prefill([20, 21, 22], [first, second])
        calls = []
        for way in ways():
            one = session.decode([7, 8], [first, below], sampling=way, footer=[1])
            moved = {"offsets": [30, 4], "new_offset": 50} if mode == "choreographed" else {}
            calls += [one, session.decode([7, 8], [below, first], **moved, sampling=way)]
            calls.append(session.decode([9], [second, one, first], sampling=way))
        found = said(calls)
        engine.check()
    return found


def under_pressure(engine):
    """Contexts that do not fit on the device together, seen again in turns."""
    found = []
    with engine.session(seed=3) as session:
        contexts = [session.prefill([at + i for i in range(12)]) for at in (1, 15, 30, 45)]
        for turn in range(3):
            contexts[turn].pin(0.01)
            calls = [session.decode([turn + 3], [one], sampling=ways()[1]) for one in contexts]
            found += said(calls)
            for call in calls:
                call.release()
            engine.check()
    return found, engine.events.counts["loaded"]


def error(action):
    try:
        action()
    except Exception as exc:
        return [type(exc).__name__, str(exc)]
    return None


def refusals(folder):
    """What does not go with sharing a model, or cannot be shared between two processes."""
    one = engine(folder, "llama")
    llama = str(folder / "llama")
    asked = {
        "adapter": lambda: one.add_adapter("tuned", "nowhere"),
        "model": lambda: one.add_model("other", llama),
        "share": lambda: one.enable_layer_reuse("base", "other", pattern=[0, 0, 0]),
        "int4": lambda: engine(folder, "llama", config=options(quantization="int4")),
        "compile": lambda: engine(folder, "llama", config=options(compile=True)),
        "adapters": lambda: engine(folder, "llama", adapters={"tuned": "nowhere"}),
        "device": lambda: engine(folder, "llama", device="cpu"),
        "heads": lambda: engine(folder, "narrow"),
        "uneven plan": lambda: Engine.from_pretrained(llama, tp_plan=KEYS_WHOLE, dtype="float32", config=options()),
        "no plan": lambda: engine(folder, "gpt2"),
        "unknown plan": lambda: Engine.from_pretrained(llama, tp_plan="even"),
        "one pass": lambda: forward_no_grad(inspect(one).hf_model, pack([TracedCall("", [1, 2], 0, generated=[3])])),
        "sender": lambda: serve(one, None, peer=0),
        "receiver": lambda: RemoteSender(one, 0),
        "options": lambda: engine(folder, "llama", config=options(backend=("sdpa", "reference")[dist.get_rank()])),
    }
    return {name: error(action) for name, action in asked.items()}


def single(folder):
    """The one key-value head of a model in both processes."""
    one = Engine.from_pretrained(str(folder / "narrow"), tp_plan=KEYS_WHOLE, dtype="float32", config=options())
    return [one.model_info.query_heads, one.model_info.kv_heads], graph(one, "choreographed")


def in_memory(folder):
    """A model that its owner has sharded."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype="float32", distributed_config=plan)
    return graph(Engine.from_pretrained(model, config=options()), "choreographed")


def sizes(folder):
    """What every process measured, and a cache that free memory, which differs, decides on."""
    adapter_module.free_memory = lambda device: (1 + dist.get_rank()) * (1 << 20)
    one = engine(folder, "llama", config=EngineConfig())
    facts = one.model_info
    return [
        facts.query_heads,
        facts.kv_heads,
        facts.kv_bytes_per_token,
        facts.parameters,
        inspect(one).pool.pages,
    ]


def choices(folder):
    """Logits that differ between the processes: of one row in two by much, of the first decode by being no numbers."""
    one = engine(folder, "llama")
    forward, rank = inspect(one).hf_model.forward, dist.get_rank()

    def noisy(*given):
        logits = forward(*given)
        return logits + rank * torch.randn(logits.shape) if len(logits) else logits

    inspect(one).hf_model.forward = noisy
    found = graph(one, "choreographed")
    with one.session() as session:
        inspect(one).hf_model.forward = lambda *given: forward(*given) * (float("nan") if rank == 0 else 1)
        return found, error(lambda: session.decode([5], sampling=ways()[0]).tokens)


def unseeded(folder):
    with engine(folder, "llama").session() as session:
        return [session.decode([5 + i], sampling=ways()[1]).tokens for i in range(3)], session._seed_rng.random()


def other_steps(folder):
    """The processes run different programs."""
    one = engine(folder, "llama")
    with one.session() as session:
        seen = session.prefill(CONTEXT)
        places = {"offsets": [dist.get_rank()], "new_offset": 30}  # the same rows at another distance
        first = error(lambda: session.decode([5], [seen], **places, sampling=ways()[0]).tokens)
        return first, error(lambda: session.decode([5], sampling=ways()[0]).tokens)


def other_calls(folder):
    """One opens a session where the other computes."""
    one = engine(folder, "llama")
    session = one.session(seed=1)
    return error(one.session if dist.get_rank() else lambda: session.decode([5], sampling=ways()[0]).tokens)


def death(folder):
    """The second process ends in the middle of a step."""
    one = engine(folder, "llama")
    with one.session() as session:
        seen = session.decode([5], [session.prefill(CONTEXT)], sampling=ways()[0])
        known = seen.tokens
        attend = inspect(one).runner.backend

        def dying(*given):
            if dist.get_rank() == 1:
                os._exit(0)
            return attend(*given)

        inspect(one).runner.backend = dying
        said = [error(lambda: session.decode([6], [seen], sampling=ways()[0]).tokens) for _ in range(2)]
        return known, *said


def families(folder):
    return {name: [graph(engine(folder, name), mode) for mode in MODES] for name in FAMILIES}


def pressure(folder):
    """Copies take longer in the second process."""
    run = Transfer.run

    def late(transfer, *given, **named):
        time.sleep(0.02 * dist.get_rank())
        run(transfer, *given, **named)

    Transfer.run = late
    return under_pressure(engine(folder, "llama", config=options(SMALL)))


def damaged(folder):
    """Copies that cannot be read back: first in both processes, then in the second one alone."""
    get, bad = HostTier.load_ops, True

    def broken(tier, *given):
        def fail(layer):
            raise OSError("unreadable")

        return TransferOps(fail) if bad else get(tier, *given)

    HostTier.load_ops = broken
    try:
        both = under_pressure(engine(folder, "llama", config=options(SMALL)))
        bad = dist.get_rank() == 1
        return both, error(lambda: under_pressure(engine(folder, "llama", config=options(SMALL))))
    finally:
        HostTier.load_ops = get


if __name__ == "__main__":
    meeting, rank, models = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    scenarios = (
        families,
        single,
        pressure,
        damaged,
        in_memory,
        sizes,
        choices,
        unseeded,
        refusals,
        other_steps,
        other_calls,
        death,
    )
    for scenario in scenarios:
        try:
            found = scenario(models)
        except Exception:
            found = {"failed": traceback.format_exc()}
        Path(f"{meeting}-{scenario.__name__}-{rank}").write_text(json.dumps(found))
