"""What a schema and a prompt mean, worked out by hand: positions by recursion, attention as one dense mask.

Shares no code with the package but the values (`Schema`, `Prompt`). Prompts say something behind all imports only.
"""

from dataclasses import dataclass, field

import torch

from choreograph.prompt_cache import Parameter, Prompt, Role, Scaffold, Schema, Union

PLACEHOLDER = 0  # <unk>


@dataclass
class Block:
    """Tokens that are encoded together; slots: positions that arguments take over."""

    path: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: dict[str, range] = field(default_factory=dict)
    cache: bool = True

    def write(self, tokens: list[int], at: int) -> int:
        self.tokens += tokens
        self.positions += range(at, at + len(tokens))
        return at + len(tokens)


def blocks(schema: Schema, tokenizer) -> dict[tuple[str, ...], Block]:
    result: dict[tuple[str, ...], Block] = {(): Block(())}

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def walk(children, block: Block, at: int) -> int:
        for child in children:
            if isinstance(child, str):
                at = block.write(ids(child), at)
            elif isinstance(child, Parameter):
                block.slots[child.name] = range(at, at + child.length)
                at = block.write([PLACEHOLDER] * child.length, at)
            elif isinstance(child, Role):
                at = block.write(ids(f"<|{child.name}|>"), at)
                at = walk(child.children, block, at)
                at = block.write(ids("<end>"), at)
            elif isinstance(child, Scaffold):
                at = walk(child.children, block, at)
            else:
                members = child.members if isinstance(child, Union) else [child]
                ends = []
                for member in members:
                    inner = Block((*block.path, member.name), cache=member.cache and block.cache)
                    result[inner.path] = inner
                    ends.append(walk(member.children, inner, at))
                at = max(ends)
        return at

    walk(schema.children, result[()], 0)
    return result


def has_turn(node) -> bool:
    return isinstance(node, Role) or any(has_turn(child) for child in getattr(node, "children", ()))


def chosen(prompt: Prompt) -> dict[tuple[str, ...], dict[str, str]]:
    result = {(): dict(prompt.arguments)}

    def walk(children, path):
        for child in children:
            if hasattr(child, "arguments"):
                result[(*path, child.name)] = dict(child.arguments)
                walk(child.children, (*path, child.name))

    walk(prompt.children, ())
    return result


def logprobs(model, schema: Schema, prompt: Prompt, tokenizer, forced: list[int], together=()) -> torch.Tensor:
    """(len(forced), V): log-probabilities in front of each forced token of the answer.

    together: paths of modules that attend to each other, in this order.
    """
    tokens, positions, visible = rows(schema, prompt, tokenizer, forced, together)
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).masked_fill(visible, 0.0)
    with torch.no_grad():
        given = {"input_ids": torch.tensor([tokens]), "position_ids": torch.tensor([positions])}
        logits = model(**given, attention_mask=mask[None, None], use_cache=False).logits[0]
    first = len(tokens) - len(forced) - 1
    return logits[first : first + len(forced)].log_softmax(-1)


def rows(
    schema: Schema, prompt: Prompt, tokenizer, forced: list[int], together=()
) -> tuple[list[int], list[int], torch.Tensor]:
    """Tokens, their positions, and which row sees which: (N, N)."""
    have = chosen(prompt)
    all_blocks = {path: block for path, block in blocks(schema, tokenizer).items() if path in have}
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    cached: list[tuple[int, int, tuple, bool]] = []  # token, position, block, visible to others
    new: list[tuple[int, int]] = []
    for path, block in all_blocks.items():
        taken = set()
        for name, text in have[path].items():
            taken |= set(block.slots[name])
            new += zip(ids(text), block.slots[name], strict=False)
        rows = list(zip(block.tokens, block.positions, strict=True))
        if block.cache:
            cached += [(t, p, path, p not in taken) for t, p in rows]
        else:
            new += [(t, p) for t, p in rows if p not in taken]
    end = max([p + 1 for _, p, _, visible in cached if visible] + [p + 1 for _, p in new], default=0)
    laid_end = max(
        [p + 1 for block in all_blocks.values() for p in block.positions] + [p + 1 for _, p in new], default=0
    )
    for child in prompt.children:
        text = child if isinstance(child, str) else None
        if text is not None and has_turn(schema):
            text = f"<|user|>{text.strip()}<end>"
        if isinstance(child, Role):
            text = f"<|{child.name}|>{''.join(child.children)}<end>"
        if text is not None:
            said = ids(text)
            new += [(t, laid_end + i) for i, t in enumerate(said)]
            end = laid_end = laid_end + len(said)
    new.sort(key=lambda one: one[1])
    answer = ids("<|assistant|>") + forced
    new += [(t, end + i) for i, t in enumerate(answer)]
    tokens = [t for t, *_ in cached] + [t for t, _ in new]
    positions = [p for _, p, *_ in cached] + [p for _, p in new]
    sees = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    order = {path: i for i, path in enumerate(together)}
    for i, (_, p, path, _) in enumerate(cached):
        for j, (_, q, other, _) in enumerate(cached):
            joint = path == other or (path in order and other in order)
            if joint and q <= p:
                sees[i, j] = True
    for i in range(len(cached), len(tokens)):
        for j, (*_, visible) in enumerate(cached):
            if visible:
                sees[i, j] = True
        sees[i, len(cached) : i + 1] = True
    return tokens, positions, sees
