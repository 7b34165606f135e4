"""A policy that says what a test decides, behind the /generate of a server that environments sample from."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from helpers.stub_sglang import reply


@contextlib.asynccontextmanager
async def scripted(env: Any, say: Callable[[str], str]) -> AsyncIterator[list[str]]:
    """Let ``env`` sample ``say(chat so far)`` and the end of turn; yields the chats that it was asked to go on with."""
    asked: list[str] = []

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(env.tokenizer.decode(body["input_ids"]))
        words = say(asked[-1])
        return web.json_response(reply([*env.tokenizer.encode(words), env.tokenizer.eos_token_id], words))

    application = web.Application()
    application.router.add_post("/generate", generate)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        for server in env.server.servers:
            server.config.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield asked
    finally:
        await runner.cleanup()


def last_said(chat: str) -> str:
    """Return the message that a ChatML chat asks the policy to answer."""
    return chat.split("<|im_start|>")[-2].partition("\n")[2].removesuffix("<|im_end|>\n")
