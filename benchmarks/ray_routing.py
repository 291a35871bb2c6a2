"""Routers over two real replicas of the bundled model: tokens computed, balance, time to first token and end to end.

    python -m benchmarks.ray_routing [--routers message session ...] [--workloads retrieval ...] [--workflows 12]

The workloads are those of `benchmarks.ray_scale` with shorter messages: `ray_workloads.py` says what workflows have in
common. Every workflow is a session of its own, as one user's agents are, so session affinity spreads the readers of a team
over replicas. `session by team` sends all of them to one: it computes each document once, and leaves a replica idle.
Ray's own prefix-affinity router serves vLLM's requests alone; `prefix` is its rule over our keys of whole prefixes.
Replicas exchange messages with the `message` router alone: no other one knows which replica has what.

Every measurement has new replicas, whose start takes longer than what is measured. Predictions are those of the
simulator for the same requests.
"""

import argparse
import concurrent.futures
import math
import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import openai
import ray
from ray import serve

from choreograph.cluster import deployment
from choreograph.cluster.routing import POLICIES
from choreograph.utils import connect_to_ray

from .common import Row, last_result, median_row, row_from_record, write
from .ray_scale import BY_TEAM, TRANSFERS, Machine, compare, create_simulation, routers_of
from .ray_workloads import WORKLOADS, Call, Sizes

PORT = 8971

SIZES = Sizes(system=200, question=400, answer=32, document=400, documents=24)

CORE = Machine(prefill=1000.0, transfer=4000.0, step=0.04, cache_tokens=32768)  # one thread, as predictions assume

WORDS = (
    "the a this each new old open main late next plan cost date owner risk team site part work order report price week "
    "bridge river road house field garden market school engine paper water light stone glass train music letter number "
    "is was has needs shows gives takes holds moves keeps and or but with from over under after before about"
)


def text(key: int, num_tokens: int) -> str:
    """Text of a message: common words, a token each."""
    return " ".join(random.Random(key).choices(WORDS.split(), k=num_tokens))


@dataclass
class Measurement:
    """What the requests of one workload took."""

    ttft: list[float] = field(default_factory=list)  # seconds, of every request
    workflows: list[float] = field(default_factory=list)  # seconds, of every workflow
    usages: list[Any] = field(default_factory=list)  # of every request
    seconds: float = 0.0  # of all workflows
    work: list[int] = field(default_factory=list)  # tokens that each replica has computed, generated ones included

    def results(self) -> dict[str, float]:
        """Return the counts, with the names of the simulator."""
        computed, moved = (
            float(sum(usage.choreography[f"{source}_tokens"] for usage in self.usages))
            for source in ("computed", "remote")
        )
        return with_shares(computed, float(sum(usage.prompt_tokens for usage in self.usages)), moved, self.work)


def with_shares(computed: float, prompt: float, moved: float, work: list[int]) -> dict[str, float]:
    """Return counts of tokens, and what follows from them.

    Args:
        work: tokens of every replica.
    """
    return {
        "computed tokens": computed,
        "prompt tokens": prompt,
        "moved tokens": moved,
        "moved share": moved / prompt,
        "imbalance": max(work) * len(work) / sum(work) - 1,
    }


@dataclass
class WorkflowRunner:
    """Sends the requests of workflows.

    Args:
        is_by_team: all workflows name one session.
    """

    client: openai.OpenAI
    model: str
    workload: str
    is_by_team: bool
    measurement: Measurement = field(default_factory=Measurement)

    def run(self, workflow: int) -> None:
        """Run a workflow to its end; the requests of a turn run at once."""
        began, turn = time.perf_counter(), 0
        answers: dict[int, str] = {}  # by key
        with concurrent.futures.ThreadPoolExecutor(8) as executor:
            while calls := WORKLOADS[self.workload](SIZES, workflow, turn):
                texts = list(executor.map(partial(self.ask, workflow, answers), calls))
                answers |= {key: answer for (_, key), answer in zip(calls, texts, strict=True)}
                turn += 1
        self.measurement.workflows.append(time.perf_counter() - began)

    def ask(self, workflow: int, answers: dict[int, str], call: Call) -> str:
        """Send one request; return its answer."""
        (role, num_role), *others = call[0].items()
        messages: list[Any] = [{"role": "system", "content": text(role, num_role)}]
        for key, num_tokens in others:
            if key in answers:
                messages.append({"role": "assistant", "content": answers[key]})
            else:
                messages.append({"role": "user", "content": text(key, num_tokens)})
        began, first, answer = time.perf_counter(), math.nan, ""
        for chunk in self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=SIZES.answer,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-session-id": "team" if self.is_by_team else f"{self.workload}-{workflow}"},
            extra_body={"choreography": {"workflow": "team"}, "ignore_eos": True},
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                first = time.perf_counter() - began if math.isnan(first) else first
                answer += chunk.choices[0].delta.content
            if chunk.usage:
                self.measurement.usages.append(chunk.usage)
        if not math.isnan(first):  # the answer has a text
            self.measurement.ttft.append(first)
        return answer


def measure(router: str, workload: str, num_workflows: int, concurrency: int) -> Measurement:
    """Run a workload on two new replicas."""
    policy = {TRANSFERS: "message", BY_TEAM: "session"}.get(router, router)
    app = deployment.build_app({"replicas": 2, "router": policy, "capacity": CORE.cache_tokens, "reuse": "messages"})
    cluster = deployment.start(app, host="127.0.0.1", port=PORT)
    try:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            runner = WorkflowRunner(client, client.models.list().data[0].id, workload, router == BY_TEAM)
            before, began = tokens_of_replicas(), time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(concurrency) as executor:
                list(executor.map(runner.run, range(num_workflows)))
            runner.measurement.seconds = time.perf_counter() - began
        runner.measurement.work = [count - before[name] for name, count in tokens_of_replicas().items()]
    finally:
        cluster.stop()
    return runner.measurement


def tokens_of_replicas() -> dict[str, int]:
    """Return the tokens that each replica has computed in all steps."""
    loads = serve.get_deployment_handle("engine", deployment.APP_NAME).broadcast("load").results(timeout_s=60)
    return {load.name: load.stats.num_batched_tokens for load in loads}


def predict(router: str, workload: str, num_workflows: int, concurrency: int) -> dict[str, float]:
    """Simulate a workload on two replicas."""
    simulation = create_simulation(router, 2, workload, 1.0, sizes=SIZES, machine=CORE)
    results = simulation.run(num_workflows, concurrency)
    work = [replica.computed + replica.generated for replica in simulation.replicas.values()]
    return with_shares(*(results[f"{kind} tokens"] for kind in ("computed", "prompt", "moved")), work)


UNITS = dict.fromkeys(("computed tokens", "prompt tokens", "moved tokens"), "tokens")


def rows_of(label: str, measured: Measurement, predicted: dict[str, float]) -> list[Row]:
    """Return the rows of one router and workload."""
    rows = [
        Row(f"{label}: {name}", value, UNITS.get(name, "share"), value, value, "lower", predicted=predicted[name])
        for name, value in measured.results().items()
    ]
    rows.append(median_row(f"{label}: time to first token", measured.ttft, "s", better="lower"))
    rows.append(median_row(f"{label}: end to end of a workflow", measured.workflows, "s", better="lower"))
    seconds = measured.seconds
    return [*rows, Row(f"{label}: all workflows", seconds, "s", seconds, seconds, "lower")]


def ratio_rows(
    workload: str, results: dict[str, dict[str, float]], predicted: dict[str, dict[str, float]]
) -> list[Row]:
    """Return the computed tokens of message routing as shares of those of others."""
    if TRANSFERS not in results or len(results) < 2:
        return []
    simulated = compare(predicted) if TRANSFERS in predicted and len(predicted) > 1 else {}
    return [
        Row(
            f"{workload}: computed tokens of {TRANSFERS}, of {name}",
            share,
            "share",
            share,
            share,
            "lower",
            0.6,
            predicted=simulated.get(name),
        )
        for name, share in compare(results).items()
    ]


def earlier_results(workload: str) -> dict[str, dict[str, float]]:
    """Return the computed tokens and the imbalance of every router in the last results."""
    results: dict[str, dict[str, float]] = {}
    for row in last_result("ray_routing").get("rows", []):
        place, _, name = row["measure"].partition(": ")
        if name in ("computed tokens", "imbalance") and place.startswith(f"{workload}, "):
            results.setdefault(place.removeprefix(f"{workload}, "), {})[name] = row["value"]
    return results


def save_workload(workload: str, rows: list[Row], **options: int) -> None:
    """Replace the rows of a workload in the results; routers that were not measured keep theirs."""
    measured = {row.measure.partition(":")[0] for row in rows} | {workload}  # the latter of the ratios
    others = [
        row for row in last_result("ray_routing").get("rows", []) if row["measure"].partition(":")[0] not in measured
    ]
    kept = [row_from_record(row) for row in others]
    write("ray_routing", kept + rows, sizes=asdict(SIZES), assumed=asdict(CORE), options=options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--routers", nargs="+", default=[*sorted(POLICIES), BY_TEAM])
    parser.add_argument("--workloads", nargs="+", default=sorted(WORKLOADS))
    parser.add_argument("--workflows", type=int, default=12)
    parser.add_argument("--concurrency", type=int, default=4, help="workflows at a time")
    parser.add_argument("--simulate", action="store_true", help="print predictions alone")
    arguments = parser.parse_args()
    size = arguments.workflows, arguments.concurrency
    if not arguments.simulate:
        connect_to_ray("local", num_cpus=2, log_to_driver=False)  # of all measurements; each has new replicas
    for workload in arguments.workloads:
        rows: list[Row] = []
        results, predicted = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
        for name in routers_of(workload):
            if name == "message" or name.replace(TRANSFERS, "message") not in arguments.routers:
                continue  # `message` without transfers is not measured
            predicted[name] = predict(name, workload, *size)
            print(workload, name, "predicted", predicted[name], flush=True)
            if arguments.simulate:
                continue
            measured = measure(name, workload, *size)
            results[name] = measured.results()
            print(workload, name, results[name], statistics.median(measured.ttft), measured.seconds, flush=True)
            rows += rows_of(f"{workload}, {name}", measured, predicted[name])
        rows += ratio_rows(workload, earlier_results(workload) | results, predicted)
        if not arguments.simulate:
            save_workload(workload, rows, workflows=arguments.workflows, concurrency=arguments.concurrency)
        if arguments.simulate and TRANSFERS in predicted and len(predicted) > 1:
            print(workload, compare(predicted), flush=True)
    if not arguments.simulate:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
