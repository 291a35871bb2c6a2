"""Models of one family for the measurements of sharing: variants of a base, trained to answer questions about texts.

`train_pairs` trains what is not in the folder yet: a LoRA adapter through `choreograph.lab.training`, and a full fine-tune.
Questions for training, for profiles and for tests are different ones.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from choreograph import Engine
from choreograph.api.chat import Turn
from choreograph.lab.evaluation.datasets import records
from choreograph.lab.profiling.profiler import ProfileConfig, QAExample, load_qa_examples, parse_qa_example
from choreograph.lab.replay.packed_forward import forward, pack
from choreograph.lab.replay.traced_calls import TracedCall
from choreograph.lab.training import TrainConfig, TrainingExample, train
from choreograph.lab.training.losses import log_likelihood, mean_loss
from choreograph.models.hf_model import HFModel

from .common import has_fast_bfloat16, keep_supporting

MAX_EXAMPLE_TOKENS = 1500  # tokens of a lesson: memory, and time
LONG_CONTEXT_DATASETS = ("hotpotqa", "2wikimqa", "musique")
CONTEXT_ID_SEPARATOR = " in company "  # between the id of a question and the number of one of its contexts


@dataclass(frozen=True)
class Splits:
    """learn and check: for training; profile: for profiles, by data set; test: for the figures, by data set."""

    train: list[QAExample]
    validation: list[QAExample]
    profile: dict[str, list[QAExample]]
    test: dict[str, list[QAExample]]

    def select(self, names: Sequence[str]) -> "Splits":
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
    short = load_qa_examples(folder / "nq_oracle.jsonl", seed=2)
    parts = {name: load_qa_examples(folder / f"{name}.jsonl", seed=2) for name in LONG_CONTEXT_DATASETS}
    learn = [one for result in parts.values() for one in result[:30]]
    learn += short[:60]
    random.Random(0).shuffle(learn)
    test = {name: result[50 : 50 + questions] for name, result in parts.items()}
    few = {one.id: one for name in LONG_CONTEXT_DATASETS for one in with_supporting_passages(folder / f"{name}.jsonl")}
    return Splits(
        learn,
        [one for result in parts.values() for one in result[30:35]],
        {name: result[35 : 35 + inputs] for name, result in parts.items()}
        | {"nq": in_shared_contexts(short[60:90], rounds=min(2, rounds))},
        {
            "nq": in_shared_contexts(short[90:], rounds=rounds),
            "needed": in_shared_contexts(
                [few[one.id] for result in test.values() for one in result], passages=5, rounds=rounds
            ),
            **test,
        },
    )


def with_supporting_passages(file: Path) -> list[QAExample]:
    """Questions with those of their passages alone that the answer needs."""
    return [parse_qa_example(keep_supporting(record), number) for number, record in enumerate(records(file))]


def in_shared_contexts(questions: Sequence[QAExample], passages: int = 10, *, rounds: int) -> list[QAExample]:
    """Every question in several contexts, of its own passages among others'; contexts stand together."""
    result, draw = [], random.Random(0)
    for number in range(rounds):
        shuffled = draw.sample(questions, len(questions))
        for first in range(0, len(shuffled), passages):
            group = shuffled[first : first + passages]
            context = "\n\n".join(one.context for one in group)
            result += [replace(one, id=f"{one.id}{CONTEXT_ID_SEPARATOR}{number}", context=context) for one in group]
    return result


def training_example(engine: Engine, example: QAExample, profile_config: ProfileConfig) -> TrainingExample:
    """A question and its first known answer, as the profile asks it, in one prompt."""
    chat = engine.chat
    assert chat is not None
    ids = chat.encode(Turn("user", f"{profile_config.system}\n\n{example.context}"), opening=True)
    ids += chat.encode(Turn("user", example.question), opening=False)
    header, footer = chat.open_turn(Turn("assistant", ""), opening=False)
    said = engine.tokenizer.encode(example.answers[0], add_special_tokens=False)
    return TrainingExample(example.id, (TracedCall("answer", [*ids, *header], 0, (), [*said, *footer[:1]]),))


def training_examples(
    engine: Engine, questions: list[QAExample], profile_config: ProfileConfig, max_tokens: int
) -> list[TrainingExample]:
    result = [training_example(engine, one, profile_config) for one in questions]
    return [one for one in result if sum(len(call.tokens) for call in one.calls) <= max_tokens]


def train_adapter(
    source: str,
    data: Splits,
    out: Path,
    profile_config: ProfileConfig,
    epochs: int = 2,
    max_tokens: int = MAX_EXAMPLE_TOKENS,
) -> Path:
    """A LoRA adapter on all linear layers."""
    if (out / "report.json").is_file():
        return out
    engine = Engine.from_pretrained(source, dtype="bfloat16" if has_fast_bfloat16() else "float32")
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    config = TrainConfig(
        lora_rank=32,
        lora_alpha=64,
        target_modules=targets,
        learning_rate=3e-4,
        epochs=epochs,
        batch_size=8,
        evals_per_epoch=2,
        bf16=has_fast_bfloat16(),
    )
    learn, check = (
        training_examples(engine, split, profile_config, max_tokens) for split in (data.train, data.validation)
    )
    report = train(engine.core.hf_model, learn, check, out, config, on_update=_print_progress("adapter"))
    print(f"adapter: {report.loss_before:.3f} to {report.loss_after:.3f}", flush=True)
    return out


def train_fully(
    source: str,
    data: Splits,
    out: Path,
    profile_config: ProfileConfig,
    epochs: int = 2,
    max_tokens: int = MAX_EXAMPLE_TOKENS,
    learning_rate: float = 3e-5,
) -> Path:
    """All weights, of a copy of the base. Saved as a folder that `Engine.add_model` takes."""
    if (out / "config.json").is_file():
        return out
    engine = Engine.from_pretrained(source, dtype="float32")
    adapter, draw = engine.core.hf_model, random.Random(0)
    learn, check = (
        training_examples(engine, split, profile_config, max_tokens) for split in (data.train, data.validation)
    )
    before, model = mean_loss(adapter, check), adapter.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    updates = epochs * (len(learn) // 8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=updates + 1, pct_start=0.1)
    for number in range(updates):
        if number % (len(learn) // 8) == 0:
            draw.shuffle(learn)
        at = number % (len(learn) // 8) * 8
        for one in learn[at : at + 8]:
            with adapter.attention_hook():
                (_loss(adapter, one) / 8).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        _print_progress("full")(number + 1, updates)
    print(f"full: {before:.3f} to {mean_loss(adapter, check):.3f}", flush=True)
    model.save_pretrained(out)
    engine.tokenizer.save_pretrained(out)
    return out


def _loss(hf_model: HFModel, example: TrainingExample) -> torch.Tensor:
    packed = pack(example.calls)
    with torch.autocast(hf_model.model_info.device.type, torch.bfloat16, enabled=has_fast_bfloat16()):
        return -log_likelihood(forward(hf_model, packed), packed.targets).mean()


def _print_progress(name: str):
    return lambda done, most: print(f"... {name}: update {done} of {most}", flush=True)
