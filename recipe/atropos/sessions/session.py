"""A session: one run of a program that calls the policy, its turns, limits, retries and its end.

- A turn is stored before its reply leaves, so a server that was killed goes on with every reply that a client has seen.
- A retry is recognized, not guessed: the client's library says so (``x-stainless-retry-count``), or the same request
  comes again after the connection of the first broke before its reply was wholly written. It gets the recorded
  reply, or waits for the one in progress; where the last failed, it is sampled. Equal requests on two open connections
  are two turns.
- A session ends by its reward, or by a limit; from then on requests are refused, with the reason.
"""

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from recipe.atropos.data.rows import one_bos
from recipe.atropos.data.sampling import SamplingParams
from recipe.atropos.inference.sampled import SampledReply
from recipe.atropos.sessions.counts import Reports, count_session
from recipe.atropos.sessions.messages import (
    Asked,
    Call,
    Count,
    Message,
    Reply,
    RequestError,
    Strict,
    name_tools,
    session_sampling,
)
from recipe.atropos.sessions.rendering import Rendering, as_ids
from recipe.atropos.sessions.store import SessionStore
from recipe.atropos.sessions.tree import Asking, Tree, Turn

Generate = Callable[[list[int], dict[str, Any]], Awaitable[tuple[SampledReply, list[dict[str, Any]]]]]
"""Samples a whole reply to token ids, with SGLang's parameters; returns it and the spans of its weight versions."""


class SessionLimits(Strict):
    """What a session may use: ``turns`` replies, ``tokens`` sampled, ``seconds`` from its creation, and ``context``
    tokens of a prompt with its reply, beyond which a single request is refused. None: no limit.
    """

    turns: Count | None = None
    tokens: Count | None = None
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    context: Count | None = None


class SessionOptions(Strict):
    """What sessions are opened with: ``sampling`` overrides what their requests ask.

    Raises:
        RequestError: a sampling parameter is unknown or has a wrong value; names it.
    """

    item: Any = None
    sampling: dict[str, Any] = {}
    limits: SessionLimits = SessionLimits()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "sampling", session_sampling(self.sampling))


class SessionRequest(SessionOptions):
    """The body of ``POST /sessions``; ``counted``: its environment counts it, so the server need not."""

    env: str = ""
    group: str | None = None
    seq: int = 0
    counted: bool = False


class State(SessionRequest, kw_only=True):  # type: ignore[call-arg]
    """What is stored of a session; ``end`` is "reward", the limit that was reached, or why the program failed;
    ``finished``: its program has ended, as whoever runs it says: one that reaches a limit may still give a reward.
    """

    id: str
    created: float
    end: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = {}
    turn_values: list[float] | None = None
    finished: bool = False
    retries: int = 0


@dataclass(kw_only=True)
class Record(Asking):
    """A turn as it is stored; ``reply`` without its prompt, which is that of the path."""

    parent: int | None
    added: bytes
    reply: Reply


@dataclass(eq=False, slots=True)
class Exchange:
    """A request and its answer: the task that samples it, or the number of its turn once it is stored; ``open`` counts
    the connections that wait for it; ``retry`` is how often its client has repeated it.
    """

    task: asyncio.Task | None = None
    number: int | None = None
    open: int = 0
    delivered: bool = False
    retry: int = 0

    @property
    def samples(self) -> bool:
        """Whether a reply is still to come."""
        return self.number is None and not self.failed

    @property
    def failed(self) -> bool:
        """Whether there is no reply, and none will come."""
        return self.number is None and self.task is not None and self.task.done()

    async def stored(self, seconds: float | None = None) -> bool:
        """Wait until the turn is stored, ``seconds`` at most; return whether it is.

        Raises:
            RequestError: the session has ended meanwhile. Also what the task raises.
        """
        task = self.task
        if self.number is None and (await asyncio.wait([task], timeout=seconds))[0]:
            if task.cancelled():
                raise RequestError("the session has ended", 403)
            task.result()
        return self.number is not None


@dataclass(eq=False)
class Session:
    """See the module docstring."""

    state: State
    store: SessionStore
    tree: Tree = field(default_factory=Tree)
    exchanges: dict[bytes, list[Exchange]] = field(default_factory=dict)
    reserved: int = 0  # tokens that the replies in flight may have
    freed: asyncio.Event = field(default_factory=asyncio.Event)  # some of them are not reserved any more

    @classmethod
    def load(cls, store: SessionStore, identifier: str) -> "Session":
        """Return a session as it was stored. Raises RequestError if there is none of this id."""
        found = store.session(identifier)
        if found is None:
            raise RequestError(f"no session {identifier}", 404)
        session = cls(msgspec.json.decode(found, type=State), store)
        for number, request, delivered, data in store.turns(identifier):
            session._add(_decode(data), number)
            session.exchanges.setdefault(request, []).append(Exchange(number=number, delivered=delivered))
        return session

    def save(self, **changes: Any) -> None:
        """Store the state with ``changes``, which are made once they are stored."""
        state = msgspec.structs.replace(self.state, **changes)
        seconds = state.limits.seconds
        due = 0.0 if state.finished else None if seconds is None else state.created + seconds
        if state.counted and state.end is not None:
            due = None
        self.store.put_session(state.id, msgspec.json.encode(state), due, state.finished or self.is_late)
        self.state = state

    # ------------------------------------------------------------------ requests

    def exchange(self, request: bytes, retry: int) -> Exchange:
        """Return the exchange of a request that comes again, or a new one; ``retry``: how often, as its client says.

        Of equal requests that are all repeated, as after a restart, none is another's first.

        Raises:
            RequestError: it is new, and the session has ended; see ``check``.
        """
        known = self.exchanges.setdefault(request, [])
        failed = [exchange for exchange in known if exchange.failed]
        lost = [exchange for exchange in known if not (exchange.delivered or exchange.open or exchange.failed)]
        if found := lost or [exchange for exchange in known if exchange.retry < retry and not failed]:
            self.save(retries=self.state.retries + 1)
            found[-1].retry = retry
            return found[-1]
        self.check()
        known[:] = [exchange for exchange in known if exchange not in failed[:1]] + [Exchange(retry=retry)]
        return known[-1]

    def check(self) -> None:
        """Raise RequestError if the session has ended, or reaches a limit now, which ends it."""
        limits = self.state.limits
        in_flight = sum(one.samples for known in self.exchanges.values() for one in known)
        if self.state.end is None:
            if limits.tokens is not None and self.sampled >= limits.tokens:
                self.finish("tokens")
            elif limits.turns is not None and len(self.tree.turns) + in_flight >= limits.turns:
                self.finish("turns")
            elif self.is_late:
                self.finish("seconds")
        if (end := self.state.end) is not None:
            limit = getattr(limits, end) if end in ("turns", "tokens", "seconds") else None  # a program may say so too
            why = f"ended ({end})" if limit is None else f"reached its limit of {limit:g} {end}"
            raise RequestError(f"the session has {why}", 403)

    @property
    def is_late(self) -> bool:
        """Whether its seconds are over."""
        return self.state.limits.seconds is not None and time.time() - self.state.created > self.state.limits.seconds

    def finish(self, end: str | None, **result: Any) -> None:
        """End the session, if it has not ended; ``result``: what its program says, which goes on if ``end``
        is None. What is empty in it leaves what the program said before.
        """
        state, fields = self.state, {"finished": result.get("finished", False) or self.state.finished}
        given = {name: value for name, value in result.items() if value not in (None, {})}
        if end is None and not state.finished:
            fields = given
        elif state.end is None or (end == "reward" and (state.reward is None or not state.finished)):
            fields = {"end": end, **given}
        self.save(**fields)

    def settle(self, reports: Reports) -> None:
        """End the session if its time is over; count it, once, if it has ended for good."""
        if (late := self.is_late) and self.state.end is None:
            self.finish("seconds")
        if (self.state.finished or late) and not self.state.counted:
            report = reports.of(self.state.env)
            self.save(counted=True)
            count_session(report, self.answer())

    def answer(self) -> dict[str, Any]:
        """Return its state and what happened in it."""
        return msgspec.to_builtins(self.state) | self.summary()

    def cancel(self) -> None:
        """End the requests that are sampled: their tokens would be in no row that was read."""
        for task in [one.task for known in self.exchanges.values() for one in known if one.task is not None]:
            task.cancel()

    @property
    def sampled(self) -> int:
        """Number of tokens that were sampled."""
        return sum(len(turn.tokens) for turn in self.tree.turns)

    async def sample(self, asked: Asked, request: bytes, rendering: Rendering, generate: Generate, model: str) -> int:
        """Sample and store the reply to a request; return its turn's number.

        Raises:
            RequestError: it cannot be rendered, or there is no room for a reply.
        """
        await self._tokens_left()
        parent, added, new, cause = self._prompt(asked, self._messages(asked), rendering)
        opening = rendering.opening(asked)
        added = [*added, *opening]
        prompt = _whole(parent, added)
        params = self._params(asked, len(prompt), rendering)
        reserved = params["max_new_tokens"] or 0
        self.reserved += reserved
        try:
            sampled, spans = await generate(prompt, params)
        finally:  # from here to the record nothing else runs
            self.reserved -= reserved
            self.freed.set()
        reply = self._reply(asked, sampled, spans, prompt, opening, rendering, model)
        text = asked.prompt if isinstance(asked.prompt, str) else None
        record = Record(
            parent=parent and parent.number,
            added=as_ids(added).tobytes(),
            reply=msgspec.structs.replace(reply, prompt=[]),
            versions=sampled.versions,
            sampling=SamplingParams.from_request(params),
            text=None if text is None else text + rendering.after_prompt(prompt, sampled),
            cause=cause,
            messages=new,
            basis=_basis(asked),
            tools=bool(asked.tools),
            prompt=text if parent is None else None,
        )
        number = len(self.tree.turns)
        self.store.add_turn(self.state.id, number, request, msgspec.msgpack.encode(record))
        self._add(record, number)
        return number

    def prompt(self, asked: Asked, rendering: Rendering) -> list[int]:
        """Return the ids that a reply to this request would be sampled after. Raises as ``sample``."""
        parent, added, *_ = self._prompt(asked, self._messages(asked), rendering)
        return _whole(parent, [*added, *rendering.opening(asked)])

    def delivered(self, exchange: Exchange) -> None:
        """Note that a reply was wholly written: the same request is then another one."""
        if not exchange.delivered and exchange.number is not None:
            exchange.delivered = True
            self.store.set_delivered(self.state.id, exchange.number)

    def turn(self, reply: str) -> Turn:
        """Return the turn of a reply's id. Raises RequestError if there is none."""
        for turn in self.tree.turns:
            if turn.reply == reply:
                return turn
        raise RequestError(f"this session has no reply {reply:.80}", 404)

    def recorded(self, number: int) -> Reply:
        """Return the reply of a turn, as it was."""
        [(*_, data)] = self.store.turns(self.state.id, number)
        turn = self.tree.turns[number]
        return msgspec.structs.replace(_decode(data).reply, prompt=turn.ids()[: -len(turn.tokens)].tolist())

    # ------------------------------------------------------------------ results

    def rows(self) -> dict[str, Any]:
        """Return the leaves as lists over rows, named as in a scored group: ``tokens``, ``masks`` and
        ``inference_logprobs``, (L,) each, ``policy_version_min`` and ``_max``, ``sampling_params``, and for each run
        of trained tokens ``turn_numbers`` and ``turn_values``, which is None if the session has none.
        """
        leaves, values = list(self.tree.leaves()), self.state.turn_values
        return {
            "tokens": [leaf.tokens.tolist() for leaf in leaves],
            "masks": [leaf.masks.tolist() for leaf in leaves],
            "inference_logprobs": [leaf.logprobs.tolist() for leaf in leaves],
            "policy_version_min": [leaf.versions[0] for leaf in leaves],
            "policy_version_max": [leaf.versions[1] for leaf in leaves],
            "sampling_params": [[params.to_mapping() for params in leaf.sampling] for leaf in leaves],
            "turn_numbers": [[turn.number for turn in leaf.spans] for leaf in leaves],
            "turn_values": [values and [values[turn.number] for turn in leaf.spans] for leaf in leaves],
        }

    def summary(self) -> dict[str, Any]:
        """Return what happened: numbers of turns, sampled tokens, rows, turns that call tools, those that repeat the
        calls of the turn before, retries, and forks by cause; and whether there were tools.
        """
        turns = self.tree.turns
        return {
            "turns": len(turns),
            "sampled": self.sampled,
            "rows": sum(not turn.children for turn in turns),
            "tools": any(turn.tools for turn in turns),
            "tool_calls": sum("tool_calls" in turn.messages[-1] for turn in turns),
            "repeats": sum(turn.repeats for turn in turns),
            "retries": self.state.retries,
            "forks": dict(Counter(turn.cause for turn in turns if turn.cause is not None)),
        }

    # ------------------------------------------------------------------ steps of a request

    def _messages(self, asked: Asked) -> list[Message]:
        """Return the whole history: what a request continues by id, and its own messages."""
        messages = list(asked.messages)
        if asked.previous is not None:
            history = self.turn(asked.previous).history()
            if history[0].get("instructions"):
                del history[0]  # they are of their request alone
            own = [one for one in messages[:1] if one.get("instructions")]
            messages = name_tools([*own, *history, *messages[len(own) :]])
        return messages

    def _prompt(
        self, asked: Asked, messages: list[Message], rendering: Rendering
    ) -> tuple[Turn | None, list[int], list[Message], str | None]:
        """Return the turn that a request continues, the ids and the messages that it adds to that, and why it continues
        none.
        """
        if isinstance(asked.prompt, str):
            parent = self.tree.continued_text(asked.prompt)
            if parent is not None and (rest := rendering.after_text(parent, asked.prompt)) is not None:
                return parent, rest, [], None
            ids = one_bos(rendering.tokenizer, rendering.tokenizer.encode(asked.prompt))
            return None, ids, [], "other" if self.tree.begun_text(asked.prompt) else None
        if asked.prompt is not None:
            parent, count = self.tree.continued_ids(ids := as_ids(asked.prompt))
            return parent, asked.prompt[count:], [], "other" if parent is None and self.tree.begun(ids) else None
        parent, count = self.tree.continued(messages, _basis(asked))
        if parent is not None:
            added = rendering.bridged(parent, messages[:count], messages[count:], asked.tools, asked.template)
            if added is not None:
                return parent, added, messages[count:], None
        cause = self.tree.fork_cause(messages)
        if cause == "other" and parent is not None and parent.thinking and rendering.thinking == "as_template":
            cause = "thinking_stripped"
        return None, rendering.prompt(messages, asked.tools, asked.template), messages, cause

    async def _tokens_left(self) -> None:
        """Wait while the replies in flight may have all tokens that are left. Raises RequestError: they had them."""
        limit = self.state.limits.tokens
        while limit is not None and self.reserved and self.sampled + self.reserved >= limit:
            self.freed.clear()
            await self.freed.wait()
        if limit is not None and self.sampled >= limit:
            self.check()

    def _params(self, asked: Asked, prompt: int, rendering: Rendering) -> dict[str, Any]:
        """Return the parameters of SGLang's request, every one of them, for a prompt of so many tokens."""
        limits = self.state.limits
        params = {"max_new_tokens": None, **asked.sampling, **self.state.sampling}
        if asked.prompt is None:
            params["stop_token_ids"] = sorted({*params.get("stop_token_ids", ()), *rendering.ends})
        left = None if limits.tokens is None else limits.tokens - self.sampled - self.reserved
        after = None if limits.context is None else limits.context - prompt
        if after is not None and after <= 0:
            message = f"the prompt has {prompt} tokens; the context, reply included, may have {limits.context}"
            raise RequestError(message, code="context_length_exceeded")
        room = [size for size in (params["max_new_tokens"], left, after) if size is not None]
        params["max_new_tokens"] = min(room, default=None)
        return {**params, **SamplingParams.from_request(params).request()}

    def _reply(
        self,
        asked: Asked,
        sampled: SampledReply,
        spans: list[dict[str, Any]],
        prompt: list[int],
        opening: list[int],
        rendering: Rendering,
        model: str,
    ) -> Reply:
        matched = sampled.finish.get("matched")
        stop = matched if isinstance(matched, str) else None
        calls: list[tuple[str, str]] = []
        content, reasoning = sampled.text, None
        if asked.prompt is None:
            before, whole = prompt[: len(prompt) - len(opening)], opening + sampled.tokens
            content, reasoning, calls = rendering.parsed(before, whole, asked.tools, asked.template)
            if stop is not None:
                content = content.partition(stop)[0]
        return Reply(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=model,
            content=content,
            reasoning=reasoning,
            calls=tuple(Call(f"call_{uuid.uuid4().hex[:24]}", *call) for call in calls),
            finish="length" if sampled.finish.get("type") == "length" else "stop",
            stop=stop,
            prompt=prompt,
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            versions=spans,
        )

    def _add(self, record: Record, number: int) -> None:
        turn = Turn(
            number=number,
            reply=record.reply.id,
            parent=None if record.parent is None else self.tree.turns[record.parent],
            added=np.frombuffer(record.added, np.int32),
            tokens=as_ids(record.reply.tokens),
            logprobs=np.array(record.reply.logprobs),
            versions=record.versions,
            sampling=record.sampling,
            messages=[*record.messages, record.reply.message()],
            basis=record.basis,
            text=record.text,
            cause=record.cause,
            tools=record.tools,
            prompt=record.prompt,
        )
        self.tree.add(turn)


_decode = msgspec.msgpack.Decoder(Record).decode


def _basis(asked: Asked) -> bytes | None:
    """Return what stands for all that a request's messages depend on; None if it has a prompt as it is."""
    if asked.prompt is not None:
        return None
    return hashlib.blake2b(msgspec.json.encode([asked.tools, asked.template], order="sorted"), digest_size=16).digest()


def _whole(parent: Turn | None, added: list[int]) -> list[int]:
    """Return the ids of a path with what a request adds to it."""
    return added if parent is None else parent.ids().tolist() + added
