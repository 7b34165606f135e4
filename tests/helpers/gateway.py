"""The gateway over servers that are stubs: they can be made to fail in any way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import orjson
from aiohttp import web

from recipe.atropos.inference.gateway import Gateway
from recipe.atropos.inference.gateway_client import GatewayClient
from recipe.atropos.inference.pool import ServerPool
from recipe.atropos.utils.process import free_port

KEY = "a-secret-of-this-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Stub:
    """A server as SGLang looks from outside: ``info`` answers /model_info, ``reply`` all else.

    ``seen``: (method, path, body, headers) of all else.
    """

    def __init__(self):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.version = "1"
        self.seen: list[tuple] = []
        self.begun = asyncio.Event()
        self.closed = asyncio.Event()
        self.reply: Callable[[web.Request], Awaitable[web.StreamResponse]] = self.answer
        self.info: Callable[[], Awaitable[str]] = self.present_version

    async def start(self) -> None:
        app = web.Application(client_max_size=0)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def model_info(self, request):
        return web.json_response({"weight_version": await self.info()})

    async def present_version(self):
        return self.version

    async def handle(self, request):
        self.seen.append((request.method, request.path_qs, await request.read(), dict(request.headers)))
        self.begun.set()
        try:
            return await self.reply(request)
        except asyncio.CancelledError:
            self.closed.set()
            raise

    async def answer(self, request):
        return web.json_response({"text": self.url, "meta_info": {"weight_version": self.version}})

    async def for_ever(self, request):
        await asyncio.Event().wait()

    async def broken(self, request):
        """Promises more than it sends."""
        response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"text": "hal')
        request.transport.abort()
        return response

    async def broken_stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: half\n\n")
        await asyncio.sleep(0.2)
        request.transport.abort()
        return response


class Client:
    """Of a gateway over stubs."""

    def __init__(self, url: str, session: aiohttp.ClientSession, stubs: list[Stub], pool: ServerPool):
        self.url, self.session, self.stubs, self.pool = url, session, stubs, pool

    async def admit(self, *stubs: Stub, version: int = 1, **fields) -> int:
        word = {"version": version, "servers": [stub.url for stub in stubs], **fields}
        async with self.session.put(f"{self.url}/gateway/weights", json=word) as reply:
            return reply.status

    async def status(self) -> dict:
        async with self.session.get(f"{self.url}/gateway/status") as reply:
            return orjson.loads(await reply.read())

    async def states(self) -> list[str]:
        return [server["state"] for server in (await self.status())["servers"]]

    async def generate(self, body: object = None) -> tuple[int, dict]:
        async with self.session.post(f"{self.url}/generate", json=body or {"input_ids": [1]}) as reply:
            return reply.status, orjson.loads(await reply.read())

    async def held(self) -> asyncio.Task:
        """A request that waits for a server."""
        request = asyncio.create_task(self.generate())
        await self.until(lambda: self.pool.held == 1)
        return request

    async def running(self, stub: Stub) -> asyncio.Task:
        """A request that a server, which never answers, has begun; no other is admitted."""
        await self.admit(stub)
        stub.reply = stub.for_ever
        request = asyncio.create_task(self.generate())
        await stub.begun.wait()
        return request

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway(count: int = 2, max_wait: float = 20.0) -> AsyncIterator[Client]:
    stubs = [Stub() for _ in range(count)]
    for stub in stubs:
        await stub.start()
    pool, port = ServerPool([stub.url for stub in stubs], max_wait), free_port()
    runner = web.AppRunner(Gateway(pool, KEY).app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with aiohttp.ClientSession(headers=HEADERS, auto_decompress=False) as session:
            yield Client(f"http://127.0.0.1:{port}", session, stubs, pool)
    finally:
        await runner.cleanup()
        for stub in stubs:
            await stub.runner.cleanup()


def behind_a_gateway(count: int = 2, **options):
    """The test is given the gateway's client and its stubs."""

    def decorate(test):
        def run():
            async def body():
                async with gateway(count, **options) as client:
                    await test(client, *client.stubs)

            asyncio.run(body())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


class AsPushBegins(GatewayClient):
    """Does something when it has told the gateway that a push begins."""

    def __init__(self, action, **fields):
        super().__init__(**fields)
        object.__setattr__(self, "action", action)

    def announce(self, version, servers, pushing=False, adapter=None):
        super().announce(version, servers, pushing, adapter)
        if pushing:
            self.action()
