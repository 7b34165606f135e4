"""OpenAI's chat completions."""

from collections.abc import Iterator
from typing import Any

from recipe.atropos.sessions.messages import (
    Asked,
    Message,
    Reply,
    RequestError,
    event,
    flag,
    mappings,
    refuse,
    refuse_forced_tools,
    sampling_of,
    string,
    text_of,
)

PATHS = ("/v1/chat/completions",)
KEEP_ALIVE = b": keep-alive\n\n"

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REFUSED = ("logit_bias", "top_logprobs", "functions", "function_call", "prediction", "audio", "web_search_options")


def read(body: dict[str, Any]) -> Asked:
    refuse(body, _REFUSED)
    refuse_formats(body.get("response_format"), "response_format")
    if body.get("n") not in (None, 1):
        raise RequestError(f"n={body['n']!r}: a session answers with one choice; ask several times")
    if body.get("modalities") not in (None, ["text"]):
        raise RequestError(f"modalities={body['modalities']!r}: sessions are of text")
    template = body.get("chat_template_kwargs") or {}
    if not isinstance(template, dict):
        raise RequestError(f"chat_template_kwargs is {template!r}; give a mapping")
    if effort := string(body, "reasoning_effort"):
        template = {"reasoning_effort": effort, "enable_thinking": effort != "none", **template}
    usable = refuse_forced_tools(body.get("tool_choice"))
    return Asked(
        messages=read_messages(body),
        tools=(mappings(body, "tools") or None) if usable else None,
        sampling=sampling_of(body, ("max_tokens", "max_completion_tokens")),
        template=template,
        stream=flag(body, "stream"),
        body=body,
    )


def refuse_formats(given: Any, where: str) -> None:
    """Raise RequestError for any format but text."""
    if given not in (None, {"type": "text"}):
        raise RequestError(f"{where} {given!r}: constrained sampling is of another distribution than what is trained")


def read_messages(body: dict[str, Any]) -> list[Message]:
    found: list[Message] = []
    names: dict[str, str] = {}  # of calls, by their ids
    for i, given in enumerate(mappings(body, "messages")):
        where = f"messages[{i}]"
        if given.get("role") not in _ROLES:
            raise RequestError(f"{where}.role is {given.get('role')!r}; give one of {', '.join(_ROLES)}")
        message: Message = {"role": _ROLES[given["role"]]}
        message["content"] = text_of(given.get("content"), f"{where}.content", ("text", "refusal"))
        if reasoning := string(given, "reasoning_content", where) or string(given, "reasoning", where):
            message["reasoning_content"] = reasoning
        if calls := mappings(given, "tool_calls", where):
            message["tool_calls"] = [_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls)]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if message["role"] == "tool":
            message["tool_call_id"] = string(given, "tool_call_id", where) or ""
            if name := string(given, "name", where) or names.get(message["tool_call_id"]):
                message["name"] = name
        found.append(message)
    return found


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} is no call of a function with a name")
    arguments = string(function, "arguments", where) or "{}"
    made = {"name": function["name"], "arguments": arguments}
    return {"id": string(call, "id", where) or "", "type": "function", "function": made}


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    message = reply.message()
    message["content"] = reply.content or (None if reply.calls else "")
    choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": _logprobs(asked, reply)}
    return {
        **_head(reply, "chat.completion"),
        "choices": [choice | {"token_ids": reply.tokens}],
        "usage": usage(reply),
        **reply.exact,
    }


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    head = _head(reply, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], **fields: Any) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None} | fields]})

    yield chunk({"role": "assistant", "content": ""})
    if reply.reasoning is not None:
        yield chunk({"reasoning_content": reply.reasoning})
    if reply.content:
        yield chunk({"content": reply.content})
    for index, call in enumerate(reply.calls):
        function = {"name": call.name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
    last = {"index": 0, "delta": {}, "finish_reason": _finish(reply), "logprobs": _logprobs(asked, reply)}
    yield event({**head, "choices": [last | {"token_ids": reply.tokens}], **reply.exact})
    if (asked.body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(reply)})
    yield event("[DONE]")


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.calls and reply.finish == "stop" else reply.finish


def _logprobs(asked: Asked, reply: Reply) -> dict[str, Any] | None:
    return {"content": token_logprobs(reply), "refusal": None} if asked.body.get("logprobs") else None


def token_logprobs(reply: Reply) -> list[dict[str, Any]]:
    """Return OpenAI's list of tokens with logprobs; a token is named by its id, which is exact."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(reply.tokens, reply.logprobs, strict=True)
    ]


def usage(reply: Reply) -> dict[str, int]:
    prompt, tokens = len(reply.prompt), len(reply.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def error(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def failed(status: int, message: str, kind: str) -> bytes:
    return event(error(status, message, kind))
