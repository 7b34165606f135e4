"""The Trajectory API over HTTP: access, bodies, and the answers that atroposlib's clients expect.

Guarantees:

- With a secret, nothing is answered without a key, in ``Authorization: Bearer``, or as the first part of the path, for
  clients that know nothing but an address. The secret is the trainer's key; the environments' key (``utils/secret``)
  opens all but what registers a trainer, gives it batches or changes what it was given.
- Without one, and at all times for web pages of other origins, a browser can make this server do nothing: there are
  no CORS headers, and cross-site requests and foreign host names are refused.
- Bodies are limited, as sent, inflated, and in time. A request that cannot be served gets a 4xx that says why.
- An answer that cannot be completed breaks off, so that no client takes it for whole. A batch that is damaged is never
  sent whole, and whoever asks again is told why.
"""

import asyncio
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from isal import isal_zlib

from recipe.atropos.data.scored_group import KEYS, unpack
from recipe.atropos.trajectory_api import database, delivery, ingest, status, wire
from recipe.atropos.trajectory_api import messages as m
from recipe.atropos.trajectory_api.service import Service
from recipe.atropos.utils.secret import whose_key

logger = logging.getLogger(__name__)

MAX_BODY = 128 << 20  # bytes, as sent and inflated
BODY_SECONDS = 300.0  # for a body to arrive; stock environments give a whole request as long
_CHUNK = 1 << 20
_SLICE = 8  # records of a batch that are read at a time
_JSON = {"Content-Type": "application/json"}
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_NO_EXAMPLE = dict.fromkeys([key for key in KEYS if key not in ("overrides", "group_overrides", "env_id")], [])
_BROKEN = (ConnectionError, web.RequestPayloadError)

Handler = Callable[["Api", web.BaseRequest, str], Awaitable[web.StreamResponse]]


class Api:
    """Serves a ``Service``; ``secret``, the trainer's key, guards all of it."""

    def __init__(self, service: Service, secret: str | None = None):
        self.service = service
        self._secret = secret
        self.damaged: dict[tuple[int, int], str] = {}  # by epoch and number of a batch

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            path = self._authorized(request)
            handler = ROUTES.get((request.method, path))
            if handler is None:
                methods = [method for method, other in ROUTES if other == path]
                raise m.RequestRefused(
                    405 if methods else 404, f"{request.method} {path}: {methods or 'there is no such path'}"
                )
            return await handler(self, request, path)
        except m.RequestRefused as error:
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

    def _authorized(self, request: web.BaseRequest) -> str:
        """Return the path without a secret; raise RequestRefused if access is denied."""
        path = request.path
        site, origin = request.headers.get("Sec-Fetch-Site", "none"), request.headers.get("Origin")
        if site not in ("none", "same-origin") or (origin is not None and origin.partition("://")[2] != request.host):
            raise m.RequestRefused(403, "requests of other sites' pages are refused")
        if self._secret is None:
            if not _is_local(request.host):
                raise m.RequestRefused(403, f"host={request.host[:100]}: without a secret, use http://localhost:PORT")
            return path
        first, slash, rest = path[1:].partition("/")
        who = whose_key(first, self._secret)
        if who:
            path = slash + rest
        else:
            who = whose_key(request.headers.get("Authorization", "").removeprefix("Bearer "), self._secret)
        if who is None:
            raise m.RequestRefused(401, "send Authorization: Bearer KEY, or use the address http://HOST:PORT/KEY")
        if who == "environments" and path in _TRAINERS:
            raise m.RequestRefused(403, f"{path} takes the trainer's key; this is the environments'")
        return path


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
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
        raise m.RequestRefused(415, f"Content-Encoding={encoding}: send gzip, or none")
    if (request.content_length or 0) > MAX_BODY:
        raise m.RequestRefused(413, f"a body of {request.content_length} bytes: send at most {MAX_BODY}")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY:
                    raise m.RequestRefused(413, f"a body of more than {MAX_BODY} bytes: send less")
    except TimeoutError:
        raise m.RequestRefused(408, f"{size} bytes of a body within {BODY_SECONDS:g} s: send it faster") from None
    body = b"".join(parts)
    return _inflated(body) if encoding == "gzip" and body else body


def _inflated(body: bytes) -> bytes:
    parts, size = [], 0
    try:
        while body:
            inflater = isal_zlib.decompressobj(31)
            while not inflater.eof:
                part = inflater.decompress(body, _CHUNK)
                body = inflater.unconsumed_tail
                parts.append(part)
                size += len(part)
                if size > MAX_BODY:
                    raise m.RequestRefused(413, f"a body that inflates to more than {MAX_BODY} bytes: send less")
                if not part and not body and not inflater.eof:
                    raise m.RequestRefused(400, "Invalid gzip payload: it is incomplete")
            body = inflater.unused_data
    except isal_zlib.error as error:
        raise m.RequestRefused(400, f"Invalid gzip payload: {error}") from error
    return b"".join(parts)


def _answer(value: Any, status_code: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status_code, headers=_JSON)


async def _written(
    request: web.BaseRequest, response: web.StreamResponse, parts: AsyncIterator[bytes] | None = None
) -> bool:
    """Write an answer, a large one in ``parts``; return whether all of it left for a client that was still there.

    Parts are made one at a time, when there is room for them, and others are served in between.
    """
    if _gone(request):
        return False
    try:
        await response.prepare(request)
        if parts is not None:
            async for part in parts:
                await response.write(part)
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


def _number(text: str | None, name: str, kind: type = int) -> Any:
    """Return a number of a header or of the query, None if it is not given; raise RequestRefused if it is none."""
    if text is None:
        return None
    try:
        value = kind(text)
        if not -(2**63) < value < 2**63:
            raise ValueError
        return value
    except (ValueError, OverflowError) as error:
        raise m.RequestRefused(422, f"{name}={text[:40]}: give a number") from error


def _epoch(request: web.BaseRequest) -> int | None:
    return _number(request.headers.get(wire.EPOCH_HEADER), wire.EPOCH_HEADER)


def _key(request: web.BaseRequest) -> str | None:
    """Return a request's idempotency key."""
    key = request.headers.get(wire.KEY_HEADER)
    if key is not None and not (1 <= len(key) <= 200 and key.isascii()):
        raise m.RequestRefused(422, f"{wire.KEY_HEADER}: give 1 to 200 ASCII characters")
    return key


# ---------------------------------------------------------------------- environments


async def _register_env(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    message = m.read(await _body(request), m.EnvRegistration)
    return _answer(await ingest.register_env(api.service, message, _key(request)))


async def _scored_data(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    """Store groups; the answer is delayed while the queue is full."""
    service, several = api.service, path == "/scored_data_list"
    ticket = _number(request.headers.get(wire.TICKET_HEADER), wire.TICKET_HEADER)
    groups = ingest.parse(service, await _body(request), request.content_type == wire.PACKED, several, ticket)
    answer = {"status": "received", **({"groups_processed": len(groups)} if several else {})}
    await ingest.post(service, groups, ticket, _key(request))
    if ticket is None:
        await ingest.hold(service, lambda: _gone(request))
    return _answer(answer)


async def _begin(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    answer = await ingest.begin(api.service, m.read(await _body(request), m.Begin), lambda: _gone(request))
    response = _answer(answer)
    if not await _written(request, response) and answer["ticket"] is not None:
        api.service.release(answer["ticket"], "ticket_lost")
    return response


async def _status_env(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    message = m.read(await _body(request), m.EnvIdentifier)
    found = api.service.environments.status(message.env_id, api.service.queue)
    return _answer({"current_step": api.service.step(), **found})


# ---------------------------------------------------------------------- trainers


async def _batch(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    """Send a batch: packed if the client accepts that, else as JSON."""
    service, query = api.service, request.query
    after = _number(query.get("after"), "after")
    if after is None:
        if service.trainer is None:
            text = "Trainer not registered. Call /register first."
            return _answer({"status": "error", "message": text, "batch": []})
        number = await delivery.stock_batch(service)
    else:
        wait = _number(query.get("wait"), "wait", float) or 0.0
        number = await delivery.numbered_batch(service, after, wait, _epoch(request), query.get("prefetch") == "1")
    if number is None:
        return _answer({"batch": None})
    epoch = service.epoch
    if damage := api.damaged.get((epoch, number)):
        raise database.DamagedRecord(damage)
    sizes = await service.store.read(database.record_sizes, number)
    if not sizes:
        raise m.RequestRefused(409, f"batch {number} is not in this store, or a trainer registered meanwhile")
    response, parts = web.StreamResponse(headers=_JSON), _json_parts
    if wire.PACKED in request.headers.get("Accept", ""):
        response = web.StreamResponse(headers={"Content-Type": wire.PACKED, wire.BATCH_HEADER: str(number)})
        response.content_length = len(wire.prefix(sizes)) + sum(sizes)
        parts = _packed_parts
    try:
        written = await _written(request, response, parts(service, number, sizes, after is not None))
    except database.DamagedRecord as error:
        api.damaged[epoch, number] = str(error)
        raise
    if after is None:
        delivery.stock_delivered(service, epoch, number, written)
    return response


async def _records(service: Service, number: int, count: int) -> AsyncIterator[bytes]:
    """Yield a batch's records, and read the next ones meanwhile."""
    ahead = asyncio.ensure_future(service.store.read(database.read_batch, number, 0, _SLICE))
    for start in range(0, count, _SLICE):
        records = await ahead
        if start + _SLICE < count:
            read = service.store.read(database.read_batch, number, start + _SLICE, start + 2 * _SLICE)
            ahead = asyncio.ensure_future(read)
        for record in records:
            yield record


async def _packed_parts(service: Service, number: int, sizes: Sequence[int], _: bool) -> AsyncIterator[bytes]:
    yield wire.prefix(sizes)
    async for record in _records(service, number, len(sizes)):
        yield record


async def _json_parts(service: Service, number: int, sizes: Sequence[int], numbered: bool) -> AsyncIterator[bytes]:
    before = b'{"batch":['
    async for record in _records(service, number, len(sizes)):
        yield before
        yield unpack(record).to_json()
        before = b","
    yield b'],"number":%d}' % number if numbered else b"]}"


async def _info(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    trainer = api.service.trainer
    if trainer is not None and _epoch(request) == api.service.epoch:
        trainer.seen = time.monotonic()
    registration = trainer.registration if trainer else None
    if path == "/info":
        sizes = (registration.batch_size, registration.max_token_len) if registration else (-1, -1)
        return _answer({"batch_size": sizes[0], "max_token_len": sizes[1]})
    if path == "/wandb_info":
        names = (registration.wandb_group, registration.wandb_project) if registration else (None, None)
        return _answer({"group": names[0], "project": names[1]})
    return _answer({"current_step": api.service.step(), "queue_size": api.service.queue.sizes.total()})


async def _latest(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    id = api.service.latest
    record = await api.service.store.read(database.read_record, id) if id is not None else None
    body = unpack(record).to_json() if record is not None else orjson.dumps(_NO_EXAMPLE)
    return web.Response(body=body, headers=_JSON)


async def _reset(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    await delivery.reset(api.service)
    return web.Response(text="Reset successful")


async def _root(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    if "text/html" not in request.headers.get("Accept", ""):
        return _answer({"message": "AtroposLib API"})
    return web.Response(
        text=status.PAGE, content_type="text/html", headers={"Content-Security-Policy": _CONTENT_POLICY}
    )


async def _diagnose(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    return _answer(status.diagnose(api.service))


async def _metrics(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
    return web.Response(text=status.metrics(api.service))


def _control(kind: type, function: Callable[..., Awaitable[Any]], epoch: bool = False) -> Handler:
    """Return a handler that reads a message of ``kind`` and answers what ``function`` returns."""

    async def handler(api: Api, request: web.BaseRequest, path: str) -> web.StreamResponse:
        message = m.read(await _body(request), kind)
        given = _epoch(request)
        if epoch and given is None and api.service.trainer and api.service.trainer.numbers:
            raise m.RequestRefused(422, f"{path} without {wire.EPOCH_HEADER}: send the epoch that /register answered")
        return _answer(await function(api.service, message, *((given,) if epoch else ())))

    return handler


_TRAINERS = frozenset({"/register", "/batch", "/commit", "/weights", "/empty", "/reset_data"})
ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/"): _root,
    ("GET", ""): _root,
    ("POST", "/register"): _control(m.Registration, delivery.register),
    ("GET", "/batch"): _batch,
    ("POST", "/commit"): _control(m.Through, delivery.commit, epoch=True),
    ("POST", "/weights"): _control(m.Through, delivery.weights_pushed, epoch=True),
    ("POST", "/empty"): _control(m.BatchNumber, delivery.batch_is_empty, epoch=True),
    ("GET", "/info"): _info,
    ("GET", "/wandb_info"): _info,
    ("GET", "/status"): _info,
    ("POST", "/register-env"): _register_env,
    ("POST", "/disconnect-env"): _control(m.EnvIdentifier, ingest.disconnect_env),
    ("GET", "/status-env"): _status_env,
    ("POST", "/begin"): _begin,
    ("POST", "/release"): _control(m.Release, ingest.release),
    ("POST", "/scored_data"): _scored_data,
    ("POST", "/scored_data_list"): _scored_data,
    ("GET", "/latest_example"): _latest,
    ("GET", "/reset_data"): _reset,
    ("GET", "/diagnose"): _diagnose,
    ("GET", "/metrics"): _metrics,
}
