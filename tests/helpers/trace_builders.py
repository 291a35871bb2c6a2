"""A graph of messages called on a session, its content forced: for tests of what is computed in one pass."""

from choreograph import SamplingParams
from choreograph.lab.workflows import StageCall

WITH_LOGPROBS = SamplingParams(logprobs=0)


def run_graph(session, nodes, adapter_stages=()):
    """The calls of a graph in stages s0, s1, ...; the adapter FT makes some of them, from encodings as they are."""
    messages = []
    for number, node in enumerate(nodes):
        parents = [messages[i] for i in node.parents]
        place = {"offsets": node.offsets, "new_offset": node.position}
        if f"s{number}" in adapter_stages:
            place |= {"model": "FT", "kv_reuse": "reuse"}
        if node.generated is None:
            messages.append(session.prefill(node.tokens, parents, **place))
            continue
        forced = {"forced_tokens": node.generated, "footer": node.footer, "sampling": WITH_LOGPROBS}
        messages.append(session.decode(node.tokens, parents, **place, **forced))
    return [StageCall(f"s{i}", m) for i, m in enumerate(messages)]
