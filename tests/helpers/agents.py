"""Programs of the tests of ``environments.program``: agents as functions."""

from openai import AsyncOpenAI


async def adds(item, base_url, api_key):
    """An agent with a tool, of as many turns as its item says; the reward may be missing."""
    client, messages = (
        AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key),
        [{"role": "user", "content": "12 and 7"}],
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    for _ in range(item["turns"]):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        said = reply.choices[0].message
        then = [{"role": "tool", "tool_call_id": call.id, "content": "19"} for call in said.tool_calls or ()]
        messages += [said.model_dump(exclude_none=True), *(then or [{"role": "user", "content": "and"}])]
    return item.get("reward")


async def compacts(item, base_url, api_key):
    """An agent that shortens its history, so that its session has two rows."""
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key)
    messages = [{"role": "user", "content": item["question"]}]
    for turn in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        said = reply.choices[0].message.content or ""
        more = [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": item["question"]}]
        messages = [{"role": "user", "content": f"In short: {said}"}] if turn == 1 else messages + more
    return float(len(said) % 3)
