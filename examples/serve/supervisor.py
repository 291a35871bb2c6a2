"""A LangGraph supervisor with workers, for any OpenAI server.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/serve/supervisor.py
"""

from typing import Literal, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from openai import OpenAI
from pydantic import BaseModel

llm = ChatOpenAI(model=OpenAI().models.list().data[0].id, temperature=0, max_tokens=64)
WORKERS = {"historian": "You know the history of towns.", "engineer": "You know how bridges are built."}


class State(TypedDict):
    notes: list[str]
    next: str


class Route(BaseModel):
    next: Literal["historian", "engineer"]


def supervise(state: State) -> dict[str, str]:
    if len(state["notes"]) > 3:
        return {"next": END}
    router = llm.with_structured_output(Route, method="json_schema")
    return {"next": router.invoke([("system", "Choose who speaks next."), ("user", "\n\n".join(state["notes"]))]).next}


def worker(name: str):
    def run(state: State) -> dict[str, list[str]]:
        answer = llm.invoke([("system", WORKERS[name]), ("user", "\n\n".join([*state["notes"], "Add two sentences."]))])
        return {"notes": [*state["notes"], f"The {name} said:\n{answer.content}"]}

    return run


graph = StateGraph(State).add_node("supervisor", supervise).add_edge(START, "supervisor")
for name in WORKERS:
    graph.add_node(name, worker(name)).add_edge(name, "supervisor")
graph.add_conditional_edges("supervisor", lambda state: state["next"], [*WORKERS, END])
print(graph.compile().invoke({"notes": ["Plan a second bridge for the town."], "next": ""})["notes"][-1])
