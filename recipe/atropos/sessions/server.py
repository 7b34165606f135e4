"""The session server: ``python -m recipe.atropos.sessions.server --port N --gateway URL --tokenizer DIR --data FILE``

It stands before the gateway. Whoever has the environments' key opens sessions and reads their rows; a program that is
given a session's key and this address speaks OpenAI's or Anthropic's API, and knows of nothing else. Guarantees:

- A session's key opens its own sampling endpoints and nothing else: no other session, no gateway, no Trajectory API. It
  is made of its id and the environments' key, so it needs no storage.
- Requests wait while the gateway holds them (weights are pushed, servers restart), within its limit. Streams send their
  headers and keep-alives at once.
- What is sampled is recorded before it is answered, also when the client has left; see ``session``.

The endpoints of the environments: ``POST /sessions``, ``GET /sessions/ID/rows``, ``POST /sessions/ID/reward``, and
``POST /groups`` (see ``groups``), which needs the Trajectory API.
"""

import argparse
import asyncio
import gc
import hashlib
import hmac
import logging
import os
import secrets
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from aiohttp import hdrs, web
from transformers import AutoTokenizer

from recipe.atropos.credit.group import Credit
from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.inference.sampled import SampledReply, read_reply
from recipe.atropos.run.folder import RunDir
from recipe.atropos.sessions.counts import Reports
from recipe.atropos.sessions.dialects import DIALECTS, anthropic, responses
from recipe.atropos.sessions.groups import GroupRequest, Groups
from recipe.atropos.sessions.messages import KEEP_ALIVE, Asked, RequestError, Strict, error_body, event
from recipe.atropos.sessions.rendering import Rendering
from recipe.atropos.sessions.session import Exchange, Session, SessionRequest, State
from recipe.atropos.sessions.store import DamagedTurn, SessionStore
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.utils.sockets import serve

logger = logging.getLogger(__name__)

_ATTEMPTS = 5  # at a reply that the servers abort
_POLL = 1.0  # s between two polls for sessions whose time is over, and groups that are complete
_KEEP_ALIVE = 10.0  # s between two heartbeats of a stream
_BODY_BYTES = 64 << 20
_IN_MEMORY = 8192  # sessions, for some never end: their programs were killed
_FAILURES = (RequestError, TrajectoryApiError, InferenceError)  # that are answered; any other is a fault of ours


def session_key(identifier: str, key: str) -> str:
    """Return a session's key; ``key`` is the environments', of any length."""
    whole = hashlib.blake2b(key.encode()).digest()
    return f"{identifier}-{hashlib.blake2b(identifier.encode(), key=whole, digest_size=16).hexdigest()}"


class Ended(Strict):
    """The body of ``POST /sessions/ID/reward``. Without a reward the session failed, as ``end`` says. ``turn_values``:
    what was reached after each of its turns, in the order in which they were answered; those whose answers nobody read
    may be left out. ``finished`` false: the session goes on, and has this reward if it is given no other.
    """

    reward: float | None = None
    metrics: dict[str, float] = {}
    turn_values: list[float] | None = None
    end: str | None = None
    finished: bool = True


class SessionServer:
    """Request handlers over a run's sessions. ``key`` is the environments'."""

    def __init__(
        self,
        store: SessionStore,
        rendering: Rendering,
        client: SGLangClient,
        key: str,
        model: str,
        api: TrajectoryApiClient,
        credit: Credit | None = None,
        reports: Reports | None = None,
    ):
        self.store, self.rendering, self.client, self.model = store, rendering, client, model
        self._key, self._api, self._reports = key, api, reports or Reports()
        self._groups = Groups(
            store, api, self._reports, self._open, self._loaded, self._forget, credit, rendering.tokenizer
        )
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[self._errors])
        app.router.add_get("/health", self.health)
        app.router.add_post("/sessions", self._of_environments(self.open))
        app.router.add_post("/groups", self._of_environments(self.open_group))
        app.router.add_get("/sessions/{id}/rows", self._of_environments(self.rows))
        app.router.add_post("/sessions/{id}/reward", self._of_environments(self.reward))
        for start in ("", "/sessions/{id}"):
            app.router.add_get(f"{start}/v1/models", self.models)
            app.router.add_get(f"{start}/v1/models/{{model:.+}}", self.models)
            app.router.add_post(start + anthropic.COUNT_PATH, self.count_tokens)
            for dialect in DIALECTS:
                app.router.add_post(start + dialect.PATH, partial(self.answer, dialect))
        app.cleanup_ctx.append(self._run)
        return app

    async def _run(self, app: web.Application) -> Any:
        async with self._api:
            works = (self._groups.poll, self._groups.keep_tickets, self._settle)
            self._tasks |= {asyncio.create_task(_repeat(work)) for work in works}
            yield
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.store.close()
        self._reports.write(at_once=True)

    async def _settle(self) -> None:
        """End sessions whose time is over, and report what became of all."""
        for identifier in self.store.due(time.time()):
            try:
                session = self._loaded(identifier)
                session.settle(self._reports)
                self._forget_ended(session)
            except (DamagedTurn, msgspec.MsgspecError) as error:
                logger.error("session %s is not counted: %s", identifier, error)
                self.store.put_session(identifier, self.store.session(identifier) or b"", ended=True)
            await asyncio.sleep(0)  # after a restart there may be thousands
        self._reports.write()

    # ------------------------------------------------------------------ who asks

    def _of_environments(self, handler: Callable[[web.Request], Awaitable[web.Response]]) -> Any:
        async def guarded(request: web.Request) -> web.Response:
            if not hmac.compare_digest(_given_key(request).encode(), self._key.encode()):
                raise RequestError("this takes the environments' API key", 401)
            return await handler(request)

        return guarded

    def _session(self, request: web.Request) -> Session:
        """Return the session that a request's key opens; a path may name it too."""
        given, named = _given_key(request), request.match_info.get("id")
        identifier = given.rpartition("-")[0]
        if not hmac.compare_digest(given.encode(), session_key(identifier, self._key).encode()):
            raise RequestError("the API key is no session's", 401)
        if named not in (None, identifier):
            raise RequestError("the API key is another session's than the path's", 403)
        return self._loaded(identifier)

    def _loaded(self, identifier: str) -> Session:
        if identifier not in self._sessions:
            session = Session.load(self.store, identifier)
            if session.state.end is not None and not self._groups.holds(session):
                return session
            self._sessions[identifier] = session
        return self._sessions[identifier]

    @web.middleware
    async def _errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except _FAILURES as error:
            status, body = _problem(error)
            return _json(body, status)

    # ------------------------------------------------------------------ environments

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def open(self, request: web.Request) -> web.Response:
        asked = msgspec.structs.asdict(_decoded(await request.read(), SessionRequest))
        return _json(self._access(request, self._open(**asked)))

    def _open(self, **fields: Any) -> Session:
        session = Session(State(id=secrets.token_hex(12), created=time.time(), **fields), self.store)
        session.save()
        self._sessions[session.state.id] = session
        for one in list(self._sessions.values())[:-_IN_MEMORY]:
            self._forget(one)
        return session

    def _access(self, request: web.Request, session: Session) -> dict[str, Any]:
        """Return what a program needs of a session."""
        identifier, url = session.state.id, f"{request.scheme}://{request.host}"
        key, renderer = session_key(identifier, self._key), self.rendering.config
        return {"id": identifier, "base_url": url, "api_key": key, "renderer": renderer}

    async def open_group(self, request: web.Request) -> web.Response:
        sessions = await self._groups.open(_decoded(await request.read(), GroupRequest))
        opened = [self._access(request, session) for session in sessions]
        return _json({"id": sessions[0].state.group, "sessions": opened})

    async def rows(self, request: web.Request) -> web.Response:
        """Answer with the session's rows to train on, one for each leaf; see ``Session.rows``."""
        return _json(self._loaded(request.match_info["id"]).rows())

    async def reward(self, request: web.Request) -> web.Response:
        """End a session, or record what it has reached so far; the same reward again changes nothing."""
        ended = _decoded(await request.read(), Ended)
        session = self._loaded(request.match_info["id"])
        values, turns = ended.turn_values, len(session.tree.turns)
        read = sorted(one.number for known in session.exchanges.values() for one in known if one.delivered)
        if values and len(values) == len(read):
            # Of a reply that nobody read, what the one before had reached; before the first, what that has.
            values = [values[max(0, bisect_right(read, number) - 1)] for number in range(turns)]
        if values is not None and len(values) != turns:
            raise RequestError(f"turn_values has {len(values)} values; give {turns}, one for each turn of the session")
        if not ended.finished and (ended.reward is None or (values, ended.end) != (None, None)):
            raise RequestError("finished is false: give a reward, without turn_values and end")
        end = "reward" if ended.reward is not None else ended.end or "no_reward"
        changed = {"turn_values": values, "end": end if ended.finished else None}
        session.finish(**msgspec.structs.asdict(ended) | changed)
        if ended.finished:
            session.cancel()
        session.settle(self._reports)
        answer = session.answer()
        if (again := self._groups.ended(session)) is not None:
            answer["again"] = self._access(request, again)
        self._forget_ended(session)
        return _json(answer)

    def _forget_ended(self, session: Session) -> None:
        if session.state.end is not None and not self._groups.holds(session):
            self._forget(session)

    def _forget(self, session: Session) -> None:
        """Free the memory of a session; what is asked later is loaded again."""
        if not any(one.open or one.samples for known in session.exchanges.values() for one in known):
            self._sessions.pop(session.state.id, None)

    # ------------------------------------------------------------------ programs

    async def models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "atropos", "type": "model"}
        if "model" in request.match_info:  # whatever it is called: there is one
            return _json(model)
        return _json({"object": "list", "data": [model], "has_more": False})

    async def count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = anthropic.count(_decoded(await request.read(), dict))
        return _json({"input_tokens": len(session.prompt(asked, self.rendering))})

    async def answer(self, dialect: ModuleType, request: web.Request) -> web.StreamResponse:
        self._session(request)  # who has no key is told so before a body is read
        body = await request.read()
        session = self._session(request)
        given = _decoded(body, dict)
        if dialect is responses:
            responses.resolve(given, lambda reply: session.recorded(session.turn(reply).number))
        asked = dialect.read(given)
        digest = hashlib.blake2b(request.path.encode() + body, digest_size=16).digest()
        count = request.headers.get("x-stainless-retry-count", "")
        exchange = session.exchange(digest, int(count[:9]) if count.isdecimal() else 0)
        if exchange.task is None and exchange.number is None:
            exchange.task = asyncio.create_task(self._sample(session, asked, digest, exchange))
            self._tasks.add(exchange.task)
            exchange.task.add_done_callback(partial(self._sampled, session))
        exchange.open += 1
        try:
            if asked.stream:
                response = await self._stream(dialect, session, asked, exchange, request)
            else:
                await exchange.stored()
                response = _json(dialect.answer(asked, session.recorded(exchange.number)))
                await response.prepare(request)
            await response.write_eof()
            session.delivered(exchange)
            return response
        finally:
            exchange.open -= 1
            self._forget_ended(session)

    def _sampled(self, session: Session, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._forget_ended(session)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, AtroposError):
            logger.error("a request failed", exc_info=error)  # its client may have left

    async def _sample(self, session: Session, asked: Asked, digest: bytes, exchange: Exchange) -> None:
        exchange.number = await session.sample(asked, digest, self.rendering, self._generate, self.model)
        exchange.task = None

    async def _generate(self, ids: list[int], params: dict[str, Any]) -> tuple[SampledReply, list[dict[str, Any]]]:
        for _ in range(_ATTEMPTS):
            answer = await self.client.generate(input_ids=ids, sampling_params=params)
            if (reply := read_reply(answer)) is not None:
                if None in reply.logprobs:
                    raise InferenceError(self.client.url, "/generate", "a logprob is no number; see its weights", 502)
                info = answer["meta_info"]
                whole = {"version": info.get("weight_version"), "start": 0, "end": len(reply.tokens)}
                return reply, info.get("weight_versions") or [whole]
        raise InferenceError(self.client.url, "/generate", f"aborted or empty, {_ATTEMPTS} times; see its log", 503)

    async def _stream(
        self, dialect: ModuleType, session: Session, asked: Asked, exchange: Exchange, request: web.Request
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        keep_alive = getattr(dialect, "KEEP_ALIVE", KEEP_ALIVE)
        await response.write(keep_alive)
        try:
            while not await exchange.stored(_KEEP_ALIVE):
                await response.write(keep_alive)
            for part in dialect.events(asked, session.recorded(exchange.number)):
                await response.write(part)
        except _FAILURES as error:
            await response.write(event(_problem(error)[1], "error"))
        return response


async def _repeat(work: Callable[[], Awaitable[None]]) -> None:
    """Do ``work`` every second until canceled, whatever it raises: the disk may be full for a while, the API away."""
    while True:
        try:
            await work()
        except Exception as error:
            logger.error("sessions and groups that have ended wait: %s", error)
        await asyncio.sleep(_POLL)


def _problem(error: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an answer to one of ``_FAILURES``."""
    own = isinstance(error, RequestError)
    status = error.status if own else {400: 400, 422: 400, 503: 503}.get(error.status, 502)
    return status, error_body(status, str(error), error.code if own else None)


def _given_key(request: web.Request) -> str:
    given = request.headers.get("x-api-key") or request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
    return given.encode(errors="backslashreplace").decode()  # bytes that are no text come as surrogates


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body cannot be read: {error}") from error


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.atropos.sessions.server",
        description=f"Sessions of programs that call a model; ${API_KEY_VARIABLE} is the environments' key.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gateway", required=True, help="URL of the gateway, without /v1")
    parser.add_argument("--api", required=True, help="URL of the Trajectory API, for groups")
    parser.add_argument("--tokenizer", required=True, help="the policy's: a folder, or a name on the hub")
    parser.add_argument("--data", type=Path, required=True, help="the database, which is made if it is missing")
    parser.add_argument(
        "--run-dir", type=RunDir, help="the run whose reports get the sessions that no environment counts"
    )
    parser.add_argument("--model", default="policy", help="its name in answers")
    parser.add_argument("--renderer", default="auto", help="a name of the package renderers, or default")
    parser.add_argument("--tool-parser", help="format of tool calls, where the chat template is used: qwen3, ...")
    parser.add_argument("--thinking", choices=("kept", "as_template"), default="kept")
    parser.add_argument("--credit", type=Credit.model_validate_json, help="rule for groups, as JSON; credit/group.py")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds that a reply may take")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    gc.set_threshold(10_000)  # every history is parsed at each turn, and leaves no garbage
    key = os.environ[API_KEY_VARIABLE]
    rendering = Rendering(
        AutoTokenizer.from_pretrained(options.tokenizer), options.renderer, options.tool_parser, options.thinking
    )
    client = SGLangClient(options.gateway, key, options.timeout)
    api = TrajectoryApiClient(options.api, key)
    server = SessionServer(
        SessionStore(options.data), rendering, client, key, options.model, api, options.credit, Reports(options.run_dir)
    )
    serve(server.app(), options.host, options.port, logger)


if __name__ == "__main__":
    main()
