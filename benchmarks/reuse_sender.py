"""The other process of `benchmarks/reuse.py --only remote`: encodes contexts with a sender's model and serves them."""

import argparse

import torch.distributed as dist

from choreograph import CacheConfig, Engine, EngineConfig, LayerPattern
from choreograph.layer_reuse import ContextStore
from choreograph.layer_reuse.remote import serve


def context(length: int, number: int) -> list[int]:
    """The same in both processes, and tokens of any vocabulary."""
    return [5 + (7 * i + 11 * number + length) % 80 for i in range(length)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--meeting", required=True)
    options.add_argument("--enter", type=int, nargs="*", default=[])
    options.add_argument("--lengths", type=int, nargs="+", required=True)
    options.add_argument("--rounds", type=int, required=True)
    given = options.parse_args()
    tokens = (given.rounds + 1) * sum(given.lengths) + 4096
    config = EngineConfig(cache=CacheConfig(capacity=tokens))
    engine = Engine.from_pretrained(given.model, config=config)
    if given.enter:  # any receiver will do: what counts is which inputs are kept
        engine.add_model("reader", engine.core.hf_model.model)
        engine.enable_layer_reuse("reader", pattern=LayerPattern.from_layers(given.enter), capacity=1)
    dist.init_process_group("gloo", init_method=f"file://{given.meeting}", rank=0, world_size=2)
    with engine.session() as session, ContextStore(engine) as store:
        for length in given.lengths:
            for number in range(given.rounds + 1):
                store.store_kv(session.prefill(context(length, number)).wait_encoded())
        dist.barrier()
        serve(engine, store, peer=1)


if __name__ == "__main__":
    main()
