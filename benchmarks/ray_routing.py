"""Routers over two real replicas of the bundled model: tokens computed, time to first token, balance.

    python -m benchmarks.ray_routing [--routers message prefix ...] [--workflows 6]

Ray's own prefix-affinity router serves vLLM's requests alone; `prefix` is its rule over our keys of whole prefixes.
"""

import argparse
import concurrent.futures
import statistics
import time
from collections.abc import Callable
from typing import Any

import openai
import ray
from ray import serve

from choreograph.cluster import deployment
from choreograph.cluster.routing import POLICIES
from choreograph.utils import connect_to_ray

from .common import Row, median_row, save

NOTES = "The {0} report of {1} lists costs, dates, owners and open risks of the work, one line each. "

PORT = 8971

ANSWER = 16  # tokens


def text(name: str, number: int, sentences: int = 12) -> str:
    return NOTES.format(name, f"group {number}") * sentences


def debate(ask: Callable[..., str], number: int) -> None:
    """Three agents over three rounds; each reads its own messages first, then those of the others."""
    spoken: list[list[str]] = [[], [], []]
    for _ in range(3):
        for agent in range(3):
            others = [message for other in range(3) if other != agent for message in spoken[other]]
            spoken[agent].append(ask(f"debate-{number}", [text("main", number), *spoken[agent], *others]))


def supervisor(ask: Callable[..., str], number: int) -> None:
    """Eight workers, each with its task before the common material; the supervisor reads all of them."""
    material = [text(f"part {part}", number) for part in range(3)]
    answers = [ask(f"supervisor-{number}", [f"You are worker {worker}.", *material]) for worker in range(8)]
    ask(f"supervisor-{number}", [*material, *answers])


def retrieval(ask: Callable[..., str], number: int) -> None:
    """Questions over documents that all workflows of a team have in common, in an order that changes."""
    documents = [text(f"document {document}", 0) for document in range(6)]
    for question in range(4):
        first = (number + question) % len(documents)
        picked = [documents[(first + step * (1 + number % 2)) % len(documents)] for step in range(3)]
        ask("retrieval", [*picked, f"Question {question} of reader {number}: what is open?"])


WORKLOADS = {"debate": debate, "supervisor": supervisor, "retrieval": retrieval}


def measure(router: str, workload: Callable[..., None], num_workflows: int, concurrency: int) -> dict[str, Any]:
    """Run a workload on two new replicas."""
    app = deployment.build_app({"replicas": 2, "router": router, "capacity": 32768, "reuse": "messages"})
    cluster = deployment.start(app, host="127.0.0.1", port=PORT)
    ttft: list[float] = []
    usages: list[Any] = []  # of every answer
    try:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            model = client.models.list().data[0].id

            def ask(workflow: str, messages: list[str]) -> str:
                began, first, answer = time.perf_counter(), None, ""
                stream = client.chat.completions.create(
                    model=model,
                    messages=[{"role": "system", "content": "Answer from what you read."}]
                    + [{"role": "user", "content": message} for message in messages],
                    max_tokens=ANSWER,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"choreography": {"workflow": workflow}},
                )
                for chunk in stream:
                    if chunk.choices and chunk.choices[0].delta.content:
                        first = first or time.perf_counter() - began
                        answer += chunk.choices[0].delta.content
                    if chunk.usage:
                        usages.append(chunk.usage.choreography)
                ttft.append(first or time.perf_counter() - began)
                return answer

            with concurrent.futures.ThreadPoolExecutor(concurrency) as executor:
                for future in [executor.submit(workload, ask, number) for number in range(num_workflows)]:
                    future.result()
        loads = serve.get_deployment_handle("engine", deployment.APP_NAME).broadcast("load").results(timeout_s=60)
    finally:
        cluster.stop()
    work = [load.stats.num_batched_tokens for load in loads]
    totals = {name: sum(usage[f"{name}_tokens"] for usage in usages) for name in ("computed", "remote")}
    return {**totals, "ttft": ttft, "imbalance": max(work) / (sum(work) / len(work)) - 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--routers", nargs="+", default=sorted(POLICIES))
    parser.add_argument("--workloads", nargs="+", default=sorted(WORKLOADS))
    parser.add_argument("--workflows", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=4)
    arguments = parser.parse_args()
    rows = []
    connect_to_ray("local", num_cpus=2, log_to_driver=False)  # of all measurements; each has new replicas
    for name in arguments.workloads:
        computed: dict[str, float] = {}
        for router in arguments.routers:
            result = measure(router, WORKLOADS[name], arguments.workflows, arguments.concurrency)
            computed[router] = result["computed"]
            print(name, router, result["computed"], statistics.median(result["ttft"]), result["imbalance"], flush=True)
            for measure_name, unit in (("computed", "tokens"), ("remote", "tokens"), ("imbalance", "share")):
                required, value = (
                    0.1 if (router, measure_name) == ("message", "imbalance") else None,
                    result[measure_name],
                )
                rows.append(Row(f"{name}, {router}: {measure_name}", value, unit, value, value, "lower", required))
            rows.append(median_row(f"{name}, {router}: time to first token", result["ttft"], "s", better="lower"))
        others = [count for router, count in computed.items() if router != "message"]
        if "message" in computed and others:
            share = computed["message"] / min(others)
            label = f"{name}: computed tokens of message routing, of the best other"
            rows.append(Row(label, share, "share", share, share, "lower", 0.6))
    serve.shutdown()
    ray.shutdown()
    save("ray_routing", rows)


if __name__ == "__main__":
    main()
