"""Random programs on a crowded, interrupted engine give what a roomy reference engine gives, message by message.

Small caches, small steps, few calls at once, releases in flight, forgotten caches and steps that break: none of it
may change a token of a message that was not cancelled or refused.
"""

import random

from helpers import tiny_models
from helpers.hypothesis_profile import many
from helpers.inspect_engine import inspect
from helpers.message_graphs import Node, graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph import ChoreographError, Message, SamplingParams, Session


class Broken(Exception):
    """A forward pass that fails after it has written."""


def submit(session: Session, messages: list[Message], node: Node, size: int) -> Message:
    place = {"parents": [messages[p] for p in node.parents], "offsets": node.offsets, "new_offset": node.position}
    if node.generated is None:
        return session.prefill(node.tokens, **place)
    ways = SamplingParams(temperature=0, max_tokens=size, stop_token_ids=[7])
    forced = node.generated if size % 3 == 0 else None
    return session.decode(node.tokens, **place, sampling=ways, footer=node.footer, forced_tokens=forced)


def break_now_and_then(engine, pick: random.Random) -> None:
    healthy = inspect(engine).hf_model.forward

    def forward(*arguments):
        logits = healthy(*arguments)
        if pick.random() < 0.08:
            raise Broken
        return logits

    inspect(engine).hf_model.forward = forward


def crowded_life(nodes: list[Node], mode: str, pick: random.Random) -> list[Message]:
    """The messages that could be submitted; what was released or did not fit has failed or is cancelled."""
    engine = tiny_models.engine(
        tokens=pick.choice([64, 120, 300, 2048]),
        step=pick.choice([1, 3, 7, 1024]),
        calls=pick.choice([2, 256]),
        page=pick.choice([1, 4, 16]),
    )
    break_now_and_then(engine, pick)
    session, messages = engine.session(mode=mode), []

    def steps(most: int) -> bool:
        for _ in range(most):
            try:
                if not engine.step():
                    return False
            except Broken:
                pass
            engine.check()
        return True

    for index, node in enumerate(nodes):
        try:
            messages.append(submit(session, messages, node, 1 + index * 5 % 12))
        except ChoreographError:
            break
        steps(pick.randint(0, 3))
        if pick.random() < 0.15:
            pick.choice(messages).release()
        if pick.random() < 0.1:
            engine.clear_cache()
        engine.check()
    while steps(1):
        pass
    session.close()
    engine.clear_cache()
    counts = inspect(engine).cache_manager.stats
    assert counts["num_free_pages"] == counts["num_pages"]
    return messages


def quiet_life(nodes: list[Node], mode: str) -> list[Message | None]:
    """The same calls one by one, nothing cached between them, on the reference backend."""
    engine = tiny_models.engine(tokens=8192, backend="reference")
    session, messages = engine.session(mode=mode), []
    for index, node in enumerate(nodes):
        messages.append(submit(session, messages, node, 1 + index * 5 % 12).result())
        engine.run_until_idle()
        engine.clear_cache()
    return messages


@settings(max_examples=many(80), deadline=None)
@given(nodes=graphs(max_nodes=9), mode=st.sampled_from(["choreographed", "prefix"]), seed=st.integers(0, 10**6))
def test_crowded_lives_equal_quiet_ones(nodes, mode, seed):
    lived = crowded_life(nodes, mode, random.Random(seed))
    for message, expected in zip(lived, quiet_life(nodes[: len(lived)], mode), strict=True):
        if inspect(message).state.value == "done":
            assert message.tokens == expected.tokens
