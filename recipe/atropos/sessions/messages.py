"""One form for what the clients of all dialects ask, and for what the policy answers.

A message is that of OpenAI's chat completions: ``role`` (system, user, assistant, tool) and ``content``, a string; an
assistant's ``reasoning_content`` and ``tool_calls``, ``{"id", "type": "function", "function": {"name", "arguments"}}``
with the arguments as JSON text; a tool's ``tool_call_id`` and ``name``; ``instructions``, if they are those of one
request alone. Tools are
``{"type": "function", "function": {"name", "description", "parameters"}}``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from recipe.atropos.errors import AtroposError

Message = dict[str, Any]
_LARGEST = (1 << 31) - 1
Count = Annotated[int, Meta(ge=1, le=_LARGEST)]

_Id = Annotated[int, Meta(ge=0, le=_LARGEST)]
_PARAMETERS: dict[str, Any] = {  # of SGLang's /generate, with what it takes
    "temperature": Annotated[float, Meta(ge=0)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "min_p": Annotated[float, Meta(ge=0, le=1)],
    "top_k": Annotated[int, Meta(ge=-1, le=_LARGEST)],
    "frequency_penalty": Annotated[float, Meta(ge=-2, le=2)],
    "presence_penalty": Annotated[float, Meta(ge=-2, le=2)],
    "repetition_penalty": Annotated[float, Meta(ge=0, le=2)],
    "min_new_tokens": Annotated[int, Meta(ge=0, le=_LARGEST)],
    "max_new_tokens": Count,
    "sampling_seed": Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)],
    "ignore_eos": bool,
    "stop_token_ids": list[_Id],
    "stop": str | list[Annotated[str, Meta(min_length=1)]],
}
_NAMES = {name: name for name in _PARAMETERS} | {  # in requests; of several for one, the last counts
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "stop_sequences": "stop",
}
_CONSTRAINTS = (
    "logit_bias logits_processors custom_logit_processor custom_params bad_words allowed_token_ids use_beam_search"
    " regex ebnf grammar json_schema structural_tag structured_outputs guided_json guided_regex guided_choice"
    " guided_grammar guided_decoding stop_regex thinking_token_budget truncate_prompt_tokens lora_path"
).split()


class RequestError(AtroposError, ValueError):
    """A request that is not answered; the message names the field and says what is possible. ``status`` is HTTP's,
    ``code`` OpenAI's, where it has one.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):  # type: ignore[call-arg]
    """Base of what environments send: an unknown field is an error."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):  # type: ignore[call-arg]
    """A request: ``messages``, or a ``prompt`` (text or token ids) as it is. ``sampling`` are parameters of SGLang's
    /generate, those that the client gave; ``template`` arguments of the chat template; ``previous`` the id of the reply
    that the messages continue; ``body`` the request itself. ``call`` is the tool that the reply must call, "" if any.
    """

    messages: list[Message] = []
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    call: str | None = None
    sampling: dict[str, Any] = {}
    template: dict[str, Any] = {}
    previous: str | None = None
    stream: bool = False
    body: dict[str, Any] = {}


class Call(msgspec.Struct, frozen=True):  # type: ignore[call-arg]
    """A tool call; ``arguments`` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):  # type: ignore[call-arg]
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
    versions: list[dict[str, Any]] = []

    def message(self) -> Message:
        """Return it as an assistant's message."""
        found: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [tool_call(call.id, call.name, call.arguments, "calls") for call in self.calls]
        return found

    @property
    def exact(self) -> dict[str, Any]:
        """What each dialect's answer carries beside its standard fields."""
        return {"prompt_token_ids": self.prompt, "weight_versions": self.versions}


def same(one: Message, other: Message) -> bool:
    """Whether two messages say the same: role, text, tools' names and arguments, parsed: 1 is 1.0, as in JavaScript.

    Reasoning, which clients drop, and the ids of calls, which they make anew, are left out; so is white space around a
    text, which they strip.
    """
    return one == other or _said(one) == _said(other)


def alike(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether as many messages say the same."""
    return some == others or (len(some) == len(others) and all(map(same, some, others)))


def _said(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return (
        message["role"],
        message["content"].strip(),
        [(call["name"], _parsed(call["arguments"])) for call in calls],
    )


def _parsed(arguments: str) -> Any:
    found = read_object(arguments)
    return arguments.strip() if found is None else found


def read_object(value: Any) -> dict[str, Any] | None:
    """Return a call's arguments, given as a mapping or as its JSON; None if they are none, or no JSON can hold them."""
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value or {})
        return msgspec.json.decode(text or "{}", type=dict)
    except (ValueError, RecursionError):
        return None


def expect(value: Any, kind: Any, where: str) -> Any:
    """Return ``value``, which must be of a type that msgspec knows.

    Raises:
        RequestError: it is not; names ``where`` in the request it was found.
    """
    try:
        return value if type(value) is kind else msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RequestError(f"{where} is {value!r:.80}: {error}") from error


def typed(value: Any, where: str, *kinds: Any) -> dict[str, Any]:
    """Return ``value``, which must be an object whose ``type`` is one of ``kinds``.

    Raises:
        RequestError: it is not.
    """
    kind = expect(value, dict, where).get("type")
    if kind not in kinds:
        names = ", ".join(str(name) for name in kinds if name)
        raise RequestError(f"{where}.type is {kind!r:.80}; sessions take {names} only")
    return value


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's sampling parameters for those in a request of any dialect.

    Raises:
        RequestError: a value is none that SGLang takes, or the request wants several replies or constrained sampling.
    """
    refuse(body, _CONSTRAINTS, "would sample from another distribution than the one that is trained")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise RequestError(f"{name} is {body[name]!r:.80}; a session gives one reply to a request: leave it out")
    given = {name: body[name] for name in _NAMES if body.get(name) is not None}
    found = {_NAMES[name]: expect(value, _PARAMETERS[_NAMES[name]], name) for name, value in given.items()}
    if found.get("top_k") == 0:
        found["top_k"] = -1  # SGLang's way to say all
    if isinstance(stop := found.get("stop"), str):
        found["stop"] = [stop] if stop else []
    return found


def session_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's sampling parameters that an environment gives for all requests of a session.

    Raises:
        RequestError: as ``sampling_of``, or a parameter is unknown.
    """
    if unknown := sorted(given.keys() - _NAMES.keys()):
        raise RequestError(f"sampling.{unknown[0]} is unknown; give {', '.join(_PARAMETERS)}")
    return sampling_of(given)


def ids_of(value: Any, where: str) -> list[int]:
    """Return ``value``, which must be a list of token ids, one at least.

    Raises:
        RequestError: it is not.
    """
    return expect(value, Annotated[list[_Id], Meta(min_length=1)], where)


def refuse(body: Mapping[str, Any], names: Iterable[str], why: str = "is not supported in sessions") -> None:
    """Raise RequestError for the first of ``names`` that a request has set to anything but null, false or nothing."""
    for name in names:
        if body.get(name) not in (None, False, "", [], {}, 0):
            raise RequestError(f"{name}={body[name]!r:.80} {why}; leave it out")


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",), required: bool = False) -> str:
    """Return a content's text, given as a string, null or parts of type ``kinds``; other parts are refused by name."""
    if content is None and required:
        raise RequestError(f"{where} is missing; give a text")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        expect(typed(part, f"{where}[{i}]", *kinds).get("text"), str, f"{where}[{i}].text")
        for i, part in enumerate(expect(content, list, where))
    )


def items_of(body: Mapping[str, Any], name: str) -> list[tuple[dict[str, Any], str]]:
    """Return the objects of a request's list, one at least, and where each stands.

    Raises:
        RequestError: it is something else.
    """
    if not expect(body.get(name), list, name):
        raise RequestError(f"{name} is []; give one at least")
    return [(expect(one, dict, f"{name}[{i}]"), f"{name}[{i}]") for i, one in enumerate(body[name])]


def role_of(message: Mapping[str, Any], where: str, *roles: str) -> str:
    """Return a message's role, one of ``roles``; a developer's is system. Raises RequestError if it is none."""
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in roles:
        raise RequestError(f"{where}.role is {role!r:.80}; give developer, {', '.join(roles)}")
    return role


def tool_call(id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return a call in the form of a message's ``tool_calls``; ``arguments`` may be an object or its JSON text.

    Raises:
        RequestError: a value has a wrong type.
    """
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    return {
        "id": expect(id, str, f"{where}: the id of a call"),
        "type": "function",
        "function": {
            "name": expect(name, str, f"{where}: the name of a tool"),
            "arguments": expect(arguments, str, f"{where}: the arguments of {name}") or "{}",
        },
    }


def name_tools(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, those of tools with the ``name`` of the call that they answer, where they lack one."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
        if message["role"] == "tool" and "name" not in message and message["tool_call_id"] in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        found.append(message)
    return found


def join(message: Message, more: Message) -> None:
    """Extend a message by the text, the reasoning and the calls of another."""
    message["content"] += more["content"]
    for key in ("reasoning_content", "tool_calls"):
        if key in more:
            message[key] = message[key] + more[key] if key in message else more[key]


def tools_of(
    body: Mapping[str, Any],
    choice: Any,
    kinds: Sequence[Any] = ("function",),
    within: str | None = None,
    schema: str = "parameters",
) -> list[dict[str, Any]] | None:
    """Return the tools that the template is given; None without any, or if ``choice``, the dialect's, is "none".

    A tool's ``type`` is one of ``kinds``; its name, its description and, as ``schema``, its parameters stand in its
    field ``within``, or in itself. ``strict`` has no effect: it would need constrained decoding.

    Raises:
        RequestError: a tool is of another kind or has a field of a wrong type.
    """
    found = []
    for i, tool in enumerate(expect(body.get("tools") or [], list, "tools")):
        given, where = typed(tool, f"tools[{i}]", *kinds), f"tools[{i}]"
        if within:
            given, where = expect(given.get(within), dict, f"{where}.{within}"), f"{where}.{within}"
        function = {"name": expect(given.get("name"), str, f"{where}.name")}
        if given.get("description") is not None:
            function["description"] = expect(given["description"], str, f"{where}.description")
        if given.get(schema) is not None:
            function["parameters"] = expect(given[schema], dict, f"{where}.{schema}")
        found.append({"type": "function", "function": function})
    return found if found and choice != "none" else None


def required_call(choice: Any, tools: list[dict[str, Any]] | None) -> str | None:
    """Return which tool a reply must call by ``choice``, in OpenAI's form: "" if any, None if it need not call one.

    Raises:
        RequestError: there is no such tool.
    """
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise RequestError(f"tool_choice={choice!r:.80}: there are no tools; leave it out")
    if choice == "required":
        return ""
    names = [tool["function"]["name"] for tool in tools]
    function = choice.get("function", choice) if isinstance(choice, dict) else {}
    name = expect(function, dict, "tool_choice.function").get("name")
    if name not in names:
        raise RequestError(
            f"tool_choice={choice!r:.80}: give auto, none, required or one of tools ({', '.join(names)})"
        )
    return name


def token_logprobs(reply: Reply) -> list[dict[str, Any]]:
    """Return (n,) entries of OpenAI's ``logprobs.content``, whose tokens are named by their ids, as by vLLM."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(reply.tokens, reply.logprobs, strict=True)
    ]


def usage_of(reply: Reply) -> dict[str, int]:
    """Return OpenAI's counts of tokens."""
    prompt, sampled = len(reply.prompt), len(reply.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event; ``data`` is written as JSON unless it is a string."""
    text = data if isinstance(data, str) else msgspec.json.encode(data).decode()
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


KEEP_ALIVE = b": still sampling\n\n"  # a comment, which clients skip
DONE = event("[DONE]")


def whole(answer: Callable[[Asked, Reply], dict[str, Any]], asked: Asked, reply: Reply) -> Iterator[bytes]:
    """Yield the whole answer as one event of a stream, for dialects whose clients take it so."""
    yield event(answer(asked, reply))
    yield DONE


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "overloaded_error"}


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Return an error's body for the clients of all dialects, also as the only event of a stream: OpenAI's and
    Anthropic's read ``error``, with Anthropic's types; readers of events of OpenAI's responses the fields beside it.
    """
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"message": message, "type": kind, "param": None, "code": code or status}
    return {
        "type": "error",
        "sequence_number": 0,
        "code": str(code or status),
        "message": message,
        "param": None,
        "error": error,
    }
