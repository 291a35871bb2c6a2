"""Attention to reused messages corrected by a temperature and a scale (`Repair(0, "align")`), alone and with repair.

`make bench NAME=align ARGS="--data folder --model model.gguf"`: retrieval as programs do it: ten documents are encoded
once behind a system turn, every question reads five of them in an order of its own, at most 12 tokens. Natural Questions
(`nq_oracle`; ten questions share their ten documents) and HotpotQA (`hotpotqa`; the two supporting documents and three
others). Then votes and debates of the workflows, as `repair` measures them: log-loss and divergence on the messages of
prefix mode. The alignment is the one that the model was calibrated to (`choreograph calibrate`), or that of `--alignment`.
"one position": all documents begin right after the system turn, and the question after the longest one. "first tokens":
the scale is that of the first token of each document alone, which draws attention where a document is encoded apart. Intervals are of
a bootstrap over questions or examples, paired with prefix mode. Results are saved after every group of questions and every
example.

`--grid`: divergence over temperatures and scales, on the calibration set of the package, with documents that were encoded
"behind" the system turn or "alone". `--cost`: what alignment adds to first tokens and to decode steps, in turns with reuse.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from rich.console import Console

from choreograph import ContextFeature, Engine, Message, Repair, SamplingParams, Session
from choreograph.attention.metadata import Alignment
from choreograph.console import print_table
from choreograph.context.feature import READY, Outcome, RequestDraft
from choreograph.features.repair.align import find_alignment
from choreograph.lab.evaluation.calibration import RetrievalExample, load_examples
from choreograph.lab.evaluation.experiment import example_seed
from choreograph.lab.evaluation.metrics import contains_answer, f1
from choreograph.lab.evaluation.statistics import difference, mean
from choreograph.lab.workflows import find
from choreograph.request.request import Request

from .common import interleaved, last_result, merge_results, provenance, write
from .quality import PLANS, examples_of
from .repair import losses, median_of, run, show, summarize

DATASETS = ("nq_oracle", "hotpotqa")
RUNS = ("math-tree_of_thoughts", "math-mad_par", "math-mad_iter")
SYSTEM = "Answer the question from the documents, in a few words."
NUM_ENCODED, NUM_READ, MAX_TOKENS = 10, 5, 12


class Condition(NamedTuple):
    """How questions read their documents."""

    repair: Repair | None
    at_one_position: bool = False
    first_scale: float | None = None  # of attention to the first token of each document but the first


class FirstTokens(ContextFeature):
    """Scales attention to the first token alone of the parents that were encoded without what precedes them."""

    options: ClassVar = {"first_scale": float}
    keeps_options = False
    needs_options = True

    def prepare(self, draft: RequestDraft) -> None:
        if (scale := draft.options.get("first_scale")) is not None:
            draft.request.extend(_FirstScale(scale))

    def rewrite(self, request: Request, *, may_load: bool) -> Outcome:
        """Split the parents behind a system turn and the first document."""
        if (state := request.extension(_FirstScale)) is not None:
            parents, slices, alignments = list(request.parents[:2]), [None, None], [None, None]
            pieces: list[tuple[Any, Any, Any]] = list(zip(parents, slices, alignments, strict=True))
            for parent in request.parents[2:]:
                pieces.append((parent, (0, 1), Alignment(1.0, state.scale)))
                pieces.append((parent, (1, len(parent.tokens)), None))
            request.parents, request.parent_slices, request.alignments = zip(*pieces, strict=True)
            request.offsets = (None,) * len(pieces)
        return READY


@dataclass
class _FirstScale:
    scale: float


class Question(NamedTuple):
    """Question over some of the documents that are encoded together."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]  # indices into the documents of its group, in the order in which it reads them


class Group(NamedTuple):
    """Documents that are encoded once, and the questions that read them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


class Answer(NamedTuple):
    """Measures of one answer."""

    right: float  # 0 or 1
    f1: float
    kl: float  # from prefix mode, on its answer, nats a token


def conditions_of(alignment: Any) -> dict[str, Condition]:
    return {
        "reuse": Condition(None),
        "align": Condition(Repair(0, "align", alignment)),
        "one position": Condition(None, True),
        "align, one position": Condition(Repair(0, "align", alignment), True),
        "first tokens, scale 0.01": Condition(None, first_scale=0.01),
        "first tokens, scale 0.3": Condition(None, first_scale=0.3),
        "first 0.1": Condition(Repair(0.1, "first")),
        "first 0.1, align": Condition(Repair(0.1, "first", alignment)),
        "attention 0.1": Condition(Repair(0.1, "attention")),
        "attention 0.1, align": Condition(Repair(0.1, "attention", alignment)),
    }


def groups_of(name: str, folder: Path, skip: int, limit: int) -> Iterator[Group]:
    """Yield the questions of a dataset with their documents."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()[skip : skip + limit]
    records = [json.loads(line) for line in lines]
    if name == "nq_oracle":
        for start in range(0, len(records), NUM_ENCODED):
            group = records[start : start + NUM_ENCODED]
            yield Group(
                tuple(_text(record["documents"][0]) for record in group),
                tuple(
                    Question(record["question"], tuple(record["answers"]), _read(start + own, [own], len(group)))
                    for own, record in enumerate(group)
                ),
            )
        return
    for number, record in enumerate(records):
        documents = record["documents"]
        needed = [i for i, document in enumerate(documents) if document["title"] in record["supporting_titles"]]
        question = Question(record["question"], (record["answer"],), _read(number, needed, len(documents)))
        yield Group(tuple(map(_text, documents)), (question,))


def _text(document: Mapping[str, str]) -> str:
    return f"{document['title']}\n{document['text']}"


def _read(seed: int, needed: list[int], count: int) -> tuple[int, ...]:
    """Draw the documents that a question reads, needed ones among them, in random order."""
    choice = random.Random(seed)
    others = [i for i in range(count) if i not in needed]
    read = [*needed, *choice.sample(others, max(0, min(NUM_READ - len(needed), len(others))))]
    choice.shuffle(read)
    return tuple(read)


def encode(session: Session, group: Group, *, is_alone: bool = False) -> tuple[Message, list[Message]]:
    """Encode a system turn, and documents behind it or alone."""
    system = session.prefill(session.system(SYSTEM))
    before = [] if is_alone else [system]
    return system, [session.prefill(session.user(text), before) for text in group.documents]


def ask(
    session: Session,
    question: Question,
    system: Message,
    documents: list[Message],
    condition: Condition,
    **options: Any,
) -> tuple[Message, list[torch.Tensor]]:
    """Return the answer and the distribution (V,) of each of its tokens."""
    read = [documents[i] for i in question.documents]
    if condition.at_one_position:
        end = system.length + max(document.length for document in read)
        options |= {"offsets": [0, *[system.length] * len(read)], "new_offset": end}
    if condition.first_scale is not None:
        options["first_scale"] = condition.first_scale
    header = [session.user(f"Question: {question.text}"), session.assistant()]
    message = session.decode(header, [system, *read], repair=condition.repair, **options)
    rows = list[torch.Tensor]()
    message.on_logprobs(lambda row: rows.append(row.clone()))
    return message, rows


def retrieve(engine: Engine, group: Group, conditions: Mapping[str, Condition]) -> dict[str, list[Answer]]:
    """Answer the questions of a group in prefix mode and under each condition."""
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}
    engine.clear_cache()
    result: dict[str, list[Answer]] = defaultdict(list)
    with engine.session(mode="prefix", seed=0) as session:
        encoded = encode(session, group)
        baseline = [ask(session, question, *encoded, Condition(None), **greedy) for question in group.questions]
        texts = [message.result().text for message, _ in baseline]
        tokens = [message.output_token_ids for message, _ in baseline]
    for question, text in zip(group.questions, texts, strict=True):
        result["prefix"].append(Answer(contains_answer(text, question.answers), f1(text, question.answers), 0.0))
    with engine.session(seed=0) as session:
        encoded = encode(session, group)
        for name, condition in conditions.items():
            answers = [ask(session, question, *encoded, condition, **greedy)[0] for question in group.questions]
            forced = [
                ask(session, question, *encoded, condition, forced_tokens=ids)
                for question, ids in zip(group.questions, tokens, strict=True)
            ]
            for question, answer, (copy, rows), (_, expected) in zip(
                group.questions, answers, forced, baseline, strict=True
            ):
                copy.wait_encoded()
                count = len(answer.result().output_token_ids) and min(len(rows), len(expected))
                before, after = torch.stack(expected[:count]), torch.stack(rows[:count])
                kl = (before.exp() * (before - after)).sum(-1).clamp_min(0).mean().item()
                text = answer.text
                result[name].append(Answer(contains_answer(text, question.answers), f1(text, question.answers), kl))
    return result


def summarize_answers(gathered: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """One record a condition; differences are paired with prefix mode and with reuse."""
    records = []
    for name, answers in gathered.items():
        record: dict[str, Any] = {"condition": name, "n": len(answers)}
        for measure in Answer._fields:
            values = [float(getattr(answer, measure)) for answer in answers]
            record[measure] = asdict(mean(values))
            for other in ("prefix", "reuse"):
                paired = [float(getattr(answer, measure)) for answer in gathered[other]]
                record[f"{measure} over {other}"] = asdict(difference(values, paired))
        records.append(record)
    return records


def measure_cost(engine: Engine, alignment: Any, rounds: int) -> list[tuple[str, list[float]]]:
    """Return paired ratios, aligned over reuse, of first tokens and of decode steps of eight documents."""
    steps: dict[str, list[float]] = {}
    with engine.session(seed=0) as session:
        system = session.prefill(list(range(100, 140)))
        documents = [session.prefill(list(range(200 + 300 * i, 500 + 300 * i)), [system]) for i in range(8)]
        for document in documents:
            document.wait_encoded()

        def decode(name: str, repair: Repair | None) -> float:
            message = session.decode(
                list(range(7, 27)),
                [system, *documents],
                repair=repair,
                sampling=SamplingParams(temperature=0, max_tokens=33, ignore_eos=True),
            )
            timing = message.result().timing
            assert timing.ttft is not None and timing.e2e is not None
            steps.setdefault(name, []).append((timing.e2e - timing.ttft) / 32)
            message.release()
            return timing.ttft

        aligned = Repair(0, "align", alignment)
        first = interleaved(rounds, lambda: decode("align", aligned), lambda: decode("reuse", None))
    pairs = {"first token": first, "decode step": (steps["align"], steps["reuse"])}
    return [
        (name, [a / b for a, b in zip(*sides, strict=True)][1:]) for name, sides in pairs.items()
    ]  # the first warms up


def measure_grid(engine: Engine, examples: Sequence[RetrievalExample], is_alone: bool) -> list[dict[str, float]]:
    """Return the divergence from prefix mode over temperatures and scales; documents follow a system turn, or nothing."""
    pairs = [(t, s) for t in (0.8, 0.9, 1.0, 1.1) for s in (0.3, 0.5, 0.7, 1.0, 1.4)]
    answers = []
    with engine.session(mode="prefix", seed=0) as session:
        for example in examples:
            system, documents = encode(session, Group(example.documents, ()))
            everything = Question(example.question, (), tuple(range(len(documents))))
            message, rows = ask(session, everything, system, documents, Condition(None), temperature=0, max_tokens=24)
            answers.append((everything, list(message.result().output_token_ids), rows))
    divergences: dict[tuple[float, float], list[float]] = defaultdict(list)
    with engine.session(seed=0) as session:
        for example, (question, ids, expected) in zip(examples, answers, strict=True):
            system, documents = encode(session, Group(example.documents, ()), is_alone=is_alone)
            for pair in pairs:
                condition = Condition(Repair(0, "align", pair))
                copy, rows = ask(session, question, system, documents, condition, forced_tokens=ids)
                copy.wait_encoded()
                before, after = torch.stack(expected[: len(ids)]), torch.stack(rows[: len(ids)])
                divergences[pair].append((before.exp() * (before - after)).sum(-1).clamp_min(0).mean().item())
                copy.release()
    reuse = divergences[1.0, 1.0]
    return [
        {"temperature": t, "scale": s, "kl": asdict(mean(values)), "kl over reuse": asdict(difference(values, reuse))}
        for (t, s), values in divergences.items()
    ]


def print_retrieval(name: str, records: Sequence[Mapping[str, Any]]) -> None:
    columns = {"right": ".2f", "f1": ".3f", "f1 over prefix": "+.3f", "f1 over reuse": "+.3f", "kl": ".3f"}
    columns["kl over reuse"] = "+.3f"
    rows = [[record["condition"], *(show(record[key], form) for key, form in columns.items())] for record in records]
    print_table(Console(width=190), f"{name}, n = {records[0]['n']}", ["condition", *columns], rows)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=None, help="default: the bundled model")
    options.add_argument("--data", type=Path, help="folder of the datasets")
    options.add_argument("--only", nargs="*", default=[*DATASETS, *RUNS])
    options.add_argument("--limit", type=int, default=40, help="questions of each dataset")
    options.add_argument("--skip", type=int, default=0, help="questions to leave out at the start")
    options.add_argument("--examples", type=int, default=6, help="of each workflow")
    options.add_argument("--max-tokens", type=int, default=32, help="of a message of a workflow")
    options.add_argument("--conditions", nargs="*", help="default: all")
    options.add_argument("--alignment", type=float, nargs=2, help="temperature and scale; default: the calibrated ones")
    options.add_argument("--grid", choices=("behind", "alone"), help="measure divergence over the two numbers instead")
    options.add_argument("--cost", action="store_true", help="measure times instead")
    options.add_argument("--rounds", type=int, default=12, help="of --cost")
    options.add_argument("--dtype", default="bfloat16")
    given = options.parse_args()
    if given.model is None:
        engine, name = Engine.from_pretrained(dtype=given.dtype, features=[FirstTokens()]), "bundled"
    else:
        engine = Engine.from_pretrained(given.model, dtype=given.dtype, features=[FirstTokens()])
        name = Path(given.model).stem
    hf_model = engine.core.hf_model
    if given.grid:
        records = measure_grid(engine, load_examples(None, given.limit), given.grid == "alone")
        update = {f"{name}: {given.grid}": {"n": min(given.limit, 20), **provenance(), "rows": records}}
        write(
            "align", [], name, grids=merge_results("align", "grids", update), runs=last_result("align").get("runs", {})
        )
        rows = [
            [f"{r['temperature']:g}", f"{r['scale']:g}", show(r["kl"], ".4f"), show(r["kl over reuse"], "+.4f")]
            for r in records
        ]
        print_table(Console(width=120), f"{name}, {given.grid}", ["temperature", "scale", "KL", "over reuse"], rows)
        return
    alignment = (
        Alignment(*given.alignment)
        if given.alignment
        else find_alignment(hf_model.sampled_weights_hash, hf_model.model_info.name)
    )
    print(f"{name}: {alignment}", flush=True)

    def keep(part: str, records: Sequence[Mapping[str, Any]], **facts: Any) -> None:
        update = {f"{name}: {part}": {**facts, **provenance(), "alignment": alignment._asdict(), "rows": records}}
        write(
            "align", [], name, runs=merge_results("align", "runs", update), grids=last_result("align").get("grids", {})
        )

    if given.cost:
        costs = measure_cost(engine, alignment, given.rounds)
        rows = [[measure, show(median_of(ratios), ".2f")] for measure, ratios in costs]
        print_table(Console(width=100), "aligned over reuse", ["time", "median ratio"], rows)
        keep("cost", [{"measure": m, "median": statistics.median(r), "ratios": r} for m, r in costs])
        return
    conditions = conditions_of(alignment)
    if given.conditions:
        conditions = {key: conditions[key] for key in ("reuse", *given.conditions)}
    for dataset in [part for part in given.only if part in DATASETS]:
        gathered: dict[str, list[Answer]] = defaultdict(list)
        for group in groups_of(dataset, given.data, given.skip, given.limit):
            for condition, answers in retrieve(engine, group, conditions).items():
                gathered[condition] += answers
            print(f"... {dataset}: {len(gathered['prefix'])}", flush=True)
            records = summarize_answers(gathered)
            keep(dataset, records, skip=given.skip)
        print_retrieval(dataset, records)
    for plan_name in [part for part in given.only if part not in DATASETS]:
        plan = PLANS[plan_name]
        sampling = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=given.max_tokens)
        stages: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        rows = []
        for example in examples_of(plan, given.data)[: given.examples]:
            common: dict[str, Any] = {"sampling": sampling, "options": dict(plan.options)}
            common["seed"] = example_seed(0, example.id)
            workflow = find(plan.workflow)
            baseline, transcript = run(engine, workflow, example.task, mode="prefix", repair=None, **common)
            repairs = {key: c.repair for key, c in conditions.items() if not c.at_one_position and not c.first_scale}
            for condition, repair in {"prefix": None, **repairs}.items():
                mode: Any = "prefix" if condition == "prefix" else "choreographed"
                other, _ = run(engine, workflow, example.task, mode=mode, repair=repair, replay=transcript, **common)
                for stage, (old, new, divergence) in losses(baseline, other).items():
                    values = stages[stage, condition]
                    values["gap"].append(float(np.mean(new) - np.mean(old)))
                    values["kl"].append(float(np.mean(divergence)))
                    values["ttft"].append(float(np.mean(other.ttft[stage])))
                    values["repaired"].append(other.repaired[stage])
            print(f"... {plan_name}: {example.id}", flush=True)
            records = summarize(stages)
            for record in records:
                stage = record["stage"]
                pair = stages[stage, record["condition"]]["kl"], stages[stage, "reuse"]["kl"]
                record["kl_over_reuse"] = asdict(difference(*pair))
                del record["ttft_over_prefix"]  # other work runs beside quality
            keep(plan_name, records, examples=len(stages[records[0]["stage"], "prefix"]["kl"]))
        columns = {"gap": "+.3f", "kl": ".3f", "kl_closed": ".0%", "kl_over_reuse": "+.3f"}
        for record in records:
            rows.append([record["stage"], record["condition"], *(show(record[k], form) for k, form in columns.items())])
        print_table(Console(width=150), plan_name, ["stage", "condition", *columns], rows)


if __name__ == "__main__":
    main()
