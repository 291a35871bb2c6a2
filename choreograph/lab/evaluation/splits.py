"""Disjoint splits for training, validation and test.

Two examples that share a unit (a question, a list of concepts, a game) are always in the same split
(Prompt Choreography §3.4: 400, 100 and 500 games, from fixed seeds).
"""

import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from ...errors import ConfigError, DataError
from ...models.adapter_usage import read_usage
from ...utils import require
from ..workflows import WorkflowFunction, takes_pairs
from .datasets import Example, error_context, is_file, load, make_games, make_pairs

SPLIT_SHARES = {"train": 0.4, "validation": 0.1, "test": 0.5}  # of the units

GAMES_PER_SPLIT = {"train": 400, "validation": 100, "test": 500}

T = TypeVar("T")


def shared_units(example: Example) -> frozenset[str]:
    """Return hashes of what an example may have in common with others.

    These are both questions of a pair, the question without its documents, the set of concepts, the
    game, or else the task.
    """
    if example.kind == "game":
        parts: list[object] = [f"game {example.id}"]
    elif example.kind == "concepts":
        parts = [sorted(_normalize(concept) for concept in example.task)]
    else:
        parts = [_question(task) for task in (example.task if example.kind == "pair" else [example.task])]
    return frozenset(hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16] for part in parts)


def units_of(examples: Iterable[Example]) -> set[str]:
    """Return the units of all examples."""
    return {unit for example in examples for unit in shared_units(example)}


def _normalize(text: str) -> str:
    return " ".join(text.lower().split())


def _question(task: object) -> str:
    """Return the question that follows the documents of a task."""
    text = task if isinstance(task, str) else json.dumps(task, sort_keys=True)
    return _normalize(text.rpartition("\n\nQuestion: ")[2])


def split_examples(examples: Sequence[Example], seed: int = 0) -> dict[str, list[Example]]:
    """Split examples for training, validation and test, 4:1:5.

    The shares are of groups of examples that share units; the order is kept within a split.
    """
    groups = connected(examples, shared_units)
    random.Random(seed).shuffle(groups)
    num_train = round(SPLIT_SHARES["train"] * len(groups))
    num_validation = round(SPLIT_SHARES["validation"] * len(groups))
    num_validation = max(num_validation, 1) if len(groups) > 2 else 0
    ends = {"train": num_train, "validation": num_train + num_validation, "test": len(groups)}
    result, start = {}, 0
    for name, end in ends.items():
        indices = sorted(index for group in groups[start:end] for index in group)
        result[name] = [examples[index] for index in indices]
        start = end
    return result


def split_off(
    items: Sequence[T], fraction: float, seed: int, units: Callable[[T], Iterable[str]]
) -> tuple[list[T], list[T]]:
    """Split randomly into a rest and a share without common units.

    Raises:
        DataError: if all items are connected by shared units.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"validation={fraction}: use a share between 0 and 1")
    groups = connected(items, units)
    if len(groups) < 2:
        shared = " that are connected by shared questions" if len(items) > 1 else ""
        raise DataError(
            f"{len(items)} examples{shared}: training and validation need at least one each with nothing in common: "
            "split the questions before pairs are made of them, as `choreograph trace` does"
        )
    random.Random(seed).shuffle(groups)
    wanted, chosen = max(1, round(fraction * len(items))), set(groups[0])
    for group in groups[1:-1]:
        if len(chosen) + len(group) <= wanted:
            chosen.update(group)
    order = [index for group in groups for index in group]  # shuffled
    return [items[i] for i in order if i not in chosen], [items[i] for i in order if i in chosen]


def connected(items: Sequence[T], units: Callable[[T], Iterable[str]]) -> list[list[int]]:
    """Return the indices of items, grouped by common units, in order of their first ones."""
    groups = require("scipy.cluster.hierarchy", "eval").DisjointSet(range(len(items)))
    owners: dict[str, int] = {}
    for index, item in enumerate(items):
        for unit in units(item):
            groups.merge(owners.setdefault(unit, index), index)
    return sorted(map(sorted, groups.subsets()))


def check_disjoint(splits: Mapping[str, Collection[str]]) -> None:
    """Raise DataError if two splits have units in common."""
    names = list(splits)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            if common := set(splits[first]) & set(splits[second]):
                raise DataError(
                    f"{first} and {second} share {len(common)} questions or games: use disjoint examples "
                    "(`--split`, with the same `--split-seed` in every command)"
                )


def check_unseen(adapter: str, examples: Sequence[Example]) -> None:
    """Raise DataError if an adapter has seen any of the examples."""
    usage = read_usage(adapter)
    units = [] if usage is None else usage.units
    check_disjoint({f"the training of {adapter}": units, "the evaluation": units_of(examples)})


def examples_for(
    workflow: WorkflowFunction, data: str, *, limit: int | None, seed: int | None, split: str, split_seed: int = 0
) -> list[Example]:
    """Load a split; pair the examples if the workflow takes pairs.

    Args:
        limit: Examples or questions at most, after shuffling.
        seed: Shuffle with this seed; None keeps the order.
        split: "train", "validation" or "test" of a file or of games, "all", or a split of a Hub dataset.
        split_seed: Seed of the splits of a file.
    """
    return _select(workflow, data, split, _load_split(data, split, split_seed), limit, seed)


def training_examples(
    workflow: WorkflowFunction, data: str, *, limit: int | None, seed: int | None, split: str, split_seed: int = 0
) -> tuple[list[Example], list[Example]]:
    """Load examples for training and validation.

    There are four times as many for training. Splits other than "train", and those of a Hub dataset, are divided into both.
    """
    if split == "train" and (_num_games(data) is not None or is_file(data)):
        learn, check = (_load_split(data, name, split_seed) for name in ("train", "validation"))
    else:
        learn, check = split_off(_load_split(data, split, split_seed), 0.2, split_seed, shared_units)
    learn = _select(workflow, data, split, learn, limit, seed)
    most = max(2 if takes_pairs(workflow) else 1, round(len(learn) / 4))
    return learn, _select(workflow, data, "validation", check, most, seed)


def _num_games(data: str) -> int | None:
    """Return N of `games:N`, 0 of `games`, and None for other sources."""
    name, colon, count = data.partition(":")
    if name != "games" or (not colon and is_file(data)):
        return None
    if colon and not (count.isascii() and count.isdigit() and int(count)):
        raise DataError(f"{data}: use games:N with a number, or games for as many as in the paper")
    return int(count or 0)


def _load_split(data: str, split: str, split_seed: int) -> list[Example]:
    num_games = _num_games(data)
    if num_games is None and not is_file(data):
        return load(data, split=split)
    if split not in (*SPLIT_SHARES, "all"):
        raise ConfigError(f"split={split!r}: use one of {[*SPLIT_SHARES, 'all']}")
    if num_games is not None:
        return make_games(num_games or GAMES_PER_SPLIT.get(split, 1000), "" if split == "all" else split)
    examples = load(data)
    return examples if split == "all" else split_examples(examples, split_seed)[split]


def _select(
    workflow: WorkflowFunction, data: str, split: str, examples: list[Example], limit: int | None, seed: int | None
) -> list[Example]:
    if not examples:
        raise DataError(f"{data}: no examples in the split {split!r}: use a larger file, or --split all")
    if seed is not None:
        random.Random(seed).shuffle(examples)
    examples = examples[:limit]
    if takes_pairs(workflow) and any(e.kind != "pair" for e in examples):
        with error_context(f"{data}, split {split!r}"):
            examples = make_pairs(examples, seed or 0)
    kinds = sorted({e.kind for e in examples})
    if len(kinds) > 1:
        raise DataError(f"{data}: records of several kinds {kinds}: split the file")
    return examples
