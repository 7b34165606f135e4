"""Anthropic's messages. A turn is a list of blocks; turns of one role that follow each other are one."""

from collections.abc import Iterator
from typing import Any

import orjson

from recipe.atropos.sessions.messages import (
    Asked,
    Message,
    Reply,
    RequestError,
    event,
    expect,
    items_of,
    join,
    name_tools,
    refuse,
    required_call,
    role_of,
    sampling_of,
    text_of,
    tool_call,
    tools_of,
    typed,
)

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
KEEP_ALIVE = event({"type": "ping"}, "ping")

_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
_BILLING = "x-anthropic-billing-header:"  # Claude Code's, for Anthropic; it differs between the requests of a task
_THINKING = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}, "adaptive": {}}


def read(body: dict[str, Any]) -> Asked:
    """Return what a request asks.

    Raises:
        RequestError: it cannot be answered.
    """
    if body.get("max_tokens") is None:
        raise RequestError("max_tokens is missing; give a whole number from 1 on")
    asked = count(body)
    if asked.messages[-1]["role"] == "assistant":  # which Anthropic's API goes on with, OpenAI's answers with another
        raise RequestError("the last message is the assistant's; a session does not continue a reply: leave it out")
    return asked


def count(body: dict[str, Any]) -> Asked:
    """Return what a request to COUNT_PATH asks, which has no ``max_tokens``, and may end with any turn.

    Raises:
        RequestError: it cannot be answered.
    """
    refuse(body, ("container", "mcp_servers", "output_format", "prefill"))
    output = expect(body.get("output_config") or {}, dict, "output_config")
    refuse(output, ("format",))
    template: dict[str, Any] = {}
    if body.get("thinking"):
        template = dict(_THINKING[typed(body["thinking"], "thinking", *_THINKING)["type"]])
    if output.get("effort"):
        template["reasoning_effort"] = expect(output["effort"], str, "output_config.effort")
    given = expect(body.get("tool_choice") or {}, dict, "tool_choice")
    choice = {"any": "required", "tool": given}.get(str(given.get("type")), given.get("type"))
    tools = tools_of(body, choice, ("custom", None), schema="input_schema")
    return Asked(
        messages=name_tools(_messages(body)),
        tools=tools,
        call=required_call(choice, tools),
        sampling=sampling_of(body),
        template=template,
        stream=expect(body.get("stream") or False, bool, "stream"),
        body=body,
    )


def _messages(body: dict[str, Any]) -> list[Message]:
    found: list[Message] = []
    system = body.get("system")
    if isinstance(system, list):
        system = [one for one in system if not (isinstance(one, dict) and str(one.get("text")).startswith(_BILLING))]
    if system:
        found.append({"role": "system", "content": text_of(system, "system")})
    for turn, where in items_of(body, "messages"):
        for message in _turn(turn, where):
            if found and message["role"] == found[-1]["role"] and message["role"] in ("user", "assistant"):
                join(found[-1], message)
            else:
                found.append(message)
    return found


def _turn(turn: dict[str, Any], where: str) -> Iterator[Message]:
    """Yield the results of tools, then what else a turn says."""
    role, blocks, where = role_of(turn, where, *_BLOCKS), turn.get("content"), f"{where}.content"
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    texts, thoughts, calls, results = [], [], [], []
    for i, block in enumerate(expect(blocks, list, where)):
        place = f"{where}[{i}]"
        match typed(block, place, *_BLOCKS[role])["type"]:
            case "text":
                texts.append(expect(block.get("text"), str, f"{place}.text"))
            case "thinking":
                thoughts.append(expect(block.get("thinking"), str, f"{place}.thinking"))
            case "tool_use":
                given = expect(block.get("input"), dict, f"{place}.input")
                calls.append(tool_call(block.get("id"), block.get("name"), given, place))
            case "tool_result":
                id = expect(block.get("tool_use_id"), str, f"{place}.tool_use_id")
                text = text_of(block.get("content"), f"{place}.content")
                results.append({"role": "tool", "tool_call_id": id, "content": text})
    yield from results
    if texts or not results:
        message: Message = {"role": role, "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        yield message


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    """Return a ``Message`` with the exact tokens."""
    content: list[dict[str, Any]] = []
    if reply.reasoning is not None:  # signed, since clients send what is not as a text, if at all
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.id})
    if reply.content or not reply.calls:
        content.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        given = orjson.loads(call.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    reason = "end_turn" if reply.stop is None else "stop_sequence"
    if reply.calls:
        reason = "tool_use"
    if reply.finish == "length":
        reason = "max_tokens"
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": reply.stop if reason == "stop_sequence" else None,
        "usage": {"input_tokens": len(reply.prompt), "output_tokens": len(reply.tokens)},
        "token_ids": reply.tokens,
        **reply.exact,
    }


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    """Yield a stream's events; the ``message_delta`` has the exact tokens."""

    def one(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    whole = answer(asked, reply)
    exact = {name: whole.pop(name) for name in ("token_ids", *reply.exact)}
    end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**whole, "content": [], "usage": {**whole["usage"], "output_tokens": 0}} | dict.fromkeys(end)
    yield one("message_start", message=begun)
    arguments = [call.arguments for call in reply.calls]
    for index, block in enumerate(whole["content"]):
        keys = [key for key in ("text", "thinking", "signature") if key in block]
        empty, deltas = dict.fromkeys(keys, ""), [{"type": f"{key}_delta", key: block[key]} for key in keys]
        if block["type"] == "tool_use":
            empty, deltas = {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments.pop(0)}]
        yield one("content_block_start", index=index, content_block={**block, **empty})
        for delta in deltas:
            yield one("content_block_delta", index=index, delta=delta)
        yield one("content_block_stop", index=index)
    yield one("message_delta", delta=end, usage=whole["usage"], **exact)
    yield one("message_stop")
