"""One address for several SGLang servers: ``python -m recipe.atropos.inference.gateway --port N --servers URL,..``

Environments know one base URL and nothing of servers that come and go; the gateway sits between them. Guarantees:

- Everything but its own two endpoints is proxied unchanged: method, path, query, body, status, headers, streams; except
  that, if the policy is an adapter, requests that sample name it and replies carry its version. See `lora_routing`.
- A key is required, 401 otherwise. The trainer's key ($ATROPOS_API_KEY), which is also the servers', opens everything;
  the environments' key, made from it (``utils/secret``), opens what samples and informs (``_FOR_ENVIRONMENTS``), 403
  otherwise. The servers are sent the trainer's, unless another user of this machine runs them (``OwnServers``).
- Only *admitted* servers get requests, and only the trainer admits: ``PUT /gateway/weights {"version": 7, "servers":
  [URL, ...]}``, with ``"pushing": true`` before a push to servers that are admitted already, and the ``"adapter"`` if
  the version is one. See `ServerPool`.
- Load is balanced: the admitted server with the fewest requests in flight is next or, within bounds, the server that
  has the prompt's prefix in its cache. See `affinity`.
- A request that finds no admitted server is held, at most ``--max-wait`` seconds, then answered 503 with the reason.
- When a client disconnects, its held request leaves the queue, and its request in flight is closed upstream.
- A server whose connection fails, or that answers with weights that no push gave it, is removed at once, by name, and
  gets nothing until the trainer lists it again. Its requests are resent to another server, or held, unless part of the
  reply was passed on: then the client's connection is aborted. (Generation has no side effects.)
- A server that dies or restarts while idle is detected by a probe of /model_info every second.

``GET /gateway/status`` returns the version, the state of each server, and the number of held requests.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated

import aiohttp
import msgspec
import orjson
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from recipe.atropos.inference.affinity import PrefixAffinity
from recipe.atropos.inference.lora_routing import GENERATES, TOKENIZES, WEIGHT_VERSION, AdaptedPolicy, CannotName
from recipe.atropos.inference.pool import NothingAdmitted, Server, ServerPool
from recipe.atropos.utils.secret import API_KEY_VARIABLE, whose_key
from recipe.atropos.utils.sockets import OtherUsersServer, OwnServers, serve

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0

_PROBE_TIMEOUT = 30.0  # a busy server answers late; a dead one refuses at once
_CONNECT_TIMEOUT = 10.0
_READ_BYTES = 1 << 20  # aiohttp's default, 64 KiB, pauses reading several times in a reply with logprobs
_MAX_SENDS = 5  # of one request: one that crashes each server must end
# Headers of the connection, not of the message, or set anew by aiohttp.
_NOT_PASSED_ON = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "expect"}
)
# What SGLang answers without changing anything, and without its own key, which is in /server_info.
_FOR_ENVIRONMENTS = frozenset(
    {*GENERATES, *TOKENIZES, "/v1/models", "/model_info", "/get_model_info", "/health", "/health_generate"}
    | {"/gateway/status"}
)


class Announcement(msgspec.Struct):
    """What the trainer announces; see `ServerPool.admit`."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    servers: list[str]
    pushing: bool = False
    adapter: str | None = None


class _UpstreamFailed(Exception):
    """A server failed at a request; ``passed_on``: part of its reply has reached the client."""

    def __init__(self, why: str, passed_on: bool = False):
        super().__init__(why)
        self.passed_on = passed_on


class Gateway:
    """Request handlers over one `ServerPool`, and the HTTP session to the servers."""

    def __init__(self, pool: ServerPool, api_key: str | None = None):
        self.pool = pool
        self.api_key = api_key
        self._authorization = f"Bearer {api_key}" if api_key else None
        self._affinity = PrefixAffinity()

    def app(self) -> web.Application:
        # No limit on the body: the servers have their own.
        app = web.Application(middlewares=[self._authorized], client_max_size=0)
        app.router.add_get("/gateway/status", self.get_status)
        app.router.add_put("/gateway/weights", self.put_weights)
        app.router.add_route("*", "/{path:.*}", self.proxy)
        app.cleanup_ctx.append(self._session_and_probes)
        return app

    @web.middleware
    async def _authorized(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.api_key:
            who = whose_key(request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer "), self.api_key)
            if who is None:
                return _error(401, f"the API key is wrong or missing; give the run's own, that of ${API_KEY_VARIABLE}")
            if who == "environments" and request.path not in _FOR_ENVIRONMENTS:
                allowed = ", ".join(sorted(_FOR_ENVIRONMENTS))
                return _error(403, f"{request.path} takes the trainer's key; the environments' opens {allowed}")
        return await handler(request)

    # -- own endpoints ---------------------------------------------------------------------------------------------

    async def get_status(self, request: web.Request) -> web.Response:
        return web.json_response(self.pool.status())

    async def put_weights(self, request: web.Request) -> web.Response:
        try:
            body = await request.read()
            announced = msgspec.json.decode(body, type=Announcement)
            self.pool.admit(announced.version, announced.servers, announced.pushing, announced.adapter)
        except (msgspec.MsgspecError, ValueError) as error:
            what = "PUT /gateway/weights takes {version, servers, pushing, adapter}"
            return _error(400, f"{what}: {error}; it was {body[:200]!r}")
        return web.json_response(self.pool.status())

    # -- everything else -------------------------------------------------------------------------------------------

    async def proxy(self, request: web.Request) -> web.StreamResponse:
        """Send a request to one server after another until one answers."""
        if not request.raw_path.startswith("/"):  # an absolute form, which would go on a server's host name
            return _error(400, f"{request.raw_path[:80]} is no path; send one")
        body = await request.read()
        failures, waited = [], 0.0
        while len(failures) < _MAX_SENDS:
            begun = time.monotonic()
            try:
                server = await self.pool.acquire(partial(self._affinity.choose, body), waited)
                waited += time.monotonic() - begun
            except NothingAdmitted as error:
                return _error(503, str(error))
            try:
                return await self._send(server, request, body)
            except _UpstreamFailed as error:
                self.pool.remove(server, f"{request.method} {request.path}: {error}")
                if error.passed_on:
                    logger.error("%s %s breaks off: a part of the reply was passed on", request.method, request.path)
                    if request.transport is not None:
                        request.transport.abort()  # a clean end would look like a complete reply
                    raise asyncio.CancelledError from error
                failures.append(f"{server.url}: {error}")
                logger.warning("%s %s is sent again (%d)", request.method, request.path, len(failures))
        return _error(502, f"{_MAX_SENDS} servers in a row failed at this request: {'; '.join(failures)}")

    async def _send(self, server: Server, request: web.Request, body: bytes) -> web.StreamResponse:
        """Send one request to one server.

        Raises:
            _UpstreamFailed: the connection failed, the server was removed, or it has weights that no push gave it.
        """
        response: web.StreamResponse | None = None
        policy = AdaptedPolicy(self.pool.adapter, self.pool.version) if self.pool.adapter else None
        try:
            sent = policy.named_in(request.method, request.path, body) if policy else body
        except CannotName as error:
            return _error(400, str(error))
        try:
            async with server.exchange(), self._request(server, request, sent) as upstream:
                headers = _passed_on(upstream.headers)
                if not _is_stream(upstream):
                    content = await upstream.read()
                    _check_version(request, upstream, content)
                    if policy:
                        # An error may be due to a restart: the server then lacks the adapter.
                        if upstream.status >= 400 and (problem := await self._problem(server)):
                            raise _UpstreamFailed(problem)
                        content = policy.stamped(content)
                    return web.Response(status=upstream.status, reason=upstream.reason, headers=headers, body=content)
                response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)
                await _to_client(response.prepare(request))
                pieces = upstream.content.iter_any()
                async for piece in policy.stamped_lines(pieces) if policy else pieces:
                    await _to_client(response.write(piece))
                await _to_client(response.write_eof())
                return response
        except (aiohttp.ClientError, OSError, OtherUsersServer) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, TimeoutError) and server.state != "admitted":
                why = f"it was removed meanwhile ({server.last_error or 'the trainer left it out'})"
            raise _UpstreamFailed(why, passed_on=response is not None) from error

    def _request(
        self, server: Server, request: web.Request, body: bytes
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = _passed_on(request.headers)
        headers.popall(hdrs.CONTENT_ENCODING, None)  # ``body`` is inflated
        if self._authorization:
            headers[hdrs.AUTHORIZATION] = self._authorization
        return self._session.request(
            request.method,
            URL(server.url + request.raw_path, encoded=True),
            headers=headers,
            data=body or None,
            allow_redirects=False,
            skip_auto_headers=(hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT),
        )

    # -- probes ----------------------------------------------------------------------------------------------------

    async def _session_and_probes(self, app: web.Application) -> AsyncIterator[None]:
        # A new connection for each request: the server may close a kept-alive one just as it is used, which looks as if
        # the server had died. No limit: the clients set the concurrency.
        connector = (OwnServers if self.api_key else aiohttp.TCPConnector)(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, read_bufsize=_READ_BYTES
        ) as self._session:
            probes = [asyncio.create_task(self._probe_forever(server)) for server in self.pool.servers.values()]
            yield
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    async def _probe_forever(self, server: Server) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            if server.state == "admitted" and (problem := await self._problem(server)):
                self.pool.remove(server, problem)

    async def _problem(self, server: Server) -> str | None:
        """Return what ``_probe`` finds, repeated until the trainer has announced nothing meanwhile."""
        while True:
            epoch = self.pool.epoch
            problem = await self._probe(server)
            if epoch == self.pool.epoch:
                return problem

    async def _probe(self, server: Server) -> str | None:
        """Return what is wrong with a server that should serve the trainer's weights; None if nothing is."""
        headers = {hdrs.AUTHORIZATION: self._authorization} if self._authorization else None
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT)
        try:
            async with self._session.get(f"{server.url}/model_info", headers=headers, timeout=timeout) as reply:
                if reply.status != 200:
                    return f"GET /model_info answered HTTP {reply.status}"
                version = str(orjson.loads(await reply.read()).get("weight_version"))
        except TimeoutError:
            return f"GET /model_info: no answer within {_PROBE_TIMEOUT:g} s"
        except (aiohttp.ClientError, OSError, OtherUsersServer, ValueError, AttributeError) as error:
            return f"GET /model_info: {error!r}"
        if version not in self.pool.accepted:
            expected = " or ".join(sorted(self.pool.accepted))
            return f"it reports weight version {version!r}, not {expected}: it was restarted, or given other weights"
        return None


def _check_version(request: web.Request, reply: aiohttp.ClientResponse, content: bytes) -> None:
    """Raise _UpstreamFailed for a reply sampled with weights that no push gave: a push's version is a number."""
    if request.path not in GENERATES or reply.status != 200:
        return
    for _, version in WEIGHT_VERSION.findall(content):
        if not version.isdigit():
            raise _UpstreamFailed(f"it answered with weight version {version.decode()!r}, which no push gave it")


def _is_stream(reply: aiohttp.ClientResponse) -> bool:
    """Return whether to pass a reply on in pieces: server-sent events, and what has no length and is not JSON."""
    has_end = reply.content_length is not None or reply.content_type == "application/json"
    return reply.content_type == "text/event-stream" or not has_end


async def _to_client(action: Awaitable[object]) -> None:
    """Await ``action``; if the client has disconnected, cancel the request without blaming the server."""
    try:
        await action
    except (aiohttp.ClientError, OSError) as error:
        raise asyncio.CancelledError from error


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON)


def _error(status: int, message: str) -> web.Response:
    """Return an error in the format that SGLang and OpenAI clients expect."""
    return web.json_response({"error": {"message": f"gateway: {message}", "code": status}}, status=status)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.atropos.inference.gateway",
        description=f"One address for several SGLang servers; ${API_KEY_VARIABLE} guards it if set.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--servers", required=True, help="their URLs, without /v1, comma-separated")
    parser.add_argument(
        "--max-wait",
        type=float,
        default=600.0,
        help="seconds that a request may wait for a server; default: %(default)g",
    )
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Each request holds two open files, and at their limit every server would look dead.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def app() -> web.Application:
        urls = [url for url in options.servers.split(",") if url]
        return Gateway(ServerPool(urls, options.max_wait), os.environ.get(API_KEY_VARIABLE)).app()

    serve(app(), options.host, options.port, logger)


if __name__ == "__main__":
    main()
