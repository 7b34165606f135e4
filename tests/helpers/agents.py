"""The environment of programs over a session server, and agents as functions."""

import json

from openai import AsyncOpenAI

from recipe.atropos.environments.program import ProgramEnv, ProgramEnvConfig


def program_env(folder, model, sessions, items, adapted=lambda environment: environment, **fields):
    """``ProgramEnv`` in groups of two, one session at a time, by default; it holds no item out."""
    path = folder / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    _, [handle] = ProgramEnv.config_init()
    handle.model_name = str(model)
    common = {"tokenizer_name": str(model), "items": str(path), "held_out": str(path), "sessions_url": sessions.url}
    config = ProgramEnvConfig(**common, use_wandb=False, **{"group_size": 2, "parallel": 1} | fields)
    return adapted(ProgramEnv)(config, [handle], slurm=False)


async def adds(item, base_url, api_key):
    """An agent with a tool, of as many turns as its item says; the reward may be missing."""
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key)
    messages = [{"role": "user", "content": "12 and 7"}]
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
