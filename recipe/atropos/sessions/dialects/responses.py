"""OpenAI's responses."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from recipe.atropos.sessions.dialects.chat import KEEP_ALIVE, error, refuse_formats
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

__all__ = ["KEEP_ALIVE", "PATHS", "answer", "error", "events", "failed", "read"]

PATHS = ("/v1/responses",)
_ID = "resp_"
_TEXTS = ("input_text", "output_text", "text")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read(body: dict[str, Any]) -> Asked:
    refuse(body, ("background", "conversation", "prompt", "top_logprobs", "max_tool_calls"))
    text = body.get("text") or {}
    if not isinstance(text, dict):
        raise RequestError(f"text is {text!r}; give a mapping")
    refuse_formats(text.get("format"), "text.format")
    previous = string(body, "previous_response_id")
    instructions = string(body, "instructions")
    reasoning = body.get("reasoning") or {}
    effort = string(reasoning, "effort", "reasoning") if isinstance(reasoning, dict) else None
    usable = refuse_forced_tools(body.get("tool_choice"))
    return Asked(
        messages=[{"role": "system", "content": instructions}] * bool(instructions) + _messages(body),
        tools=([_tool(tool) for tool in mappings(body, "tools")] or None) if usable else None,
        sampling=sampling_of(body, ("max_output_tokens",)),
        template={"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {},
        previous=None if previous is None else previous.removeprefix(_ID),
        stream=flag(body, "stream"),
        body=body,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RequestError(f"a tool of type {tool.get('type')!r}: sessions have functions with a name")
    kept = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": kept}


def _messages(body: dict[str, Any]) -> list[Message]:
    """Return the input as messages; calls and reasoning next to an assistant's text are one message with it."""
    given = body.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[Message] = []
    names: dict[str, str] = {}

    def of_assistant(new: bool) -> Message:
        """Return the assistant's message that goes on, or begin one."""
        if new or not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": ""})
        return found[-1]

    for i, item in enumerate(mappings(body, "input")):
        where, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message":
            if item.get("role") not in _ROLES:
                raise RequestError(f"{where}.role is {item.get('role')!r}; give one of {', '.join(_ROLES)}")
            content = text_of(item.get("content"), f"{where}.content", _TEXTS)
            if item["role"] == "assistant":
                begun = bool(found) and (bool(found[-1].get("content")) or bool(found[-1].get("tool_calls")))
                of_assistant(new=begun)["content"] = content
            else:
                found.append({"role": _ROLES[item["role"]], "content": content})
        elif kind == "reasoning":
            parts = mappings(item, "content", where) or mappings(item, "summary", where)
            of_assistant(new=True)["reasoning_content"] = "".join(str(part.get("text", "")) for part in parts)
        elif kind == "function_call":
            identifier, name = string(item, "call_id", where) or "", string(item, "name", where) or ""
            names[identifier] = name
            function = {"name": name, "arguments": string(item, "arguments", where) or "{}"}
            call = {"id": identifier, "type": "function", "function": function}
            of_assistant(new=False).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            identifier = string(item, "call_id", where) or ""
            content = text_of(item.get("output"), f"{where}.output", _TEXTS)
            named = {"name": names[identifier]} if identifier in names else {}
            found.append({"role": "tool", "content": content, "tool_call_id": identifier, **named})
        else:
            raise RequestError(f"{where} has type {kind!r}; sessions take messages, reasoning, calls and their outputs")
    return found


def _output(reply: Reply) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        thought = [{"type": "reasoning_text", "text": reply.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": thought})
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
        output.append(message | {"content": [part]})
    for number, call in enumerate(reply.calls):
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        output.append({"type": "function_call", "id": f"fc_{number}_{reply.id}", **named})
    return output


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    whole = reply.finish == "stop"
    return _response(asked, reply) | {
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": _output(reply),
        "usage": {
            "input_tokens": len(reply.prompt),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(reply.tokens),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(reply.prompt) + len(reply.tokens),
        },
        "token_ids": reply.tokens,
        **reply.exact,
    }


def _response(asked: Asked, reply: Reply) -> dict[str, Any]:
    body = asked.body
    return {
        "id": f"{_ID}{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
    }


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    numbers = count()

    def typed(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    yield typed("response.created", response=_response(asked, reply))
    yield typed("response.in_progress", response=_response(asked, reply))
    for index, item in enumerate(_output(reply)):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {"status": "in_progress"} if "status" in item else {}
        empty |= {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield typed("response.output_item.added", output_index=index, item=item | empty)
        if item["type"] == "function_call":
            yield typed("response.function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield typed("response.function_call_arguments.done", **place, **done)
        for part in item.get("content", ()):
            inner, text = place | {"content_index": 0}, part["text"]
            kind = f"response.{part['type']}"
            logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield typed("response.content_part.added", **inner, part=part | {"text": ""})
            yield typed(f"{kind}.delta", **inner, delta=text, **logprobs)
            yield typed(f"{kind}.done", **inner, text=text, **logprobs)
            yield typed("response.content_part.done", **inner, part=part)
        yield typed("response.output_item.done", output_index=index, item=item)
    whole = answer(asked, reply)
    yield typed(f"response.{whole['status']}", response=whole)


def failed(status: int, message: str, kind: str) -> bytes:
    found = {"type": "error", "sequence_number": 0, "code": kind, "message": message, "param": None}
    return event(found, "error")
