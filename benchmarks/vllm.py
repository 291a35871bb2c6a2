"""vLLM with the connector against plain vLLM with prefix caching, and our engine: one model, equal prompts and counts.

make bench NAME=vllm                                               # about ten minutes on two cores
make bench NAME=vllm ARGS="--only workflows --rounds 4"            # the same time; other parts keep their last results
make bench NAME=vllm ARGS="--only retrieval chat --rounds 4"

Four workflows of `peers`; `retrieval`: every question behind ten passages in another order; `chat`: conversations that a
prefix cache serves best. All sides run each in turns on the same threads, both sides of vLLM with the same options, and
forget everything between runs. Two forms of the connector are measured:

- `spans`: the driver acts as a client of the explicit form. It stores every text by a request of its own, which counts
  as part of the first call that reads it, and lets answers grow by one token, since the last sampled token has no keys.
- `messages`: plain requests, whose messages the connector finds by their content.

Ratios are times of plain vLLM over those of a side, round by round.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer

from choreograph import Engine
from choreograph.models.loader import bundled_gguf, convert_gguf

from .common import (
    Row,
    eager_dtype,
    engine,
    has_fast_bfloat16,
    last_result,
    median_row,
    random_tokens,
    ratio_row,
    row_from_record,
    save,
    write,
)
from .peer_engines import VLLM
from .peer_programs import PROGRAMS, Calls, Choreograph, Concatenated, Side

CONNECTOR = {
    "kv_connector": "ChoreographConnector",
    "kv_connector_module_path": "choreograph.vllm",
    "kv_role": "kv_both",
}
RESULT = "vllm" if has_fast_bfloat16() else "vllm_avx2"
PLAIN, SPANS, MESSAGES, OURS = "vLLM", "connector, spans", "connector, messages", "choreograph"
QUESTIONS, PASSAGES = 16, 10
CHATS, TURNS = 4, 4
CHAT_RUNS = 3  # of a round: a chat is short, and its goal is a difference of 2%

Text = tuple[list[int], str]  # tokens, and the name of their entry


class Spans:
    """A client of vLLM with the connector, in the explicit form."""

    def __init__(self, engine: VLLM) -> None:
        self._engine, self._pending, self._serial = engine, list[Text](), 0
        self.first_tokens: list[float] = []

    def text(self, tokens: list[int]) -> Text:
        text = (tokens, self._new_name())
        self._pending.append(text)
        return text

    def ask(self, calls: Calls, count: int) -> list[Text]:
        began = time.perf_counter()
        self._store_texts()
        prompts, transfers, names = [], [], []
        for header, parts in calls:
            spans, prompt = [], list[int]()
            for tokens, entry in parts:
                spans.append({"entry": entry, "start": 0, "stop": len(tokens), "at": len(prompt)})
                prompt += tokens
            names.append(self._new_name())
            message = {"entry": names[-1], "start": len(prompt), "stop": len(prompt) + len(header) + count}
            transfers.append({"choreograph": {"spans": spans, "store": [message]}})
            prompts.append(prompt + header)
        waited = time.perf_counter() - began
        generated = self._engine.generate(prompts, count + 1, transfers)
        self.first_tokens += [waited + times[0] for times in generated.times]
        for (_, parts), report in zip(calls, generated.reports, strict=True):
            _check_report(report, sum(len(tokens) for tokens, _ in parts))
        return [
            ([*header, *output[:count]], name)
            for (header, _), output, name in zip(calls, generated.tokens, names, strict=True)
        ]

    def _store_texts(self) -> None:
        if self._pending:
            stores = [[{"entry": name, "start": 0, "stop": len(tokens)}] for tokens, name in self._pending]
            transfers = [{"choreograph": {"store": store}} for store in stores]
            self._engine.generate([tokens for tokens, _ in self._pending], 1, transfers)
            self._pending = []

    def _new_name(self) -> str:
        self._serial += 1
        return f"text-{self._serial}"

    def close(self) -> None:
        self._engine.reset()


def _check_report(report: Mapping[str, Any], reused: int) -> None:
    """Raise if the connector did not reuse all of a prompt that it had."""
    said = report.get("choreograph", {})
    if said.get("reused_tokens") != reused:
        raise RuntimeError(f"the connector reused other than {reused} tokens: {said}")


@cache
def _template_tokens(text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(convert_gguf(bundled_gguf())).encode(text, add_special_tokens=False)


def turn(role: str, count: int, seed: int) -> list[int]:
    """Return a chat turn of `count` random tokens, as the model's template renders it."""
    return [
        *_template_tokens(f"<|im_start|>{role}\n"),
        *random_tokens(count, seed=seed),
        *_template_tokens("<|im_end|>\n"),
    ]


def question(count: int, seed: int) -> list[int]:
    """Return a turn of the user, and the start of the answer."""
    return [*turn("user", count, seed), *_template_tokens("<|im_start|>assistant\n")]


def retrieval(side: Side) -> None:
    """Sixteen questions one after another, each behind ten passages in another order."""
    instructions = side.text(turn("system", 60, seed=200))
    # 240 to 420 tokens
    passages = [side.text(turn("user", 240 + 20 * i, seed=210 + i)) for i in range(PASSAGES)]
    for i in range(QUESTIONS):
        order = random.Random(i).sample(passages, len(passages))
        side.ask([(question(24, seed=230 + i), [instructions, *order])], 32)


def chat(side: Side) -> None:
    """Four conversations at once, of four turns."""
    instructions = side.text(turn("system", 60, seed=240))
    histories: list[list[Any]] = [[instructions] for _ in range(CHATS)]
    for i in range(TURNS):
        end = _template_tokens("<|im_end|>\n") if i else []  # of the answer before
        calls = []
        for j, history in enumerate(histories):
            seed = 250 + CHATS * i + j
            # answers begin with given tokens: those to random questions are often equal, and would be one message
            calls.append(([*end, *question(60, seed), *random_tokens(4, seed=500 + seed)], history))
        for history, answer in zip(histories, side.ask(calls, 48), strict=True):
            history.append(answer)


def measure(
    program: Callable[[Side], None], sides: Mapping[str, Callable[[], Side]], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Run a program on all sides in turns.

    Returns:
        Per side: seconds end to end, and the mean seconds to the first token of a call, of every round.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(rounds):
        # in the other order every second time, so that a drift of the machine favours no side
        for name in list(sides)[:: -1 if i % 2 else 1]:
            side = sides[name]()
            began = time.perf_counter()
            program(side)
            seconds = time.perf_counter() - began
            side.close()
            taken[name].append((seconds, fmean(side.first_tokens)))
    return taken


def rows_of(name: str, taken: Mapping[str, list[tuple[float, float]]], goals: Mapping[str, float]) -> list[Row]:
    """Return times and ratios of a program.

    Args:
        goals: what ratios of the connector's sides must reach, by measure.
    """
    rows = []
    for column, label in enumerate(("end to end", "first token")):
        times = {side: [pair[column] for pair in pairs] for side, pairs in taken.items()}
        rows += [median_row(f"{name}: {label}, {side}", t, "s", better="lower") for side, t in times.items()]
        for side in times:
            if side != PLAIN:
                required = goals.get(label) if side != OURS else None
                rows.append(
                    ratio_row(f"{name}: {label}, {side}", times[PLAIN], times[side], peer=PLAIN, required=required)
                )
    return rows


WORKFLOW_GOALS = {name: {"end to end": 1.0} | ({"first token": 3.0} if "debate" in name else {}) for name in PROGRAMS}
PARTS: dict[str, dict[str, Callable[[Side], None]]] = {
    "workflows": PROGRAMS,
    "retrieval": {"retrieval": retrieval},
    "chat": {"chat": chat},
}
GOALS = WORKFLOW_GOALS | {
    "retrieval": {"end to end": 2.0, "first token": 5.0},
    "chat": {"end to end": 0.98, "first token": 0.98},
}


def sides_of(part: str, e: Engine, plain: VLLM, connector: VLLM | None) -> dict[str, Callable[[], Side]]:
    """Return what runs the programs of a part."""
    sides: dict[str, Callable[[], Side]] = {PLAIN: lambda: Concatenated(plain)}
    if connector is not None and part != "chat":
        sides[SPANS] = lambda: Spans(connector)
    if connector is not None and part != "workflows":  # whose prompts are no chats
        sides[MESSAGES] = lambda: Concatenated(connector)
    # a chat reuses its prefix alone
    sides[OURS] = lambda: Choreograph(e, "prefix" if part == "chat" else "choreographed")
    return sides


def keep_other_parts(measured: Iterable[str]) -> list[Row]:
    """Return the rows of the last result that belong to other programs."""
    rows = [row_from_record(record) for record in last_result(RESULT).get("rows", [])]
    return [row for row in rows if row.measure.partition(":")[0] not in set(measured)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--extra-config", type=json.loads, default={}, help="kv_connector_extra_config, as JSON")
    given = options.parse_args()
    threads, dtype = torch.get_num_threads(), eager_dtype()
    e = engine(tokens=16384)
    plain = VLLM(threads, dtype)
    connector = VLLM(threads, dtype, CONNECTOR | {"kv_connector_extra_config": given.extra_config})
    for part in given.only:
        sides = sides_of(part, e, plain, connector)
        for name, program in PARTS[part].items():
            measure(program, {OURS: sides[OURS]}, 1)  # builds kernels
            taken = measure(program, sides, given.rounds * (CHAT_RUNS if part == "chat" else 1))
            rows = [*keep_other_parts([name]), *rows_of(name, taken, GOALS[name])]
            write(RESULT, rows)
    for peer in (plain, connector):
        peer.close()
    save(RESULT, rows)


if __name__ == "__main__":
    main()
