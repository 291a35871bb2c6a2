"""A hand-off between agents of the OpenAI Agents SDK, for any OpenAI server.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/serve/handoff.py
"""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(OpenAI().models.list().data[0].id, AsyncOpenAI())
settings = ModelSettings(temperature=0, max_tokens=64)


@function_tool
def toll(town: str) -> str:
    """Return the toll of the bridge in a town."""
    return f"The toll in {town} is two coins."


clerk = Agent(
    name="Clerk", instructions="You answer questions on tolls.", model=model, model_settings=settings, tools=[toll]
)
# the first answer has to be a call, so that the example also runs on a small model
choice = ModelSettings(temperature=0, max_tokens=64, tool_choice="transfer_to_clerk")
guide = Agent(
    name="Guide", instructions="You pass questions to the clerk.", model=model, model_settings=choice, handoffs=[clerk]
)
result = Runner.run_sync(guide, "What does it cost to cross the bridge in Riverton?", max_turns=4)
print(f"{result.last_agent.name}: {result.final_output}")
