"""Requests that cannot be served get a 4xx that says why, whatever bytes they have and however slowly they come."""

import asyncio

import pytest
from aiohttp.test_utils import RawTestServer

from recipe.atropos.trajectory_api import app
from recipe.atropos.trajectory_api.service import Settings, TrajectoryService

pytestmark = pytest.mark.timeout(30)


async def ask(folder, head, body=b"", length=None):
    """Send a request as it is; return the answer."""
    service = TrajectoryService(Settings(folder))
    async with RawTestServer(app.Api(service).handle, auto_decompress=False, lingering_time=0.1) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        size = len(body) if length is None else length
        writer.write(b"%b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (head, size, body))
        answer = await reader.readuntil(b"}")  # the server takes what is left of a body for some seconds
        writer.close()
    service.store.check()
    assert await service.store.write(lambda connection: 1) == 1, "the store works"
    service.store.close()
    return answer.decode()


LOCAL = b"\r\nHost: localhost"
POST = b"POST /scored_data HTTP/1.1"
GROUP = b'{"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1.0], "messages": null}'
HALVES = {
    "tokens": (POST + LOCAL, rb'{"tokens": "\ud800"}', 422),
    "scores": (POST + LOCAL, rb'{"tokens": [[1]], "masks": [[1]], "scores": "\udfff"}', 422),
    "env_id": (POST + LOCAL, rb'{"tokens": [[1]], "masks": [[1]], "scores": [1], "env_id": "\ud800"}', 422),
    "message": (b"POST /register-env HTTP/1.1" + LOCAL, rb'{"desired_name": "\ud800"}', 422),
    "key": (POST + b"\r\nAtropos-Key: \xff" + LOCAL, GROUP, 422),
    "ticket": (POST + b"\r\nAtropos-Ticket: \xff" + LOCAL, GROUP, 422),
    "host": (b"GET / HTTP/1.1\r\nHost: \xff", b"", 403),
    "path": (b"GET /%ed%a0%80 HTTP/1.1" + LOCAL, b"", 404),
}


@pytest.mark.parametrize(("head", "body", "status"), HALVES.values(), ids=HALVES)
async def test_what_is_no_text_gets_an_answer(tmp_path, head, body, status):
    """Half surrogates, and bytes that are not UTF-8, which a message may quote."""
    answer = await ask(tmp_path, head, body)
    assert answer.startswith(f"HTTP/1.1 {status} ") and '"detail":' in answer
    assert '"reason":"malformed"' in answer or b"/scored_data" not in head or b"Atropos" in head


async def test_a_body_that_does_not_arrive_gets_408(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    answer = await ask(tmp_path, POST + LOCAL, b"{", length=100)
    assert answer.startswith("HTTP/1.1 408 ") and "1 bytes of a body within 0.2 s: send it faster" in answer
