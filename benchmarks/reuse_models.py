"""Models of one family for the measurements of sharing: variants of a base, trained to answer questions about texts.

`train_pairs` trains what is not in the folder yet: a LoRA adapter through `choreograph.distill`, and a full fine-tune.
Questions for training, for profiles and for tests are different ones.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from choreograph import Engine
from choreograph.chat import Turn
from choreograph.distill import Lesson, TrainConfig, train
from choreograph.distill.losses import mean_loss
from choreograph.evaluation.data import records
from choreograph.models.adapter import Adapter
from choreograph.onepass.calls import TracedCall
from choreograph.onepass.likelihood import log_likelihood
from choreograph.onepass.packed import logits_of, pack
from choreograph.reuse.asked import asked, read_asked
from choreograph.reuse.profiling import Asked, Setting

from .common import quick_in_bfloat16, supporting

LONGEST = 1500  # tokens of a lesson: memory, and time
LONG = ("hotpotqa", "2wikimqa", "musique")
COMPANY = " in company "  # between the id of a question and the number of one of its contexts


@dataclass(frozen=True)
class Splits:
    """learn and check: for training; profile: for profiles, by data set; test: for the figures, by data set."""

    learn: list[Asked]
    check: list[Asked]
    profile: dict[str, list[Asked]]
    test: dict[str, list[Asked]]

    def on(self, names: Sequence[str]) -> "Splits":
        """Profiles and tests on these data sets alone."""
        profile, test = ({name: of[name] for name in names if name in of} for of in (self.profile, self.test))
        return replace(self, profile=profile, test=test)


def splits(folder: Path, inputs: int = 15, questions: int = 45, rounds: int = 6) -> Splits:
    """Three data sets of long contexts, each in four parts. Of questions with one short passage sixty are learned from;
    the others, thirty for a profile and 110 for the test, are asked of ten passages at once. Those of the long contexts
    that are for the test are asked again of the passages that they and four others need ("needed").

    inputs: of a profile, of each data set of long contexts; questions: of the test of each. rounds: contexts of a
    question in company, two at most for a profile.
    """
    short = read_asked(folder / "nq_oracle.jsonl", seed=2)
    parts = {name: read_asked(folder / f"{name}.jsonl", seed=2) for name in LONG}
    learn = [one for found in parts.values() for one in found[:30]]
    learn += short[:60]
    random.Random(0).shuffle(learn)
    test = {name: found[50 : 50 + questions] for name, found in parts.items()}
    few = {one.id: one for name in LONG for one in with_few(folder / f"{name}.jsonl")}
    return Splits(
        learn,
        [one for found in parts.values() for one in found[30:35]],
        {name: found[35 : 35 + inputs] for name, found in parts.items()}
        | {"nq": in_company(short[60:90], rounds=min(2, rounds))},
        {
            "nq": in_company(short[90:], rounds=rounds),
            "needed": in_company([few[one.id] for found in test.values() for one in found], passages=5, rounds=rounds),
            **test,
        },
    )


def with_few(file: Path) -> list[Asked]:
    """Questions with those of their passages alone that the answer needs."""
    return [asked(supporting(record), number) for number, record in enumerate(records(file))]


def in_company(questions: Sequence[Asked], passages: int = 10, *, rounds: int) -> list[Asked]:
    """Every question in several contexts, of its own passages among others'; contexts stand together."""
    found, draw = [], random.Random(0)
    for number in range(rounds):
        shuffled = draw.sample(questions, len(questions))
        for first in range(0, len(shuffled), passages):
            group = shuffled[first : first + passages]
            context = "\n\n".join(one.context for one in group)
            found += [replace(one, id=f"{one.id}{COMPANY}{number}", context=context) for one in group]
    return found


def lesson(engine: Engine, one: Asked, setting: Setting) -> Lesson:
    """A question and its first known answer, as the profile asks it, in one prompt."""
    chat = engine.chat
    assert chat is not None
    ids = chat.encode(Turn("user", f"{setting.system}\n\n{one.context}"), opening=True)
    ids += chat.encode(Turn("user", one.question), opening=False)
    header, footer = chat.open(Turn("assistant", ""), opening=False)
    said = engine.tokenizer.encode(one.answers[0], add_special_tokens=False)
    return Lesson(one.id, (TracedCall("answer", [*ids, *header], 0, (), [*said, *footer[:1]]),))


def lessons(engine: Engine, questions: list[Asked], setting: Setting) -> list[Lesson]:
    found = [lesson(engine, one, setting) for one in questions]
    return [one for one in found if sum(len(call.tokens) for call in one.calls) <= LONGEST]


def train_adapter(source: str, data: Splits, out: Path, setting: Setting, epochs: int = 2) -> Path:
    """A LoRA adapter on all linear layers."""
    if (out / "report.json").is_file():
        return out
    engine = Engine.from_pretrained(source, dtype="bfloat16" if quick_in_bfloat16() else "float32")
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    config = TrainConfig(
        rank=32,
        alpha=64,
        targets=targets,
        rate=3e-4,
        epochs=epochs,
        lessons=8,
        validations=2,
        bf16=quick_in_bfloat16(),
    )
    learn, check = (lessons(engine, split, setting) for split in (data.learn, data.check))
    report = train(engine.runner.adapter, learn, check, out, config, on_update=_tell("adapter"))
    print(f"adapter: {report.before:.3f} to {report.after:.3f}", flush=True)
    return out


def train_fully(source: str, data: Splits, out: Path, setting: Setting, epochs: int = 2, rate: float = 3e-5) -> Path:
    """All weights, of a copy of the base. Saved as a folder that `Engine.add_model` takes."""
    if (out / "config.json").is_file():
        return out
    engine = Engine.from_pretrained(source, dtype="float32")
    adapter, draw = engine.runner.adapter, random.Random(0)
    learn, check = (lessons(engine, split, setting) for split in (data.learn, data.check))
    before, model = mean_loss(adapter, check), adapter.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    updates = epochs * (len(learn) // 8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=updates + 1, pct_start=0.1)
    for number in range(updates):
        if number % (len(learn) // 8) == 0:
            draw.shuffle(learn)
        at = number % (len(learn) // 8) * 8
        for one in learn[at : at + 8]:
            with adapter.hooked():
                (_loss(adapter, one) / 8).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        _tell("full")(number + 1, updates)
    print(f"full: {before:.3f} to {mean_loss(adapter, check):.3f}", flush=True)
    model.save_pretrained(out)
    engine.tokenizer.save_pretrained(out)
    return out


def _loss(adapter: Adapter, one: Lesson) -> torch.Tensor:
    packed = pack(one.calls)
    with torch.autocast(adapter.facts.device.type, torch.bfloat16, enabled=quick_in_bfloat16()):
        return -log_likelihood(logits_of(adapter, packed), packed.targets).mean()


def _tell(name: str):
    return lambda done, most: print(f"... {name}: update {done} of {most}", flush=True)
