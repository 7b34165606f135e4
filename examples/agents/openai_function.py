"""A function that solves the word problem of an item with one call, by OpenAI's chat completions."""

from openai import AsyncOpenAI


async def solve(item, base_url, api_key):
    """Return 1 if the answer is right, else 0."""
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key) as client:
        messages = [{"role": "user", "content": item["question"]}]
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=32)
    return float(rf"\boxed{{{item['answer']}}}" in (reply.choices[0].message.content or ""))
