"""One form for what the clients of all dialects ask, and for what the policy answers.

A message is that of OpenAI's chat completions: ``role`` (system, user, assistant, tool) and ``content``, a string; an
assistant's ``reasoning_content`` and ``tool_calls``, ``{"id", "type": "function", "function": {"name", "arguments"}}``
with the arguments as JSON text; a tool's ``tool_call_id`` and ``name``. Tools are
``{"type": "function", "function": {"name", "description", "parameters"}}``.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import orjson

from recipe.atropos.errors import AtroposError

Message = dict[str, Any]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("min_tokens", "seed", "ignore_eos"),
)
_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}  # of SGLang, where they are others


class RequestError(AtroposError, ValueError):
    """A request that is not answered; the message names the field and says what is possible. ``status``: HTTP's."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.kind = status, kind


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):  # type: ignore[call-arg]  # msgspec's, unseen here
    """Base of what environments send: an unknown field is an error."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request: ``messages``, or a ``prompt`` (text or token ids) as it is. ``sampling`` are parameters of SGLang's
    /generate, those that the client gave; ``template`` arguments of the chat template; ``previous`` the id of the reply
    that the messages continue; ``body`` the request itself.
    """

    messages: list[Message] = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    previous: str | None = None
    stream: bool = False
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A tool call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The policy's answer, as it is recorded: the same one answers a retry.

    ``prompt`` (p,) and ``tokens`` (n,) are ids, ``logprobs`` (n,) of the sampled tokens, ``versions`` spans
    ``{"version", "start", "end"}`` over them; ``stop`` is the stop string that ended it, if one did.
    """

    id: str
    created: int
    model: str
    content: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    finish: Literal["stop", "length"] = "stop"
    stop: str | None = None
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> Message:
        """Return it as an assistant's message."""
        found: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return found

    @property
    def exact(self) -> dict[str, Any]:
        """What each dialect's answer carries beside its standard fields."""
        return {"prompt_token_ids": self.prompt, "weight_versions": self.versions}


def digest(message: Message) -> bytes:
    """Return 16 bytes that identify what a message says: role, text, tools' names and arguments, parsed and sorted.

    Reasoning, which clients drop, and the ids of calls, which they make anew, are left out; so is white space around a
    text, which they strip.
    """
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(call["name"], _canonical(call["arguments"])) for call in calls]
    said = [message["role"], (message.get("content") or "").strip(), calls]
    return hashlib.blake2b(orjson.dumps(said), digest_size=16).digest()


def _canonical(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return arguments.strip()
    return orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()


def sampling_of(body: Mapping[str, Any], limit: Sequence[str] = ("max_tokens",)) -> dict[str, Any]:
    """Return SGLang's sampling parameters for those in a request; ``limit`` are its names of the reply's length."""
    found = {_NAMES.get(name, name): body[name] for name in _SAMPLING if body.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, int | float):
            raise RequestError(f"{name} is {value!r}; give a number")
    for name in limit:
        if body.get(name) is not None:
            if type(body[name]) is not int or body[name] < 1:
                raise RequestError(f"{name} is {body[name]!r}; give a whole number from 1 on")
            found["max_new_tokens"] = body[name]
    if stop := body.get("stop"):
        found["stop"] = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, str | list) or not all(isinstance(one, str) for one in stop):
            raise RequestError(f"stop is {stop!r}; give a text, or a list of texts")
    if body.get("stop_token_ids"):
        found["stop_token_ids"] = token_ids(body["stop_token_ids"], "stop_token_ids")
    return found


def token_ids(given: Any, name: str) -> list[int]:
    """Return a list of at least one token id; raise RequestError if it is none."""
    if not isinstance(given, list) or not given or not all(type(one) is int and 0 <= one < 1 << 31 for one in given):
        raise RequestError(f"{name} is {str(given)[:80]}; give a list of token ids")
    return given


def mappings(body: Mapping[str, Any], name: str, where: str = "") -> list[dict[str, Any]]:
    """Return a field that is a list of mappings, [] if it is not given; raise RequestError if it is none."""
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise RequestError(f"{where}{'.' if where else ''}{name} is {str(found)[:80]}; give a list of objects")
    return found


def string(body: Mapping[str, Any], name: str, where: str = "") -> str | None:
    """Return a field that is a text, None if it is not given; raise RequestError if it is none."""
    found = body.get(name)
    if not isinstance(found, str | None):
        raise RequestError(f"{where}{'.' if where else ''}{name} is {str(found)[:80]}; give a text")
    return found


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false, or null for false; raise RequestError if it is none."""
    found = body.get(name)
    if not isinstance(found, bool | None):
        raise RequestError(f"{name} is {found!r}; give true or false")
    return bool(found)


def refuse_forced_tools(choice: Any) -> bool:
    """Return whether a request's tools may be used. Raise RequestError if one must be: that constrains the sampling."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto"):
        return True
    if kind == "none":
        return False
    why = "constrained sampling is of another distribution than what is trained"
    raise RequestError(f"tool_choice={choice!r}: {why}; give auto or none")


def refuse(body: Mapping[str, Any], names: Iterable[str], why: str = "is not supported in sessions") -> None:
    """Raise RequestError for the first of ``names`` that a request has set to anything but null, false or nothing."""
    for name in names:
        if body.get(name) not in (None, False, "", [], {}, 0):
            raise RequestError(f"{name}={orjson.dumps(body[name]).decode()[:80]} {why}; leave it out")


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a content's text, given as a string, null or parts of type ``kinds``; other parts are refused by name."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where} is {content!r}; give a text, or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has a part of type {kind!r}; sessions take {', '.join(kinds)} only")
        texts.append(part["text"])
    return "".join(texts)


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event; ``data`` is written as JSON unless it is a string."""
    text = data if isinstance(data, str) else orjson.dumps(data).decode()
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
