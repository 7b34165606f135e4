"""OpenAI's chat completions."""

from collections.abc import Iterator
from typing import Any

from recipe.atropos.sessions.messages import (
    DONE,
    Asked,
    Message,
    Reply,
    RequestError,
    event,
    expect,
    items_of,
    name_tools,
    refuse,
    required_call,
    role_of,
    sampling_of,
    text_of,
    token_logprobs,
    tool_call,
    tools_of,
    typed,
    usage_of,
)

PATH = "/v1/chat/completions"

_REFUSED = (
    "top_logprobs prompt_logprobs audio prediction functions function_call web_search_options"
    " continue_final_message chat_template documents echo"
).split()
_PLAIN = {"role", "content"}


def read(body: dict[str, Any]) -> Asked:
    """Return what a request asks.

    Raises:
        RequestError: it cannot be answered.
    """
    refuse(body, _REFUSED)
    if body.get("modalities") not in (None, [], ["text"]):
        raise RequestError(f"modalities is {body['modalities']!r:.80}; sessions give text only")
    if body.get("response_format"):
        typed(body["response_format"], "response_format", "text")
    template = expect(body.get("chat_template_kwargs") or {}, dict, "chat_template_kwargs")
    if body.get("reasoning_effort"):
        template = {**template, "reasoning_effort": expect(body["reasoning_effort"], str, "reasoning_effort")}
    expect(body.get("stream_options") or {}, dict, "stream_options")
    tools = tools_of(body, body.get("tool_choice"), within="function")
    return Asked(
        messages=name_tools([_message(*one) for one in items_of(body, "messages")]),
        tools=tools,
        call=required_call(body.get("tool_choice"), tools),
        sampling=sampling_of(body),
        template=template,
        stream=expect(body.get("stream") or False, bool, "stream"),
        body=body,
    )


def _message(given: dict[str, Any], where: str) -> Message:
    if given.keys() == _PLAIN and given["role"] in ("system", "user", "assistant") and type(given["content"]) is str:
        return given  # as nearly all are; a long history is read at each turn
    role = role_of(given, where, "system", "user", "assistant", "tool")
    refuse(given, ("audio", "function_call"))
    text = text_of(given.get("content"), f"{where}.content", required=role != "assistant")
    found: Message = {"role": role, "content": text}
    if role == "tool":
        found["tool_call_id"] = expect(given.get("tool_call_id"), str, f"{where}.tool_call_id")
        if given.get("name"):
            found["name"] = expect(given["name"], str, f"{where}.name")
    if role == "assistant":
        if reasoning := given.get("reasoning_content") or given.get("reasoning"):
            found["reasoning_content"] = expect(reasoning, str, f"{where}.reasoning_content")
        if calls := expect(given.get("tool_calls") or [], list, f"{where}.tool_calls"):
            found["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def _call(given: Any, where: str) -> dict[str, Any]:
    function = expect(typed(given, where, "function", None).get("function"), dict, f"{where}.function")
    return tool_call(given.get("id"), function.get("name"), function.get("arguments"), where)


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    """Return a ``ChatCompletion`` with the exact tokens."""
    message = {**reply.message(), "refusal": None}
    if reply.calls:
        message["content"] = reply.content or None
    choice = {"index": 0, "message": message, **_end(asked, reply)}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": usage_of(reply), **reply.exact}


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    """Yield the chunks of a stream; the last one with a choice has the exact tokens."""
    head = _head(reply, "chat.completion.chunk")
    message = reply.message()
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    if "reasoning_content" in message:
        deltas.append({"reasoning_content": message["reasoning_content"]})
    if reply.content or not reply.calls:
        deltas.append({"content": reply.content})
    for i, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{**call, "index": i, "function": {"name": name, "arguments": ""}}]})
        deltas.append({"tool_calls": [{"index": i, "function": {"arguments": arguments}}]})
    for delta in deltas:
        yield event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]})
    yield event({**head, "choices": [{"index": 0, "delta": {}, **_end(asked, reply)}], **reply.exact})
    if (asked.body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage_of(reply)})
    yield DONE


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _end(asked: Asked, reply: Reply) -> dict[str, Any]:
    return {
        "logprobs": {"content": token_logprobs(reply), "refusal": None} if asked.body.get("logprobs") else None,
        "finish_reason": "tool_calls" if reply.calls and reply.finish != "length" else reply.finish,
        "token_ids": reply.tokens,
    }
