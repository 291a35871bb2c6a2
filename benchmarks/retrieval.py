"""Questions over retrieved passages: F1 over the time to first token, of our engine and of vLLM.

make bench NAME=retrieval ARGS="quality --data folder --model model.gguf --limit 24"
make bench NAME=retrieval ARGS="speed --data folder --model model.gguf --minutes 7"
make bench NAME=retrieval ARGS="draw"

Questions of HotpotQA, 2WikiMultihopQA, MuSiQue and Natural Questions come in fours that share a pool of 10 or 20 passages: those
that they need, filled up with their other passages, or with those of other questions where they have none. Every question reads
the whole pool in its own order, by BM25, the best passage first, and is answered greedily with at most 32 tokens.
Programs follow `docs/quality.md`: a shared system turn first, whole turns, the question in the header of the call.

Sides of our engine: `no reuse`, answered in `prefix mode`, which computes the same, `reuse`, `reuse, aligned`, repair of 10, 20
and 40% by each strategy, and a budget of 0.02 nats that was learned on other questions. Sides of vLLM's CPU build: its prefix cache,
which answers as `no reuse`, and plain requests to the connector, with and without repair, when every passage has been
sent once behind the system turn.

- `quality` answers. Records of pools are kept in `--out`, so that a run that was stopped goes on, and the sets take turns,
  so that it is balanced. Differences to no reuse are paired by question.
- `speed` times first tokens and answers of 16 tokens, all sides in turns in one run, round by round until `--minutes` have
  passed. Passages are encoded before, in a time of its own. For a machine with nothing else to do.
"""

import argparse
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from choreograph import Budget, CacheConfig, Engine, EngineConfig, Message, Repair, Session
from choreograph.api.chat import ChatTemplate, Turn
from choreograph.features.repair.options import REPAIR_STRATEGIES
from choreograph.lab.evaluation.metrics import f1, is_correct, normalize_text
from choreograph.lab.evaluation.run_dir import RunDirectory
from choreograph.lab.evaluation.statistics import difference, mean
from choreograph.outputs import Mode
from choreograph.viz import COLORS

from .common import (
    FIGURES,
    Row,
    eager_dtype,
    greedy,
    keep_supporting,
    last_result,
    median_row,
    merge_results,
    print_rows,
    provenance,
    ratio_row,
    row_from_record,
    write,
)
from .peer_engines import VLLM
from .plots import Curve, quality_over_time
from .rules import Group, Question
from .vllm import CONNECTOR

SETS = {
    "hotpotqa": "HotpotQA",
    "2wikimqa": "2WikiMultihopQA",
    "musique": "MuSiQue",
    "nq_oracle": "Natural Questions",
}
PASSAGES = (10, 20)  # of a pool
NUM_QUESTIONS = 4  # of a pool
MIN_POOLS = 3  # fewer have no interval
SYSTEM = "You answer questions about documents."
INSTRUCTION = "Answer the question with a few words of the documents."
MAX_TOKENS = 32
TIMED_TOKENS = 16
BUDGET = 0.02  # nats a token
LEARNED = 3  # questions of each set that the budget is learned on: the last ones
SHARES = (0.1, 0.2, 0.4)
# temperature and scale of models, as `choreograph calibrate` found them, see docs/repair.md
ALIGNMENTS = {"bundled": (0.975, 0.913), "qwen2.5-coder-0.5b-instruct-q4_k_m": (0.95, 1.0)}

NO_REUSE, PREFIX, REUSE, ALIGNED, BUDGETED = (
    "no reuse",
    "prefix mode",
    "reuse",
    "reuse, aligned",
    f"budget of {BUDGET:g}",
)
PLAIN, CONNECTED = "vLLM", "vLLM, connector"
DRAWN = ("first", "attention")  # strategies in the figure
STRATEGIES = tuple(name for name, strategy in REPAIR_STRATEGIES.items() if not strategy.aligns)
REPAIRS = {f"{strategy} {share:.0%}": Repair(share, strategy) for strategy in STRATEGIES for share in SHARES}
EXACT = (PREFIX, PLAIN)  # answer as no reuse does
CONNECTOR_SHARES = {CONNECTED: 0.0, **{f"{CONNECTED}, {share:.0%}": share for share in SHARES}}
SIDES = (NO_REUSE, PREFIX, REUSE, ALIGNED, *REPAIRS, BUDGETED, PLAIN, *CONNECTOR_SHARES)
SOME_SIDES = (NO_REUSE, PREFIX, REUSE, ALIGNED, *(f"first {share:.0%}" for share in SHARES), PLAIN, CONNECTED)


# -- questions ------------------------------------------------------------------------------------------------------


def pools_of(data: str, folder: Path, num_passages: int) -> list[Group]:
    """Return the questions of a set with the pools that they read."""
    records = [json.loads(line) for line in (folder / f"{data}.jsonl").read_text().splitlines()]
    pools, members = list[Group](), list[dict[str, Any]]()
    for record in [*records, None]:
        needed = {text for member in [*members, record] if member for text in _needed(member)}
        if members and (record is None or len(members) == NUM_QUESTIONS or len(needed) > num_passages):
            pools.append(_pool(members, records, num_passages))
            members = []
        if record is not None:
            members.append(record)
    return pools


def _pool(members: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], num_passages: int) -> Group:
    texts = dict.fromkeys(text for member in members for text in _needed(member))
    own = [[_text(document) for document in member["documents"]] for member in members]
    turns = (documents[i] for i in range(max(map(len, own))) for documents in own if i < len(documents))
    others = random.Random(members[0]["id"]).sample(records, len(records))
    for text in (*turns, *(_text(document) for record in others for document in record["documents"])):
        if len(texts) < num_passages:
            texts.setdefault(text)
    passages = list(texts)
    random.Random(members[0]["id"]).shuffle(passages)
    return Group(passages, [_question(member, passages) for member in members])


def _question(record: Mapping[str, Any], passages: Sequence[str]) -> Question:
    scores = relevance(record["question"], passages)
    answers = record.get("answers") or [record["answer"], *record.get("answer_aliases", ())]
    return Question(record["question"], answers, sorted(range(len(passages)), key=lambda i: -scores[i]))


def _needed(record: Mapping[str, Any]) -> list[str]:
    """Return the passages that the answer needs."""
    needed = keep_supporting(record)["documents"] or record["documents"]
    return [_text(document) for document in needed]


def _text(document: Mapping[str, str]) -> str:
    return f"{document['title']}\n{document['text']}"


def relevance(question: str, passages: Sequence[str], *, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Score passages by BM25 (Robertson and Zaragoza 2009), with the document frequencies of these passages."""
    counts = [Counter(normalize_text(passage).split()) for passage in passages]
    lengths = [count.total() for count in counts]
    average, scores = sum(lengths) / len(lengths), [0.0] * len(passages)
    for word in sorted(set(normalize_text(question).split())):
        frequency = sum(word in count for count in counts)
        weight = math.log(1 + (len(passages) - frequency + 0.5) / (frequency + 0.5))
        for i, count in enumerate(counts):
            scores[i] += weight * count[word] * (k1 + 1) / (count[word] + k1 * (1 - b + b * lengths[i] / average))
    return scores


# -- sides ----------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """How our engine reads passages."""

    mode: Mode = "choreographed"
    repair: Repair | None = None


def settings_of(model: str, budgeted: Repair | None) -> dict[str, Setting]:
    """Return the settings of our engine by side; without `reuse, aligned` for a model that was not calibrated.

    Args:
        budgeted: what the budget chose; None: it is left out.
    """
    settings = {NO_REUSE: Setting("naive"), PREFIX: Setting("prefix"), REUSE: Setting()}
    if model in ALIGNMENTS:
        settings[ALIGNED] = Setting(repair=Repair(0, "align", ALIGNMENTS[model]))
    settings |= {name: Setting(repair=repair) for name, repair in REPAIRS.items()}
    return settings if budgeted is None else {**settings, BUDGETED: Setting(repair=budgeted)}


def equal_side(repair: Repair) -> str | None:
    """Return the side that computes the same as a repair, if there is one."""
    if repair.share in (0, 1):
        return NO_REUSE if repair.share else REUSE
    return next((name for name, other in REPAIRS.items() if other == repair), None)


def header_of(question: Question) -> list[Turn]:
    return [Turn("user", f"{INSTRUCTION}\n\nQuestion: {question.text}"), Turn("assistant", "Short answer:")]


def encode(session: Session, pool: Group) -> list[Message]:
    """Encode the system turn, and the passages behind it."""
    system = session.prefill(session.system(SYSTEM))
    return [system, *(session.prefill(session.user(text), [system]) for text in pool.documents)]


def ask(
    session: Session, question: Question, encoded: Sequence[Message], repair: Repair | None, **options: Any
) -> Message:
    parents = [encoded[0], *(encoded[1 + i] for i in question.reads)]
    return session.decode(header_of(question), parents, repair=repair, **options)


class Prompts(NamedTuple):
    """A pool and its questions in tokens, as vLLM gets them."""

    system: list[int]
    passages: list[list[int]]
    headers: list[list[int]]
    orders: list[list[int]]
    opener: list[int]  # of an answer

    @classmethod
    def of(cls, template: ChatTemplate, pool: Group) -> "Prompts":
        system = template.encode(Turn("system", SYSTEM), opening=True)
        passages = [template.encode(Turn("user", text), opening=False, after_system=True) for text in pool.documents]
        headers = [
            [
                token
                for turn in template.encode_turns(header_of(question), opening=False, opens_last=True)
                for token in turn.token_ids
            ]
            for question in pool.questions
        ]
        (opener,) = template.encode_turns([Turn("assistant", "")], opening=False, opens_last=True)
        orders = [question.reads for question in pool.questions]
        return cls(system, passages, headers, orders, list(opener.token_ids))

    def question(self, number: int) -> list[int]:
        """Return the prompt of a question."""
        read = [token for i in self.orders[number] for token in self.passages[i]]
        return [*self.system, *read, *self.headers[number]]


def send_passages(peer: VLLM, prompts: Prompts) -> None:
    """Send every passage once, behind the system turn, so that the connector stores it."""
    peer.generate([[*prompts.system, *passage, *prompts.opener] for passage in prompts.passages], 1)


def transfer_of(share: float) -> dict[str, Any]:
    return {"choreograph": {"mode": "messages", "repair": share}}


# -- quality --------------------------------------------------------------------------------------------------------


def waves_of(settings: Mapping[str, Setting]) -> Iterator[dict[str, Setting]]:
    """Yield the settings of one strategy after another, which are answered in the same steps."""
    waves: dict[Any, dict[str, Setting]] = defaultdict(dict)
    for name, setting in settings.items():
        strategy = setting.repair.strategy if setting.repair and setting.repair.share else "first"
        waves[setting.mode, strategy][name] = setting
    yield from waves.values()


def answer_pool(engine: Engine, pool: Group, settings: Mapping[str, Setting]) -> dict[str, list[tuple[str, float]]]:
    """Return the answer of every question with the tokens that were computed for it, a share of the passages included."""
    answers: dict[str, list[tuple[str, float]]] = {}
    for mode in dict.fromkeys(setting.mode for setting in settings.values()):
        engine.clear_cache()
        with engine.session(mode=mode, seed=0) as session:
            encoded = encode(session, pool)
            for message in encoded if mode == "choreographed" else ():
                message.wait_encoded()
            shared = session.usage.computed_tokens / len(pool.questions)
            for wave in waves_of({name: setting for name, setting in settings.items() if setting.mode == mode}):
                engine.clear_cache()  # of the repairs of others; the passages are referenced
                messages = {
                    name: [
                        ask(session, question, encoded, setting.repair, temperature=0, max_tokens=MAX_TOKENS)
                        for question in pool.questions
                    ]
                    for name, setting in wave.items()
                }
                for name, calls in messages.items():
                    answers[name] = [(call.text, shared + call.usage.computed_tokens) for call in calls]
                for call in [call for calls in messages.values() for call in calls]:
                    call.release()
    return answers


def answer_connected(
    peer: VLLM, prompts: Prompts, tokenizer: Any, names: Iterable[str]
) -> dict[str, list[tuple[str, float]]]:
    """Return the same of vLLM with the connector."""
    answers: dict[str, list[tuple[str, float]]] = {}
    numbers, special = range(len(prompts.headers)), set(tokenizer.all_special_ids)
    stored = len(prompts.system) + sum(len(passage) + len(prompts.opener) for passage in prompts.passages)
    for name in names:
        peer.reset()
        send_passages(peer, prompts)
        transfers = [transfer_of(CONNECTOR_SHARES[name])] * len(numbers)
        generated = peer.generate([prompts.question(i) for i in numbers], MAX_TOKENS, transfers)
        answers[name] = []
        for tokens, report in zip(generated.tokens, generated.reports, strict=True):
            end = next((i for i, token in enumerate(tokens) if token in special), len(tokens))
            computed = report["choreograph"]["computed_tokens"] + stored / len(numbers)
            answers[name].append((tokenizer.decode(tokens[:end]), computed))
    return answers


def score(question: Question, text: str) -> dict[str, float]:
    """Score the first line of an answer."""
    line = text.strip().partition("\n")[0]
    exact = normalize_text(line) in map(normalize_text, question.answers)
    return {"f1": f1(line, question.answers), "exact": float(exact), "right": float(is_correct(line, question.answers))}


def learn(engine: Engine, folder: Path, sets: Iterable[str], num_passages: int, file: Path) -> Repair:
    """Return what a budget chooses that measured calls of the last questions of each set."""
    budget = Budget(BUDGET, shadow_calls=1.0, shadow_tokens=1e9, strategy=("first", "attention"))
    budget.stage = "answer"
    if file.exists():
        budget.load(file)
    else:
        for data in sets:
            pool = pools_of(data, folder, num_passages)[-1]
            for question in pool.questions[:LEARNED]:
                with engine.session(seed=0, max_kl=budget) as session:
                    encoded = encode(session, pool)
                    # the budget chooses where no repair is given
                    parents = [encoded[0], *(encoded[1 + i] for i in question.reads)]
                    session.decode(header_of(question), parents, temperature=0, max_tokens=MAX_TOKENS).result()
            print(f"... budget: {data}", flush=True)
        budget.save(file)
    return budget.repair_for("/answer")


def summarize(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return one record a side: means, and differences to no reuse on the questions that both answered.

    Intervals resample pools, since questions that share one read the same passages.
    """
    rows = []
    baseline = {record["id"]: record for record in records[NO_REUSE]}
    for name, answered in records.items():
        shared = [record for record in answered if record["id"] in baseline]
        pairs = [
            pair for record in shared for pair in zip(record["answers"], baseline[record["id"]]["answers"], strict=True)
        ]
        pools = [[record["id"]] for record in shared for _ in record["answers"]]
        row: dict[str, Any] = {"side": name, "n": len(pairs), "pools": len(shared)}
        for key in ("f1", "exact", "right"):
            values, others = ([side[key] for side in sides] for sides in zip(*pairs, strict=True))
            row[key] = asdict(mean(values, pools))
            row[f"{key} over no reuse"] = asdict(difference(values, others, pools))
        row["same"] = asdict(mean([float(a["text"] == b["text"]) for a, b in pairs], pools))
        row["computed"] = asdict(mean([a["computed"] for a, _ in pairs], pools))
        rows.append(row)
    return rows


def measure_quality(options: argparse.Namespace) -> None:
    """Answer pools until all are, and summarize them after each round."""
    engine, model = load(options.model)
    template = ChatTemplate(engine.tokenizer)
    run_config = {"sides": SIDES, "max_tokens": MAX_TOKENS, "system": SYSTEM, "instruction": INSTRUCTION}
    out = RunDirectory(options.out / model, {"conditions": SIDES, **run_config})
    connected = [name for name in CONNECTOR_SHARES if name in options.sides]
    peer = VLLM(torch.get_num_threads(), eager_dtype(), CONNECTOR, options.model) if connected else None
    budgets: dict[int, Repair] = {}
    for num_passages in options.passages if BUDGETED in options.sides else ():
        if BUDGETED in sides_of(num_passages, options.sides):
            budgets[num_passages] = learn(
                engine, options.data, options.sets, num_passages, out.path / f"budget-{num_passages}.json"
            )
            print(f"... budget, {num_passages} passages: {budgets[num_passages]}", flush=True)
    keep(budgets={f"{model}, {n}": [repair.share, repair.strategy] for n, repair in budgets.items()})
    jobs = []
    for num_passages in options.passages:
        limit = options.limit // (1 if num_passages == min(options.passages) else options.fewer)
        for data in options.sets:
            pools = pools_of(data, options.data, num_passages)[:-1]
            counts, asked = 0, []
            for number, pool in enumerate(pools):
                if counts < limit:
                    asked.append((number, pool))
                counts += len(pool.questions)
            # rounds of all jobs are spread over the run
            jobs += [((i + 1) / len(asked), num_passages, data, *job) for i, job in enumerate(asked)]
    for _, num_passages, data, number, pool in sorted(jobs, key=lambda job: (job[0], job[1])):
        identity = f"{data}/{num_passages}/{number}"
        settings = settings_of(model, budgets.get(num_passages))
        missing = [
            name
            for name in sides_of(num_passages, options.sides)
            if name not in EXACT
            and (name in settings or (name in CONNECTOR_SHARES and number % options.connector_every == 0))
            and all(record["id"] != identity for record in out.records(name))
        ]
        if not missing:
            continue
        own = {name: setting for name, setting in settings.items() if name in missing}
        own |= {NO_REUSE: Setting("prefix")} if NO_REUSE in own else {}  # the same texts, for less
        copied = equal_side(own[BUDGETED].repair) if BUDGETED in own and own[BUDGETED].repair else None
        if copied in missing:
            own.pop(BUDGETED)
        answers = answer_pool(engine, pool, own)
        if copied in answers:
            answers[BUDGETED] = answers[copied]
        if peer is not None and (names := [name for name in missing if name in CONNECTOR_SHARES]):
            answers |= answer_connected(peer, Prompts.of(template, pool), engine.tokenizer, names)
        for name, values in answers.items():
            scored = [
                {"text": text, "computed": computed, **score(question, text)}
                for question, (text, computed) in zip(pool.questions, values, strict=True)
            ]
            out.append(name, {"id": identity, "made": provenance(), "answers": scored})
        print(f"... {identity}", flush=True)
        keep_quality(out, model)
    if peer is not None:
        peer.close()
    keep_quality(out, model)
    draw()


def sides_of(num_passages: int, sides: Sequence[str]) -> list[str]:
    """Return the sides that answer questions over so many passages."""
    return [name for name in sides if num_passages == PASSAGES[0] or name in SOME_SIDES]


def keep_quality(out: RunDirectory, model: str) -> None:
    """Save the summaries of all sets together and of each.

    A part lists where and when its records were made; those of older runs do not say it, and keep what the last result
    says.
    """
    records = {name: rows for name in SIDES if (rows := out.records(name))}
    update, stored = {}, last_result("retrieval").get("quality", {})
    for num_passages in PASSAGES:
        for data in ("all sets", *SETS):
            chosen = {name: [r for r in rows if _is_of(r["id"], data, num_passages)] for name, rows in records.items()}
            if chosen.get(NO_REUSE):
                rows = summarize({name: rows for name, rows in chosen.items() if rows})
                key = f"{model}, {num_passages} passages, {data}"
                places = list(stored.get(key, {}).get("made", ()))
                places += [r["made"] for answered in chosen.values() for r in answered if "made" in r]
                distinct = list({tuple(place.items()): place for place in places}.values())
                update[key] = {"n": rows[0]["n"], "made": distinct, "rows": rows}
    keep(quality=update)


def _is_of(identity: str, data: str, num_passages: int) -> bool:
    name, passages, _ = identity.split("/")
    return int(passages) == num_passages and data in (name, "all sets")


# -- speed ----------------------------------------------------------------------------------------------------------

Times = dict[str, list[float]]  # seconds: "first token" and "answer" of every question, "passages" of every pool


def time_ours(engine: Engine, pool: Group, settings: Mapping[str, Setting], count: int) -> dict[str, Times]:
    """Ask the questions of a pool one after the other with each setting."""
    times: dict[str, Times] = {}
    for mode in ("naive", "prefix", "choreographed"):
        names = [name for name, setting in settings.items() if setting.mode == mode]
        # sides that encode nothing before have sessions of their own
        for group in [names] if mode == "choreographed" else [[name] for name in names]:
            engine.clear_cache()
            with engine.session(mode=mode, seed=0) as session:
                start = time.perf_counter()
                encoded = encode(session, pool)
                for message in encoded if mode == "choreographed" else ():
                    message.wait_encoded()
                encoding = time.perf_counter() - start if mode == "choreographed" else 0.0
                for name in group:
                    engine.clear_cache()  # of the repairs of others; the passages are referenced
                    calls = []
                    for question in pool.questions:
                        call = ask(session, question, encoded, settings[name].repair, sampling=greedy(count))
                        calls.append(call.result())
                    times[name] = {
                        "first token": [seconds_of(call, "ttft") for call in calls],
                        "answer": [seconds_of(call, "e2e") for call in calls],
                        "passages": [encoding],
                    }
                    for call in calls:
                        call.release()
    return times


def seconds_of(call: Message, measure: str) -> float:
    seconds = getattr(call.timing, measure)
    if seconds is None:
        raise RuntimeError(f"a call has no {measure}: it did not decode to its end; run the part again")
    return float(seconds)


def time_vllm(peer: VLLM, prompts: Prompts, count: int, share: float | None) -> Times:
    """Ask the questions of a pool one after the other.

    Args:
        share: of repair; None for vLLM without the connector.
    """
    peer.reset()
    start = time.perf_counter()
    if share is not None:
        send_passages(peer, prompts)
    times: Times = {
        "first token": [],
        "answer": [],
        "passages": [time.perf_counter() - start if share is not None else 0.0],
    }
    for number in range(len(prompts.headers)):
        generated = peer.generate([prompts.question(number)], count, [None if share is None else transfer_of(share)])
        times["first token"].append(generated.times[0][0])
        times["answer"].append(generated.times[0][-1])
    return times


def measure_speed(options: argparse.Namespace) -> None:
    """Time all sides in turns, round by round, and save after each."""
    deadline = time.perf_counter() + 60 * options.minutes
    engine, model = load(options.model)
    template, threads = ChatTemplate(engine.tokenizer), torch.get_num_threads()
    connected = [name for name in CONNECTOR_SHARES if name in options.sides]
    with ThreadPoolExecutor() as executor:  # both start in a minute
        starts = [
            executor.submit(VLLM, threads, eager_dtype(), connector, options.model) if is_asked else None
            for is_asked, connector in ((PLAIN in options.sides, None), (connected, CONNECTOR))
        ]
        plain, peer = (start and start.result() for start in starts)
    budgets = last_result("retrieval").get("budgets", {})
    pools = {
        (num_passages, data): pools_of(data, options.data, num_passages)
        for num_passages in options.passages
        for data in options.sets
    }

    def run(num_passages: int, pool: Group, count: int, turn: int) -> dict[str, Times]:
        budget = budgets.get(f"{model}, {num_passages}")
        names = sides_of(num_passages, options.sides)
        own = {n: s for n, s in settings_of(model, Repair(*budget) if budget else None).items() if n in names}
        if budget and equal_side(Repair(*budget)) in names:
            own.pop(BUDGETED, None)
        own = {name: own[name] for name in random.Random(turn).sample(list(own), len(own))}
        prompts, times = Prompts.of(template, pool), dict[str, Times]()
        runs: list[Any] = [lambda: times.update(time_ours(engine, pool, own, count))]
        if plain is not None:
            runs.append(lambda: times.update({PLAIN: time_vllm(plain, prompts, count, None)}))
        for name in connected if peer is not None else ():
            if name in names:
                runs.append(
                    lambda name=name: times.update({name: time_vllm(peer, prompts, count, CONNECTOR_SHARES[name])})
                )
        for work in runs[:: -1 if turn % 2 else 1]:
            work()
        return times

    gathered: dict[int, dict[str, Times]] = {n: defaultdict(lambda: defaultdict(list)) for n in options.passages}
    for num_passages in options.passages:  # warms up
        pool = pools[num_passages, options.sets[0]][-1]
        run(num_passages, Group(pool.documents, pool.questions[:1]), 2, 0)
    print("... warm", flush=True)
    turn, longest, rows = 0, 0.0, list[Row]()
    while turn < options.rounds and (not turn or time.perf_counter() + longest < deadline):
        start = time.perf_counter()
        data = options.sets[turn % len(options.sets)]
        for num_passages in options.passages:
            pool = pool_of_round(pools[num_passages, data], turn // len(options.sets))
            pool = Group(pool.documents, pool.questions[: options.questions])
            for name, times in run(num_passages, pool, TIMED_TOKENS, turn).items():
                for key, values in times.items():
                    gathered[num_passages][name][key] += values
        turn, longest = turn + 1, max(longest, time.perf_counter() - start)
        print(f"... round {turn}, {time.perf_counter() - start:.0f} s", flush=True)
        measured = [row for n, sides in gathered.items() for row in rows_of(f"{model}, {n} passages", sides)]
        titles = {row.measure.partition(":")[0] for row in measured}
        others = [row_from_record(record) for record in last_result("retrieval").get("rows", [])]
        rows = [*(row for row in others if row.measure.partition(":")[0] not in titles), *measured]
        store(rows)
    for child in (plain, peer):
        if child is not None:
            child.close()
    print_rows("retrieval", rows)
    draw()


def pool_of_round(pools: Sequence[Group], number: int) -> Group:
    """Return the pool that a round times: all but the last in turns, on which the budget learned."""
    return pools[number % (len(pools) - 1)]


def rows_of(title: str, sides: Mapping[str, Times]) -> list[Row]:
    """Return times, and ratios of vLLM and of prefix mode over each side, paired by question."""
    rows = []
    for name, times in sides.items():
        for key in ("first token", "answer"):
            rows.append(median_row(f"{title}: {key}, {name}", [1e3 * t for t in times[key]], "ms", better="lower"))
            for other in (PREFIX, PLAIN):
                if other in sides and other != name:
                    rows.append(ratio_row(f"{title}: {key}, {name}", sides[other][key], times[key], peer=other))
        if any(times["passages"]):
            rows.append(
                median_row(f"{title}: passages, {name}", [1e3 * t for t in times["passages"]], "ms", better="lower")
            )
    return rows


# -- results --------------------------------------------------------------------------------------------------------


def load(model: str | None) -> tuple[Engine, str]:
    """Return the engine of a model, and the name that results have."""
    config = EngineConfig(cache=CacheConfig(capacity=60_000))
    engine = Engine.from_pretrained(*([model] if model else []), dtype="bfloat16", config=config)
    return engine, Path(model or "bundled").stem


def keep(**updates: Mapping[str, Any]) -> None:
    """Save parts of the results beside the others."""
    store([row_from_record(row) for row in last_result("retrieval").get("rows", [])], **updates)


def store(rows: Sequence[Row], **updates: Mapping[str, Any]) -> None:
    """Save rows, and parts of the results beside the others, with the models of both."""
    parts = {key: merge_results("retrieval", key, updates.get(key, {})) for key in ("quality", "budgets")}
    models = dict.fromkeys(name.partition(", ")[0] for name in [*(row.measure for row in rows), *parts["quality"]])
    write("retrieval", rows, ", ".join(models), **parts)


def draw() -> None:
    """Draw F1 over first tokens, for models and numbers of passages of which both were measured."""
    result = last_result("retrieval")
    times = {row["measure"]: row["value"] / 1e3 for row in result.get("rows", ()) if row["peer"] is None}
    for key, part in result.get("quality", {}).items():
        title, data = key.rsplit(", ", 1)
        if data == "all sets" and f"{title}: first token, {NO_REUSE}" in times:
            rows = {row["side"]: row for row in part["rows"]}
            _draw(title, rows, {side: times.get(f"{title}: first token, {side}") for side in SIDES})


def _draw(title: str, rows: Mapping[str, Any], times: Mapping[str, float | None]) -> None:
    level = 100 * rows[NO_REUSE]["f1"]["value"]

    def curve(label: str, sides: Sequence[str], **look: Any) -> Curve:
        points = []
        for side in sides:
            # prefix caches answer as no reuse does
            over = rows[NO_REUSE if side in EXACT else side]["f1 over no reuse"]
            value, low, high = (level + 100 * over[key] for key in ("value", "low", "high"))
            points.append((times[side], (value, low, high)))
        notes = [side.rsplit(" ", 1)[1] if side.endswith("%") else "" for side in sides]
        return Curve(label, points, notes, **look)

    def measured(*sides: str) -> list[str]:
        """Return the sides with times and answers, of as many pools as intervals need."""
        return [s for s in sides if times.get(s) and (s in EXACT or (s in rows and rows[s]["pools"] >= MIN_POOLS))]

    panels: dict[str, list[Curve]] = {"Choreograph": [], "vLLM": []}
    for number, strategy in enumerate(DRAWN):  # the table has all strategies
        if len(sides := measured(REUSE, *(side for side in REPAIRS if side.startswith(f"{strategy} ")))) > 1:
            look = {"color": COLORS[number], "is_below": number == 1, "labeled": min(number + 1, len(sides) - 1)}
            panels["Choreograph"].append(curve(f"repair: {strategy}", sides, **look))
    for name, panel, sides, look in (
        (REUSE, "Choreograph", (REUSE,), {"is_below": True}),
        (BUDGETED, "Choreograph", (BUDGETED,), {"align": "left"}),
        ("no reuse,\nprefix mode", "Choreograph", (PREFIX, NO_REUSE), {}),
        ("prefix caching", "vLLM", (PLAIN,), {}),
        ("connector: reuse", "vLLM", (CONNECTED,), {"is_below": True}),
    ):
        if timed := measured(*sides):
            panels[panel].append(curve(name, timed, **look))
    if len(sides := measured(*CONNECTOR_SHARES)) > 1:
        panels["vLLM"].insert(0, curve("connector: repair", sides, color=COLORS[0], labeled=len(sides) // 2))
    quality_over_time(
        panels,
        FIGURES / f"retrieval-{title.replace(' ', '-').replace(',', '')}.svg",
        level=level,
        margin=1,
        xlabel="seconds to the first token",
        ylabel="F1 of answers",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("quality", "speed", "draw"))
    parser.add_argument("--model", default=None, help="default: the bundled model")
    parser.add_argument("--data", type=Path, help="folder of the datasets")
    parser.add_argument("--sets", nargs="*", choices=list(SETS), default=list(SETS))
    parser.add_argument("--passages", type=int, nargs="*", choices=PASSAGES, default=list(PASSAGES))
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--limit", type=int, default=24, help="of quality: questions of each set with 10 passages")
    parser.add_argument("--fewer", type=int, default=2, help="of quality: this part of them with 20 passages")
    parser.add_argument("--connector-every", type=int, default=2, help="of quality: pools that the connector answers")
    parser.add_argument("--out", type=Path, default=Path("out/retrieval"), help="of quality: records, to go on with")
    parser.add_argument("--minutes", type=float, default=6.0, help="of speed: no round begins that would end later")
    parser.add_argument("--rounds", type=int, default=100, help="of speed: at most")
    parser.add_argument("--questions", type=int, default=3, help="of speed: of a pool")
    options = parser.parse_args()
    if options.part == "draw":
        draw()
    elif options.data is None:
        parser.error("--data is needed")
    else:
        {"quality": measure_quality, "speed": measure_speed}[options.part](options)


if __name__ == "__main__":
    main()
