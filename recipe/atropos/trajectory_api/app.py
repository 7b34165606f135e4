"""The Trajectory API over HTTP: access, bodies, and the answers that atroposlib's clients expect.

Guarantees:

- With a secret, nothing is answered without a key, in ``Authorization: Bearer``, or as the first part of the path, for
  clients that know nothing but an address. The secret is the trainer's key; the environments' key (``utils/secret``)
  opens all but what registers a trainer, gives it batches or changes what it was given.
- Without one, and at all times for web pages of other origins, a browser can make this server do nothing: there are
  no CORS headers, and cross-site requests and foreign host names are refused.
- Bodies are limited, as sent, inflated, and in time. A request that cannot be served gets a 4xx that says why.
- An answer that cannot be completed breaks off, so that no client takes it for whole. A batch is read before it is
  sent: whoever asks for a damaged one is told what is wrong with it.
"""

import asyncio
import inspect
import io
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson
from aiohttp import web
from isal import igzip, isal_zlib

from recipe.atropos.data.scored_group import unpack
from recipe.atropos.trajectory_api import database, delivery, ingest, status, wire  # noqa: F401  (endpoints)
from recipe.atropos.trajectory_api.endpoints import ENDPOINTS, Caller, Endpoint, Int, RequestRefused, Seconds, endpoint
from recipe.atropos.trajectory_api.service import TrajectoryService
from recipe.atropos.utils.private_process import is_loopback
from recipe.atropos.utils.secret import whose_key

logger = logging.getLogger(__name__)

MAX_BODY = 128 << 20  # bytes, as sent and inflated
_INFLATED_PART = 1 << 20  # bytes; to read MAX_BODY at once would allocate it for every post
BODY_SECONDS = 300.0  # for a body to arrive; stock environments give a whole request as long
_JSON = {"Content-Type": "application/json"}
_BROKEN = (ConnectionError, web.RequestPayloadError)


class Api:
    """Serves a ``TrajectoryService``; ``secret``, the trainer's key, guards all of it."""

    def __init__(self, service: TrajectoryService, secret: str | None = None):
        self.service = service
        self._secret = secret

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            path = self._authorized(request)
            found = ENDPOINTS.get((request.method, path))
            if found is None:
                methods = [method for method, other in ENDPOINTS if other == path]
                raise RequestRefused(
                    405 if methods else 404, f"{request.method} {path}: {methods or 'there is no such path'}"
                )
            return await self._call(found, request, path)
        except RequestRefused as error:
            detail = str(error).encode(errors="backslashreplace").decode()  # it may quote half surrogates
            return _answer({"detail": detail, **error.extra}, error.status)
        except _BROKEN as error:
            return _answer({"detail": f"the request broke off: {error!r}"}, 400)
        except database.TrajectoryStoreError as error:
            return _answer({"detail": str(error)}, 410 if isinstance(error, database.DamagedRecord) else 503)
        except Exception:
            logger.exception(
                "%s %s failed", request.method, request.path[:100] if self._secret is None else "a request"
            )
            return _answer({"detail": "an error of the server; its log has it"}, 500)

    async def _call(self, found: Endpoint, request: web.BaseRequest, path: str) -> web.StreamResponse:
        service, caller = self.service, _caller(request, path)
        query = request.query if request.method == "GET" else {}
        if service.trainer is not None and caller.epoch == service.epoch:
            service.trainer.seen = time.monotonic()
        arguments = found.arguments(await _body(request), query, caller)
        if found.with_epoch and caller.epoch is None and service.trainer and service.trainer.numbers:
            raise RequestRefused(422, f"{path} without {wire.EPOCH_HEADER}: send the epoch that /register answered")
        answer = found.function(service, **arguments)
        del arguments  # the function drops the body when it needs it no more
        if inspect.isawaitable(answer):
            answer = await answer
        return answer if isinstance(answer, web.StreamResponse) else _answer(answer)

    def _authorized(self, request: web.BaseRequest) -> str:
        """Return the path without a secret; raise RequestRefused if access is denied."""
        path = request.path
        site, origin = request.headers.get("Sec-Fetch-Site", "none"), request.headers.get("Origin")
        if site not in ("none", "same-origin") or (origin is not None and origin.partition("://")[2] != request.host):
            raise RequestRefused(403, "requests of other sites' pages are refused")
        if self._secret is None:
            if not _is_local(request.host):
                raise RequestRefused(403, f"host={request.host[:100]}: without a secret, use http://localhost:PORT")
            return path
        first, slash, rest = path[1:].partition("/")
        who = whose_key(first, self._secret)
        if who:
            path = slash + rest
        else:
            who = whose_key(request.headers.get("Authorization", "").removeprefix("Bearer "), self._secret)
        if who is None:
            raise RequestRefused(401, "send Authorization: Bearer KEY, or use the address http://HOST:PORT/KEY")
        if who == "environments" and any(e.for_trainers for (_, other), e in ENDPOINTS.items() if other == path):
            raise RequestRefused(403, f"{path} takes the trainer's key; this is the environments'")
        return path


def _is_local(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


# ---------------------------------------------------------------------- bodies and answers


async def _body(request: web.BaseRequest) -> bytes:
    """Return a request's body, inflated.

    Raises:
        RequestRefused: 413, too large; 408, too slow; 400, no valid gzip; 415, another encoding.
    """
    encoding = request.headers.get("Content-Encoding", "").lower()
    if encoding not in ("", "identity", "gzip"):
        raise RequestRefused(415, f"Content-Encoding={encoding}: send gzip, or none")
    if (request.content_length or 0) > MAX_BODY:
        raise RequestRefused(413, f"a body of {request.content_length} bytes: send at most {MAX_BODY}")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY:
                    raise RequestRefused(413, f"a body of more than {MAX_BODY} bytes: send less")
    except TimeoutError:
        raise RequestRefused(408, f"{size} bytes of a body within {BODY_SECONDS:g} s: send it faster") from None
    body = b"".join(parts)
    return _inflated(body) if encoding == "gzip" and body else body


def _inflated(body: bytes) -> bytes:
    file, parts = igzip.GzipFile(fileobj=io.BytesIO(body)), []
    try:
        while part := file.read1(_INFLATED_PART):
            parts.append(part)
            if file.tell() > MAX_BODY:
                raise RequestRefused(413, f"a body that inflates to more than {MAX_BODY} bytes: send less")
    except (igzip.BadGzipFile, isal_zlib.error, EOFError) as error:
        raise RequestRefused(400, f"Invalid gzip payload: {error}") from error
    return b"".join(parts)


def _answer(value: Any, status_code: int = 200) -> web.Response:
    if isinstance(value, str):
        return web.Response(text=value)
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return web.Response(body=body, status=status_code, headers=_JSON)


async def _written(request: web.BaseRequest, response: web.StreamResponse, parts: Iterable[bytes]) -> bool:
    """Write an answer in ``parts``; return whether all of it left for a client that was still there.

    Parts are made one at a time, when there is room for them, and others are served in between.
    """
    if _gone(request):
        return False
    try:
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)  # ``write`` waits for slow clients only
        await response.write_eof()
    except ConnectionError:
        return False
    except Exception:
        if request.transport is not None:
            request.transport.abort()  # else the client would read the answer that says why as the rest of this one
        raise
    return not _gone(request)


def _gone(request: web.BaseRequest) -> bool:
    return request.transport is None or request.transport.is_closing()


def _caller(request: web.BaseRequest, path: str) -> Caller:
    """Return what a request's headers say; raise RequestRefused if they cannot be read."""

    def number(name: str) -> int | None:
        text = request.headers.get(name)
        try:
            return None if text is None else msgspec.convert(text, Int, strict=False)
        except ValueError as error:
            raise RequestRefused(422, f"{name}={text[:40]}: give a number") from error

    key = request.headers.get(wire.KEY_HEADER)
    if key is not None and not (1 <= len(key) <= 200 and key.isascii()):
        raise RequestRefused(422, f"{wire.KEY_HEADER}: give 1 to 200 ASCII characters")
    epoch, ticket = number(wire.EPOCH_HEADER), number(wire.TICKET_HEADER)
    return Caller(path, epoch, ticket, key, lambda: _gone(request), request)


# ---------------------------------------------------------------------- batches


@endpoint("GET", "/batch", for_trainers=True)
async def batch(
    service: TrajectoryService, caller: Caller, after: Int | None = None, wait: Seconds = 0.0, prefetch: bool = False
) -> Any:
    """Send a batch: packed if the client accepts that, else as JSON; the one after ``after`` if that is given."""
    if after is not None:
        number = await delivery.numbered_batch(service, after, wait, caller.epoch, prefetch)
    elif service.trainer is None:
        return {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
    else:
        number = await delivery.stock_batch(service)
    if number is None:
        return {"batch": None}
    epoch = service.epoch
    records = await service.store.read(database.read_batch, number)
    if not records:
        raise RequestRefused(
            409,
            f"batch {number} is not in this store, or a trainer registered meanwhile; ask again, or register with "
            "after=N, a batch that the store has",
        )
    response, parts = web.StreamResponse(headers=_JSON), _json_parts(number, records, after is not None)
    if wire.PACKED in caller.request.headers.get("Accept", ""):
        response = web.StreamResponse(headers={"Content-Type": wire.PACKED, wire.BATCH_HEADER: str(number)})
        parts, response.content_length = records, sum(map(len, records))
    if await _written(caller.request, response, parts) and after is None:
        delivery.stock_delivered(service, epoch, number)
    return response


def _json_parts(number: int, records: Sequence[bytes], numbered: bool) -> Iterator[bytes]:
    before = b'{"batch":['
    for record in records:
        yield before
        yield unpack(record).to_json()
        before = b","
    yield b'],"number":%d}' % number if numbered else b"]}"
