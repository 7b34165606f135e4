"""SGLang's control endpoints as far as a push uses them, without a model: for tests of what a push does in which order.

``test_stub_sglang.py`` holds the stub to the real server: the same assertions run against both.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web


@dataclass
class StubSGLang:
    """One server. ``calls`` may be shared by several: (url, endpoint, body) of each request, as they came.

    ``delays`` (seconds) and ``failures`` (HTTP status) are by endpoint; ``reported`` is a version to report in place of
    the one it was given. ``replies``, if any, are what /generate answers with, one after the other (see ``reply``).
    """

    calls: list[tuple[str, str, dict[str, Any]]]
    url: str = ""
    version: str = "default"
    reported: str | None = None
    paused: bool = False
    updating: bool = False
    delays: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    replies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def endpoints(self) -> list[str]:
        """What this server was asked for, without questions about what it can do."""
        asked = [endpoint for url, endpoint, _ in self.calls if url == self.url]
        return [endpoint for endpoint in asked if endpoint not in ("/openapi.json", "/server_info")]

    async def answer(self, request: web.Request) -> web.Response:
        endpoint, body = request.path, await request.json() if request.can_read_body else {}
        self.calls.append((self.url, endpoint, body))
        await asyncio.sleep(self.delays.get(endpoint, 0))
        if endpoint in self.failures:
            return _error(self.failures[endpoint], f"{endpoint} fails here")
        handler = getattr(self, "_" + endpoint.strip("/").replace(".", "_"), None)
        return web.Response(status=404) if handler is None else await handler(body)

    async def _openapi_json(self, body: dict[str, Any]) -> web.Response:
        paths = {"/begin_weight_update": {}, "/end_weight_update": {}, "/pause_generation": {}}
        mode = {"enum": ["abort", "retract", "in_place"]}
        schemas = {"PauseGenerationReqInput": {"properties": {"mode": mode}}}
        return web.json_response({"paths": paths, "components": {"schemas": schemas}})

    async def _server_info(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"version": "stub", "device": "cpu", "tp_size": 1, "dp_size": 1, "pp_size": 1})

    async def _model_info(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"weight_version": self.reported or self.version})

    async def _pause_generation(self, body: dict[str, Any]) -> web.Response:
        if body.get("mode") not in ("abort", "retract", "in_place"):
            return _error(400, "mode")
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _continue_generation(self, body: dict[str, Any]) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        while self.paused:
            await asyncio.sleep(0.01)
        if self.replies:
            n = body["sampling_params"]["n"]
            found, self.replies = self.replies[:n], self.replies[n:]
            return web.json_response(found if n > 1 else found[0])
        return web.json_response({"output_ids": [0], "meta_info": {"weight_version": self.version}})

    async def _flush_cache(self, body: dict[str, Any]) -> web.Response:
        return web.Response(text="Cache flushed.")

    async def _begin_weight_update(self, body: dict[str, Any]) -> web.Response:
        if self.updating:
            return _refusal("already open")
        self.updating = True
        return web.json_response({"success": True, "message": ""})

    async def _end_weight_update(self, body: dict[str, Any]) -> web.Response:
        if not self.updating:
            return _refusal("not open")
        self.updating = False
        return web.json_response({"success": True, "message": ""})

    async def _update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        if not Path(body["model_path"]).is_dir():
            return _refusal(f"{body['model_path']} is no folder")
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def _update_weight_version(self, body: dict[str, Any]) -> web.Response:
        self.version = body["new_version"]
        return web.json_response({"success": True, "message": ""})


def reply(
    tokens: list[int], text: str, reason: str = "stop", first: float = -0.5, version: str = "3"
) -> dict[str, Any]:
    """One reply of /generate; the logprobs go down from ``first``."""
    logprobs = [[first - 0.1 * i, token, None] for i, token in enumerate(tokens)]
    spans = [{"version": version, "start": 0, "end": len(tokens)}]
    meta_info = {"finish_reason": {"type": reason}, "output_token_logprobs": logprobs, "weight_versions": spans}
    return {"text": text, "output_ids": tokens, "meta_info": meta_info}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _refusal(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


@contextlib.asynccontextmanager
async def stub_servers(n: int) -> AsyncIterator[list[StubSGLang]]:
    """``n`` servers on free ports, in this event loop, with one list of calls."""
    calls: list[tuple[str, str, dict[str, Any]]] = []
    runners, servers = [], []
    try:
        for _ in range(n):
            server = StubSGLang(calls)
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", server.answer)
            runner = web.AppRunner(app, shutdown_timeout=0)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            servers.append(server)
        yield servers
    finally:
        for runner in runners:
            await runner.cleanup()
