"""How far the tokens of answers are from being others, which rounding in another batch may decide."""

import torch

from choreograph import SamplingParams
from choreograph.server.openai.chat_prompt import ChatRenderer

BATCH = 16  # answers at once


def margin_of(logprobs, sampling, uniform):
    """Return by how much a log-probability, or a cumulative probability, has to change for another token."""
    if sampling.greedy:
        first, second = logprobs.topk(2).values.tolist()
        return first - second
    values, ids = logprobs.topk(sampling.top_k + 1)
    weights = (values[:-1].double() / sampling.temperature).softmax(-1)
    edges = weights[ids[:-1].argsort()].cumsum(-1)[:-1]
    return min(float(values[-2] - values[-1]), float((edges - uniform).abs().min()))


def answers_with_margins(engine, bodies):
    """Return the text of the answer to each body of a chat, and the least margin of its tokens.

    Args:
        bodies: greedy, or with a seed and `top_k`.
    """
    renderer, result = ChatRenderer(engine.chat), []
    for start in range(0, len(bodies), BATCH):
        with engine.session(mode="prefix") as session:
            answers = []
            for body in bodies[start : start + BATCH]:
                top_k, seed = body.get("extra_body", {}).get("top_k", 0), body.get("seed", 0)
                options = {"temperature": body["temperature"], "max_tokens": body["max_tokens"]}
                sampling = SamplingParams(**options, top_k=top_k, seed=seed, ignore_eos=True)
                generator = torch.Generator().manual_seed(seed)
                uniforms = iter(torch.rand(sampling.max_tokens, generator=generator, dtype=torch.float64).tolist())
                message = session.decode(renderer.prompt(body["messages"]).tokens, sampling=sampling, footer=[])
                margins = []
                answers.append((message, margins))

                def note(row, margins=margins, sampling=sampling, uniforms=uniforms):
                    margins.append(margin_of(row, sampling, next(uniforms)))

                message.on_logprobs(note)
            texts = [message.text for message, _ in answers]  # runs all of them
            result += zip(texts, (min(margins) for _, margins in answers), strict=True)
    return result
