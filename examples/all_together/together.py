"""One workflow with everything at once, and what each part saves.

A small team handles incidents at a harbour, one after the other:

- the reader asks a manual whose chapters are modules of a schema (Prompt Cache);
- the planner is another model of the family, and computes a third of the layers of what the base model has read
  (DroidSpeak);
- three critics read the plan, each after instructions of its own; a fifth of what they read is computed again in its new
  context (choreographed calls, repair);
- the clerk writes to the public. It reads plan and verdicts, but nothing that depends on what the caller said (guard);
- the cache is too small for all of them: the step graph says whose instructions are needed next (KVFlow).

python examples/all_together/together.py            # in process: one table, every part against the same run without it
python examples/all_together/together.py --server   # and through a server
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import torch
import uvicorn
from rich.console import Console

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams, connect
from choreograph.agents import StepGraph, Workflow
from choreograph.console import print_table
from choreograph.events import Event
from choreograph.outputs import Mode
from choreograph.prompt_cache import PromptCache
from choreograph.server.app import create_app

RULES = (
    "You answer questions about the machines of a harbour. Use the chapters of the manual that follow and no others. "
)
CHAPTERS = {
    "pump": "The pump lifts water out of the dock. It runs dry if the inlet is blocked, and a dry run wears its seal. "
    "Stop it at once, clear the inlet, and look at the seal before it runs again. A spare seal takes one hour. ",
    "crane": "The crane lifts at most nine tonnes. Its brake holds the load if the power fails. A brake that squeals is "
    "worn: lower the load, lock the arm, and change the pads. Nobody stands below the arm meanwhile. ",
    "gate": "The gate keeps the tide out of the dock. It closes by its own weight. If it stays open, something lies on "
    "the sill: send the diver at low water. Never close the gate by force, since its hinges are of cast iron. ",
}
SCHEMA = f'<schema name="manual">{RULES}' + "".join(
    f'<module name="{name}">{text}</module>' for name, text in CHAPTERS.items()
)
SCHEMA += "</schema>"
DUTIES = "Write one short sentence. Keep to what was reported. Say what is done first and who does it. Be calm. "
CRITICS = ("diver", "engineer", "treasurer")
ROLES = {name: f"You are the {name} of the harbour. {DUTIES * 4}" for name in ("planner", *CRITICS, "clerk")}
AGENTS = {"reader": None, "planner": "reader", **dict.fromkeys(CRITICS, "planner"), "clerk": {"all_of": [*CRITICS]}}
GRAPH = {"agents": AGENTS, "repeats": True}
INCIDENTS = (  # chapters to look at, what happened, and what the public must not know
    (
        ("pump", "gate"),
        "The pump is loud and no water comes.",
        "The caller is Ada Holm, who is in debt to the harbour.",
    ),
    (("crane", "gate"), "The brake of the crane squeals under load.", "The caller is Ivo Lund, who fell asleep."),
    (("pump", "crane"), "The pump ran dry and its seal leaks.", "The caller is Ada Holm again, who is furious."),
    (("crane", "gate"), "The gate is open at high tide.", "The caller is the mayor, who wants no one to hear of it."),
)


@dataclass(frozen=True)
class Parts:
    """Which parts a run has."""

    schema: bool = True  # modules of the manual are cached; False: its text is part of every prompt
    layers: bool = True  # the planner computes some layers of the others' messages; False: all of them
    graph: bool = True  # eviction by the step graph; False: least recently used
    choreographed: bool = True  # False: prefix mode
    repair: float = 0.2  # share of what the critics read that is computed again; 1: all of it
    guard: bool = True  # the clerk has no clearance; False: it reads everything as it is


@dataclass
class Result:
    """Texts and costs of a run."""

    texts: list[str]  # of all decodes, in order
    tokens: float  # computed by the engine; one in a third of the layers counts as a third
    seconds: float


Call = Callable[..., Any]


def run(prefill: Call, decode: Call, parts: Parts, *, max_tokens: int = 16) -> list[tuple[str, Any]]:
    """Run the workflow; return agent and message of its decodes.

    Args:
        prefill: of a session, in process or remote.
        decode: likewise; its first argument is the agent.
    """
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    decodes = []

    def write(agent: str, *args: Any, **options: Any) -> Any:
        decodes.append((agent, decode(agent, *args, **options, **sampling).result()))
        return decodes[-1][1]

    for chapters, symptom, caller in INCIDENTS:
        question = f"The incident: {symptom} The cause:"
        if parts.schema:
            imports = "".join(f"<{chapter}/>" for chapter in chapters)
            cause = write("reader", f'<prompt schema="manual">{imports}{question}</prompt>', schema="manual")
        else:
            manual = prefill(RULES + "".join(CHAPTERS[chapter] for chapter in chapters))
            cause = write("reader", question, [manual])
        report = prefill(f"The incident: {symptom}", [cause])
        private = prefill(caller, [report], labels={"caller"})
        context = [prefill(ROLES["planner"], model="planner"), cause, report, private]
        layers: Any = {"kv_reuse": "partial" if parts.layers else "recompute"}
        plan = write("planner", " The plan:", context, model="planner", **layers)
        verdicts = []
        for critic in CRITICS:
            context = [prefill(ROLES[critic]), report, cause, plan]
            verdicts.append(write(critic, " The weakness of the plan:", context, repair=parts.repair))
        clearance: Any = {"clearance": set()} if parts.guard else {}
        write("clerk", " To the public:", [prefill(ROLES["clerk"]), report, plan, *verdicts], **clearance)
    return decodes


def make_engine(
    parts: Parts, model: Any = "smollm2-135m-instruct", sibling: Any = None, capacity: int = 1300
) -> Engine:
    """Return an engine with two models of a family; the second is a perturbed copy unless it is given."""
    cache = CacheConfig(capacity=capacity, eviction="workflow" if parts.graph else "lru")
    engine = Engine.from_pretrained(model, config=EngineConfig(cache=cache), dtype="float32")
    if sibling is None:  # stands for one that you have fine-tuned
        sibling = Engine.from_pretrained(model, dtype="float32").core.hf_model.model
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in sibling.parameters():
                parameter.mul_(1 + 0.01 * torch.randn(parameter.shape, generator=noise))
    engine.add_model("planner", sibling)
    num_layers = engine.model_info.layers
    engine.enable_layer_reuse("planner", pattern=[0, num_layers // 3, num_layers // 3 + max(1, num_layers // 3)])
    return engine


@contextmanager
def in_process(engine: Engine, parts: Parts) -> Iterator[tuple[Call, Call]]:
    """Open a session of an engine; yield its calls."""
    mode: Mode = "choreographed" if parts.choreographed else "prefix"
    with (
        engine.session(mode=mode, seed=0) as session,
        Workflow(session, StepGraph.read(GRAPH)) as team,
        PromptCache(engine, SCHEMA) as manual,
    ):

        def decode(agent: str, header: str, parents: Any = (), schema: str | None = None, **options: Any) -> Any:
            with team.agent(agent):
                if schema is not None:
                    return manual.generate(session, header, sampling=SamplingParams(**options))
                return session.decode(header, parents, **options)

        yield session.prefill, decode


@contextmanager
def on_server(url: str) -> Iterator[tuple[Call, Call]]:
    """Open a session of a server; yield its calls."""
    httpx.put(f"{url}/v1/schemas/manual", json={"pml": SCHEMA}).raise_for_status()
    httpx.put(f"{url}/v1/workflows/harbour", json=GRAPH).raise_for_status()
    with connect(url) as engine, engine.session(seed=0, workflow="harbour") as session:

        def decode(agent: str, header: str, parents: Any = (), **options: Any) -> Any:
            return session.decode(header, parents, agent=agent, **options)

        yield session.prefill, decode


def measure(
    engine: Engine,
    calls: AbstractContextManager[tuple[Call, Call]],
    parts: Parts,
    program: Callable[..., list[tuple[str, Any]]] | None = None,
    **options: Any,
) -> Result:
    """Run a program, `run` by default, from an empty cache; count what its engine computes."""
    engine.clear_cache()
    computed, num_layers = [], engine.model_info.layers

    def count(event: Event) -> None:
        if event.kind == "step":
            layers: Any = event.data["layers"] or num_layers
            computed.append(event.data["tokens"] * layers / num_layers)

    with calls as (prefill, decode):
        unsubscribe, start = engine.events.subscribe(count), time.perf_counter()
        texts = [message.text for _, message in (program or run)(prefill, decode, parts, **options)]
        seconds = time.perf_counter() - start
    unsubscribe()
    return Result(texts, sum(computed), seconds)


VARIANTS = {
    "Prompt Cache: modules of the manual": ("its text in every prompt", {"schema": False}),
    "DroidSpeak: a third of the layers": ("all layers", {"layers": False}),
    "KVFlow: eviction by the step graph": ("least recently used", {"graph": False}),
    "Repair of a fifth of what the critics read": ("all of it", {"repair": 1.0}),
    "Leak guard": ("no guard", {"guard": False}),
    "All of them": (
        "prefix mode alone",
        {"schema": False, "layers": False, "graph": False, "choreographed": False, "guard": False},
    ),
}


def main(model: Any = "smollm2-135m-instruct", **engine_options: Any) -> None:
    """Run everything, then leave out one part after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="store_true", help="run it through a server too")
    parser.add_argument("--max-tokens", type=int, default=16, help="of every message")
    args = parser.parse_args()

    engines = {has_graph: make_engine(Parts(graph=has_graph), model, **engine_options) for has_graph in (True, False)}

    def run_variant(parts: Parts, max_tokens: int = args.max_tokens) -> Result:
        engine = engines[parts.graph]
        return measure(engine, in_process(engine, parts), parts, max_tokens=max_tokens)

    for has_graph in engines:
        run_variant(Parts(graph=has_graph), 1)  # the first run of an engine is slower
    complete = run_variant(Parts())
    rows = []
    for name, (alternative, changes) in VARIANTS.items():
        rows.append(row(name, alternative, complete, run_variant(replace(Parts(), **changes))))
    if args.server:
        with serving(engines[True]) as url:
            remote = measure(engines[True], on_server(url), Parts(), max_tokens=args.max_tokens)
        has_same_texts = "the same texts" if remote.texts == complete.texts else "other texts"
        rows.append(row(f"Through a server: {has_same_texts}", "in process", remote, complete))
    header = ["Part", "Instead", "Tokens with it", "Instead", "Saved", "Seconds with it", "Instead"]
    print_table(Console(), "What each part saves", header, rows, num_text_columns=2)


def row(name: str, alternative: str, result: Result, other: Result) -> list[str]:
    tokens = result.tokens, other.tokens, other.tokens - result.tokens
    return [name, alternative, *(f"{n:,.0f}" for n in tokens), f"{result.seconds:.1f}", f"{other.seconds:.1f}"]


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve an engine on a free port; yield the address."""
    server = uvicorn.Server(uvicorn.Config(create_app(engine), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
