"""Senders in a process of their own: one that does what it should, and some that do not. Run with what to do."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from choreograph.kv_cache.container import EntryInfo, Header
from choreograph.layer_reuse.transport import Channel, receive_header, send_details, send_header

CONTEXT = [5, 9, 17, 3, 44, 21, 8, 30, 2, 11]
BELOW = [12, 13, 14]


def join(file: str, rank: int, world: int = 2) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)


def good(peer: int = 1, group: object = None) -> None:
    from choreograph.layer_reuse import ContextStore
    from choreograph.layer_reuse.remote import serve
    from helpers import model_variants

    engine = model_variants.engine()
    engine.enable_layer_reuse("math", pattern=[1, 2, 4])
    with ContextStore(engine) as store, engine.session() as session:
        context = session.prefill(CONTEXT)
        below = session.prefill(BELOW, [context])
        store.store_hidden(context)
        store.store_hidden(below)
        store.store_hidden(session.prefill(CONTEXT[::-1]))
        serve(engine, store, peer, group=group)


def chain(rank: int) -> None:
    """Rank 1 stores what it has received in part from rank 0, encoded in all layers, and serves rank 2."""
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 0:
        good(1, first)
        return
    from choreograph.layer_reuse import ContextStore
    from choreograph.layer_reuse.remote import RemoteSender, serve
    from helpers import model_variants

    engine = model_variants.engine()
    with RemoteSender(engine, 0, name="writer", timeout=60, group=first) as link:
        engine.enable_layer_reuse("math", "writer", pattern=[1, 2, 4])
        engine.enable_layer_reuse("twin", "math", pattern=[0, 3, 5])
        with ContextStore(engine) as store, engine.session(model="math") as session:
            reused = link.partial_prefill(session, CONTEXT)
            reply = session.decode([7], [reused], forced_tokens=BELOW)
            assert reply.wait_encoded() and engine.events.counts["recomputed"] == 0
            store.store_hidden(session.prefill(reply.tokens))
            serve(engine, store, 2, group=second, model="math")


def faulty(kind: str, facts: dict) -> None:
    """Knows the protocol well enough to break it."""
    channel = Channel(1)
    receive_header(channel), send_details(channel, **facts)()
    request = receive_header(channel).details
    keys = [(layer, what) for layer in request["keys"] for what in ("keys", "values")]
    shapes = dict.fromkeys(keys, (len(CONTEXT), 2, 16))
    if kind == "lies":
        shapes[keys[0]] = (len(CONTEXT), 2, 8)
    if kind == "leaves out":
        del shapes[keys[-1]], shapes[keys[-2]]
    model_hash = "other" if kind == "has another model" else facts["fingerprint"]
    name = "other" if kind == "has another context" else request["name"]
    header = Header([EntryInfo(shapes=shapes, model_hash=model_hash, content_hash=name)], torch.float32)
    if kind == "mumbles":
        dist.send(torch.tensor([7]), 1)
        dist.send(torch.full((15,), 255, dtype=torch.uint8), 1)
        time.sleep(30)
    send_header(channel, header)()
    if kind not in ("dies", "stalls", "flips a bit"):
        time.sleep(30)
    frame = header.seal_frame(0, lambda kind, tensor: tensor.zero_())
    if kind == "flips a bit":
        frame[5] ^= 1
    channel.send(torch.from_numpy(frame))()
    if kind != "dies":
        time.sleep(30)
    os._exit(1)  # dies in the middle of a context


if __name__ == "__main__":
    if sys.argv[2] == "chain":
        rank = int(sys.argv[3])
        join(sys.argv[1], rank, 3)
        chain(rank)
    else:
        join(sys.argv[1], 0)
        good() if sys.argv[2] == "good" else faulty(sys.argv[2], json.loads(sys.argv[3]))
