"""Anthropic's messages."""

from collections.abc import Iterator
from typing import Any

import orjson

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

PATHS = ("/v1/messages",)
KEEP_ALIVE = event({"type": "ping"}, "ping")
_ERRORS = {"permission_error", "authentication_error", "not_found_error", "api_error"}


def read(body: dict[str, Any]) -> Asked:
    refuse(body, ("mcp_servers", "container", "output_format"))
    thinking = body.get("thinking") or {}
    if not isinstance(thinking, dict):
        raise RequestError(f"thinking is {thinking!r}; give a mapping")
    usable = refuse_forced_tools(body.get("tool_choice"))
    system = text_of(body.get("system"), "system")
    return Asked(
        messages=[{"role": "system", "content": system}] * bool(system) + _messages(body),
        tools=([_tool(tool) for tool in mappings(body, "tools")] or None) if usable else None,
        sampling=sampling_of({**body, "stop": body.get("stop_sequences")}),
        template={"enable_thinking": thinking["type"] != "disabled"} if thinking.get("type") else {},
        stream=flag(body, "stream"),
        body=body,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        raise RequestError(f"a tool of type {tool.get('type')!r}: sessions have tools of the client's, with a name")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": function | described}


def _messages(body: dict[str, Any]) -> list[Message]:
    found: list[Message] = []
    names: dict[str, str] = {}
    for i, given in enumerate(mappings(body, "messages")):
        where, role, content = f"messages[{i}]", given.get("role"), given.get("content")
        if role not in ("user", "assistant"):
            raise RequestError(f"{where}.role is {role!r}; give user or assistant")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
            continue
        texts, calls, thoughts, results = [], [], [], []
        for block in mappings(given, "content", where):
            kind = block.get("type")
            if kind == "text":
                texts.append(string(block, "text", where) or "")
            elif kind == "thinking" and role == "assistant":
                thoughts.append(string(block, "thinking", where) or "")
            elif kind == "tool_use" and role == "assistant":
                identifier, name = string(block, "id", where) or "", string(block, "name", where) or ""
                names[identifier] = name
                function = {"name": name, "arguments": orjson.dumps(block.get("input") or {}).decode()}
                calls.append({"id": identifier, "type": "function", "function": function})
            elif kind == "tool_result" and role == "user":
                identifier = string(block, "tool_use_id", where) or ""
                result: Message = {"role": "tool", "content": text_of(block.get("content"), f"{where}.content")}
                result["tool_call_id"] = identifier
                results.append(result | ({"name": names[identifier]} if identifier in names else {}))
            elif kind != "redacted_thinking":
                raise RequestError(f"{where} has a block of type {kind!r}, which sessions do not take from {role}")
        found += results
        if texts or role == "assistant" or not results:
            message: Message = {"role": role, "content": "".join(texts)}
            if thoughts:
                message["reasoning_content"] = "".join(thoughts)
            found.append(message | ({"tool_calls": calls} if calls else {}))
    return found


def _content(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content, "citations": None})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _mapping(call.arguments)})
    return blocks


def _mapping(arguments: str) -> Any:
    """Return arguments, which this dialect has as a mapping; what is none stays as text."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    return _head(reply) | {
        "content": _content(reply),
        **_stop(reply),
        "usage": {"input_tokens": len(reply.prompt), "output_tokens": len(reply.tokens)},
        "token_ids": reply.tokens,
        **reply.exact,
    }


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _stop(reply: Reply) -> dict[str, Any]:
    reason = "max_tokens" if reply.finish == "length" else "tool_use" if reply.calls else "end_turn"
    if reply.stop is not None and not reply.calls:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop}


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    def typed(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    started = {"content": [], "stop_reason": None, "stop_sequence": None}
    tokens = {"input_tokens": len(reply.prompt), "output_tokens": 0}
    yield typed("message_start", message=_head(reply) | started | {"usage": tokens})
    for index, block in enumerate(_content(reply)):
        if block["type"] == "tool_use":
            empty, delta = {"input": {}}, {"type": "input_json_delta"}
            delta["partial_json"] = orjson.dumps(block["input"]).decode()
        else:
            empty, delta = {block["type"]: ""}, {"type": f"{block['type']}_delta", block["type"]: block[block["type"]]}
        yield typed("content_block_start", index=index, content_block=block | empty)
        yield typed("content_block_delta", index=index, delta=delta)
        yield typed("content_block_stop", index=index)
    exact = {"token_ids": reply.tokens, **reply.exact}
    yield typed("message_delta", delta=_stop(reply), usage={"output_tokens": len(reply.tokens)}, **exact)
    yield typed("message_stop")


def error(status: int, message: str, kind: str) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": kind if kind in _ERRORS else "invalid_request_error", "message": message},
    }


def failed(status: int, message: str, kind: str) -> bytes:
    return event(error(status, message, kind), "error")
