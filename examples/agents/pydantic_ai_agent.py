"""An agent of Pydantic AI with a calculator, that solves the word problem of an item."""

from calculator import calculate
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(tools=[calculate], retries=3)


async def solve(item, base_url, api_key):
    """Return 1 if the agent's answer is right, else 0."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=f"{base_url}/v1", api_key=api_key))
    result = await agent.run(item["question"], model=model, model_settings={"max_tokens": 64})
    return float(rf"\boxed{{{item['answer']}}}" in result.output)
