"""One workflow with everything at once, and what each part saves.

A small team handles incidents at a harbour, one after the other:

- the reader asks a manual whose chapters are modules of a schema (Prompt Cache);
- the planner is another model of the family, and computes a third of the layers of what the base model has read
  (DroidSpeak);
- three critics read the plan, each after instructions of its own; a fifth of what they read is computed again in its new
  context (choreographed calls, repair);
- the clerk writes to the public. It reads plan and verdicts, but nothing that depends on what the caller said (guard);
- the cache is too small for all of them: the step graph says whose instructions are needed next (KVFlow).

python examples/all_together/together.py            # in process: one table, everything against runs without a part
python examples/all_together/together.py --server   # everything in process and through a server
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
    "Name one cause, the most likely one, and the chapter that describes it. If no chapter describes it, say so. "
)
CHAPTERS = {
    "pump": "Chapter on the pump. The pump lifts water out of the dock through an inlet at the bottom and an outlet in the "
    "north wall. It runs dry if the inlet is blocked, and a dry run of more than two minutes wears its seal. A worn seal "
    "leaks oil into the dock, which shows as a film on the water. The pump is loud when it draws air. Stop it at once, "
    "clear the inlet with the long rake, and look at the seal before it runs again. A spare seal is in the second drawer "
    "of the store; changing it takes one hour and two people. After a change, run the pump for ten minutes with the outlet "
    "half open and read the pressure: it is four bar, and never less than three. ",
    "crane": "Chapter on the crane. The crane lifts at most nine tonnes, and six in a wind of more than thirty knots. Its "
    "brake holds the load if the power fails. A brake that squeals is worn: lower the load, lock the arm, and change the "
    "pads. Pads are changed in pairs, and the new ones are run in with an empty hook for a quarter of an hour. A load that "
    "swings was lifted too fast. Nobody stands below the arm meanwhile, and the yard is closed by the red chain. If the "
    "power fails while a load hangs, release the brake by hand, a little at a time, with one person at the lever and one "
    "who watches the load. The rope is looked at every month, and replaced if a strand is broken. ",
    "gate": "Chapter on the gate. The gate keeps the tide out of the dock. It closes by its own weight when the water "
    "outside stands one metre above the water inside. If it stays open, something lies on the sill: send the diver at low "
    "water, with the lamp and the short hook. Never close the gate by force, since its hinges are of cast iron. A gate that "
    "leaks at the side needs a new wooden strip, which the carpenter cuts to measure. The gate is greased in spring and in "
    "autumn. At a tide of more than five metres the dock is emptied of ships before, because the gate may be lifted by "
    "waves. The key of the gate house hangs in the office; take it only after you have signed for it. ",
}
SCHEMA = f'<schema name="manual">{RULES}' + "".join(
    f'<module name="{name}">{text}</module>' for name, text in CHAPTERS.items()
)
SCHEMA += "</schema>"
DUTIES = (
    "Write one short sentence. Keep to what was reported and to what the manual says. Say what is done first and who does it. "
    "Think of the tide, of the weather and of the people who work in the yard at that time. Do not promise what the harbour "
    "cannot keep, and do not blame anyone. If two things must be done at once, name the one that protects people first, then "
    "the one that protects ships, then the one that protects machines. Be calm. "
)
CRITICS = ("diver", "engineer", "treasurer")
ROLES = {name: f"You are the {name} of the harbour. {DUTIES}" for name in ("planner", *CRITICS, "clerk")}
AGENTS = {"reader": None, "planner": "reader", **dict.fromkeys(CRITICS, "planner"), "clerk": {"all_of": [*CRITICS]}}
GRAPH = {"agents": AGENTS, "repeats": True}
INCIDENTS = (  # chapters to look at, what happened, the log of the watch, and what the public must not know
    (
        ("pump", "gate"),
        "The pump is loud and no water comes.",
        "At six the pump was started by the night watch to empty the dock for the ferry. At ten past six it became loud, and "
        "the pressure fell from four bar to one. The outlet in the north wall gave foam and then nothing. The gate was closed "
        "and the water inside stood at two metres. Weed drifts in the dock since the storm of Tuesday, and a fender is "
        "missing. The pump ran on for four minutes before the watch stopped it. There is a film of oil next to the inlet. The "
        "ferry waits outside with eighty passengers, and low water is at nine. The rake is in its place, but its handle is "
        "broken. Two people are on duty; the engineer can come at seven. ",
        "The caller is Ada Holm, who is in debt to the harbour.",
    ),
    (
        ("crane", "gate"),
        "The brake of the crane squeals under load.",
        "At noon the crane lifted a boiler of seven tonnes from the coaster in the dock. The wind was twenty knots and rising. "
        "When the boiler was three metres above the deck, the brake began to squeal, and the load sank by a hand before it "
        "held. The driver stopped and locked nothing, because he did not know whether the arm may be locked with a load. The "
        "coaster must leave before the tide of five metres in the evening, and its mate stands below the arm to guide the "
        "boiler. The pads were changed in March, one of them only. The red chain is open for a lorry. The gate is open, and "
        "the dock will be emptied of ships at four. ",
        "The caller is Ivo Lund, who fell asleep.",
    ),
    (
        ("pump", "crane"),
        "The pump ran dry and its seal leaks.",
        "At four in the morning the dock was nearly empty, and the pump drew air until the watch woke at twenty past. The seal "
        "leaks a cup of oil a minute. The spare seal is not in the second drawer; the store book says that it was used in May. "
        "The crane holds a rudder over the dock, for the repair of the tug, and its rope has one broken strand, which the "
        "month's inspection noted. The tug stands on blocks and must float at ten. The power failed twice in the night, for a "
        "few seconds each, and the brake held. A new seal can be brought by the noon train, or turned from brass by the smith "
        "within five hours. Rain is expected. ",
        "The caller is Ada Holm again, who is furious.",
    ),
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
    """Texts and costs of a run. Counts are of tokens."""

    texts: list[str]  # of all decodes, in order
    tokens: float = 0.0  # computed by the engine; one in a third of the layers counts as a third
    reused: int = 0  # read from the cache by the calls that attended to them
    evicted: int = 0  # from the device
    prefetched: int = 0  # loaded before the calls that needed them
    moved: int = 0  # bytes copied between device and host
    seconds: float = 0.0


Call = Callable[..., Any]


def run(prefill: Call, decode: Call, parts: Parts, *, max_tokens: int = 8) -> list[tuple[str, Any]]:
    """Run the workflow; return agent and message of its decodes.

    Args:
        prefill: of a session, in process or remote.
        decode: likewise; its first argument is the agent.
    """
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    decodes = []

    def write(agent: str, *args: Any, **options: Any) -> Any:
        decodes.append((agent, decode(agent, *args, **options, **sampling)))
        return decodes[-1][1]

    for chapters, symptom, log, caller in INCIDENTS:
        question = f"The incident: {symptom} The cause:"
        if parts.schema:
            imports = "".join(f"<{chapter}/>" for chapter in chapters)
            cause = write("reader", f'<prompt schema="manual">{imports}{question}</prompt>', schema="manual")
        else:
            manual = prefill(RULES + "".join(CHAPTERS[chapter] for chapter in chapters))
            cause = write("reader", question, [manual])
        report = prefill(f"The incident: {symptom} {log}", [cause.result()])
        private = prefill(caller, [report], labels={"caller"})
        context = [prefill(ROLES["planner"], model="planner"), cause, report, private]
        layers: Any = {"kv_reuse": "partial" if parts.layers else "recompute"}
        plan = write("planner", " The plan:", context, model="planner", **layers).result()
        verdicts = []
        for critic in CRITICS:  # computed together
            context = [prefill(ROLES[critic]), report, cause, plan]
            verdicts.append(write(critic, " The weakness of the plan:", context, repair=parts.repair))
        verdicts = [verdict.result() for verdict in verdicts]
        clearance: Any = {"clearance": set()} if parts.guard else {}
        write("clerk", " To the public:", [prefill(ROLES["clerk"]), report, plan, *verdicts], **clearance).result()
    return decodes


def make_engine(
    parts: Parts,
    model: Any = "smollm2-135m-instruct",
    sibling: Any = None,
    capacity: int = 1400,
    host_capacity: int | None = None,
) -> Engine:
    """Return an engine with two models of a family; the second is a perturbed copy unless it is given.

    Args:
        capacity: tokens on the device.
        host_capacity: tokens on the host; None: what is evicted is computed again.
    """
    eviction: Any = "workflow" if parts.graph else "lru"
    cache = CacheConfig(capacity=capacity, host_capacity=host_capacity, eviction=eviction)
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
    """Run a program, `run` by default, from an empty cache; count what its engine does."""
    engine.clear_cache()
    result, num_layers = Result([]), engine.model_info.layers

    def count(event: Event) -> None:
        data: Any = event.data
        if event.kind == "step":
            result.tokens += data["tokens"] * (data["layers"] or num_layers) / num_layers
        elif event.kind == "admitted":
            result.reused += data["cached"]
        elif event.kind in ("hit", "prefetch", "evicted"):
            field = {"hit": "reused", "prefetch": "prefetched", "evicted": "evicted"}[event.kind]
            setattr(result, field, getattr(result, field) + data["tokens"])
        elif event.kind in ("loaded", "offloaded"):
            result.moved += data["tokens"] * engine.model_info.kv_bytes_per_token

    with calls as (prefill, decode):
        unsubscribe, start = engine.events.subscribe(count), time.perf_counter()
        result.texts = [message.text for _, message in (program or run)(prefill, decode, parts, **options)]
        result.seconds = time.perf_counter() - start
    unsubscribe()
    return result


PREFIX_MODE = {"schema": False, "layers": False, "graph": False, "choreographed": False, "guard": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "Everything": {},
    "Prompt Cache left out: the manual in every prompt": {"schema": False},
    "DroidSpeak left out: all layers": {"layers": False},
    "KVFlow left out: least recently used": {"graph": False},
    "Repair of all that the critics read": {"repair": 1.0},
    "Leak guard left out": {"guard": False},
    "Everything left out: prefix mode": PREFIX_MODE,
}


def main(model: Any = "smollm2-135m-instruct", **engine_options: Any) -> None:
    """Run everything, then leave out one part after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="store_true", help="everything in process and through a server")
    parser.add_argument("--max-tokens", type=int, default=8, help="of every message")
    parser.add_argument("--host-capacity", type=int, default=None, help="tokens of a host tier; default: none")
    args = parser.parse_args()
    options = {**engine_options, "host_capacity": args.host_capacity}
    engines = {has_graph: make_engine(Parts(graph=has_graph), model, **options) for has_graph in (True, False)}
    for engine in engines.values():
        with engine.session() as session:  # the first step of an engine is slower
            session.decode(ROLES["planner"], max_tokens=2).result()

    def run_variant(changes: dict[str, Any]) -> Result:
        parts = replace(Parts(), **changes)
        engine = engines[parts.graph]
        return measure(engine, in_process(engine, parts), parts, max_tokens=args.max_tokens)

    names = ("Everything", "Everything left out: prefix mode") if args.server else tuple(VARIANTS)
    results = {name: run_variant(VARIANTS[name]) for name in names}
    complete = results["Everything"]
    if args.server:
        with serving(engines[True]) as url:
            remote = measure(engines[True], on_server(url), Parts(), max_tokens=args.max_tokens)
        results[f"A server: {'the same' if remote.texts == complete.texts else 'other'} texts"] = remote
    header = ["Run", "Computed", "Saved", "Reused", "Evicted", "Prefetched", "MB moved", "Seconds"]
    rows = [row(name, result, complete) for name, result in results.items()]
    print_table(Console(), "Tokens of each run; saved: by everything, against it", header, rows)


def row(name: str, result: Result, complete: Result) -> list[str]:
    saved = result.tokens - complete.tokens
    counts = (result.tokens, saved, result.reused, result.evicted, result.prefetched, result.moved / 1e6)
    return [name, *(f"{count:,.0f}" for count in counts), f"{result.seconds:.1f}"]


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
