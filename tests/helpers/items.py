"""What an environment over items asks for."""

import asyncio


def asked(env, count):
    """The next items, which are not rolled out."""

    async def ask():
        return [await env.get_next_item() for _ in range(count)]

    return asyncio.run(ask())
