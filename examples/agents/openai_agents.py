"""An agent of OpenAI's Agents SDK with a calculator, that solves the word problem of an item."""

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from calculator import calculate
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def solve(item, base_url, api_key):
    """Return 1 if the agent's answer is right, else 0."""
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key) as client:
        agent = Agent(
            name="solver",
            model=OpenAIResponsesModel("policy", client),
            model_settings=ModelSettings(max_tokens=64),
            tools=[function_tool(calculate)],
        )
        result = await Runner.run(agent, item["question"], max_turns=4)
    return float(rf"\boxed{{{item['answer']}}}" in result.final_output)
