"""Any environment of verifiers: an item ``{"taskset": {"id": ..., ...}, "index": ...}`` is one task of a taskset.

``solve`` plays one episode and returns its reward. Its harness is a plain conversation of one turn in this process, a
plugin as verifiers describes it; their ``null`` harness would start a process with uv for each episode.
"""

import json
from functools import cache

import verifiers.v1 as vf
from openai import AsyncOpenAI


class OneTurn(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(
                model=ctx.model, messages=[*messages, {"role": "user", "content": prompt}]
            )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@cache
def environment(taskset: str) -> tuple[vf.Env, list[vf.Task]]:
    """Return the environment of a taskset's configuration, given as JSON, and its tasks."""
    agent = {"harness": {"id": __name__}, "runtime": {"type": "subprocess"}}
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset=json.loads(taskset), agent=agent))
    return env, list(env.taskset)


async def solve(item, base_url, api_key):
    """Return the reward of an episode; raises if it failed."""
    env, tasks = environment(json.dumps(item["taskset"]))
    client = vf.EvalClientConfig(base_url=f"{base_url}/v1", headers={"x-api-key": api_key})
    episode = await env.run_episode(tasks[item["index"]], vf.ModelContext("policy", client))
    [trace] = episode.traces
    if not episode.ok:
        raise RuntimeError(f"{episode.errors} {trace.errors}")
    return trace.reward


__all__ = ["OneTurn"]
