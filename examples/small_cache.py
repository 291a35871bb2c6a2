"""Four agents in turns over a cache that holds two of their prompts: the step graph decides which."""

from choreograph import CacheConfig, Engine, EngineConfig, SamplingParams
from choreograph.agents import StepGraph, Workflow

AGENTS = ("planner", "writer", "critic", "editor")
RULES = (
    "Answer in one short sentence. Stay with the subject. Say nothing about yourself. Never repeat another agent. " * 8
)
GRAPH = StepGraph.read({"agents": dict(zip(AGENTS, (None, *AGENTS), strict=False)), "repeats": True})
brief = SamplingParams(temperature=0, max_tokens=16)

cache = CacheConfig(capacity=800, host_capacity=4096, eviction="workflow")
engine = Engine.from_pretrained(config=EngineConfig(cache=cache))
with engine.session(seed=0) as s, Workflow(s, GRAPH) as team:
    for subject in ("rivers", "bread"):
        said = s.prefill(s.user(f"Write about {subject}."))
        for name in AGENTS:
            with team.agent(name) as agent:
                role = agent.prefill_fixed(s.system(f"You are the {name}. {RULES}"))
                said = s.decode(s.assistant(), [role, said], sampling=brief).result()
        print(f"{subject}: {said.text.strip()}")

counts = engine.events.counts
moved = {kind: counts[kind] for kind in ("hit", "evicted", "offloaded", "loaded", "prefetch", "recomputing")}
print(moved)
