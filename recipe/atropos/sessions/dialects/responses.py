"""OpenAI's responses: a request's input and an answer's output are lists of items, several of which are one message."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from recipe.atropos.sessions.messages import (
    Asked,
    Message,
    Reply,
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

PATH = "/v1/responses"

_TEXTS = ("input_text", "output_text", "text")
_ECHOED = (
    "instructions max_output_tokens metadata previous_response_id reasoning store temperature text top_p truncation"
).split()


def read(body: dict[str, Any]) -> Asked:
    """Return what a request asks; its ``instructions`` are the first message.

    Raises:
        RequestError: it cannot be answered.
    """
    refuse(body, ("conversation", "prompt", "background", "context_management", "image", "top_logprobs"))
    text = expect(body.get("text") or {}, dict, "text")
    if text.get("format"):
        typed(text["format"], "text.format", "text")
    if isinstance(body.get("input"), str):
        body = {**body, "input": [{"role": "user", "content": body["input"]}]}
    messages = _messages(body)
    if body.get("instructions"):
        instructions = expect(body["instructions"], str, "instructions")
        messages = [{"role": "system", "content": instructions, "instructions": True}, *messages]
    effort = expect(body.get("reasoning") or {}, dict, "reasoning").get("effort")
    previous, tools = body.get("previous_response_id"), tools_of(body, body.get("tool_choice"))
    return Asked(
        messages=name_tools(messages),
        tools=tools,
        call=required_call(body.get("tool_choice"), tools),
        sampling=sampling_of(body),
        template={"reasoning_effort": expect(effort, str, "reasoning.effort")} if effort else {},
        previous=expect(previous, str, "previous_response_id").removeprefix("resp_") if previous else None,
        stream=expect(body.get("stream") or False, bool, "stream"),
        body=body,
    )


def resolve(body: dict[str, Any], recorded: Callable[[str], Reply]) -> None:
    """Put items of earlier answers, which ``recorded`` returns by id, in place of a request's references to them."""
    given = body.get("input")
    for i, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            name = expect(item.get("id"), str, f"input[{i}].id")
            output = answer(Asked(), recorded(name.partition("_")[2].partition("_")[0]))["output"]
            given[i] = next((one for one in output if one["id"] == name), item)


def _messages(body: dict[str, Any]) -> list[Message]:
    """Join the items that an assistant said in one turn: reasoning, then a text, then calls."""
    found: list[Message] = []
    for item, where in items_of(body, "input"):
        message = _message(item, where)
        last = found[-1] if found else {"role": None}
        both = message["role"] == last["role"] == "assistant"
        if both and ("tool_calls" in message or not (last["content"] or "tool_calls" in last)):
            join(last, message)
        else:
            found.append(message)
    return found


def _message(item: Any, where: str) -> Message:
    kinds = ("message", "reasoning", "function_call", "function_call_output", None)
    match typed(item, where, *kinds).get("type"):
        case "reasoning":
            text = text_of(item.get("content"), f"{where}.content", ("reasoning_text", "text"))
            text = text or text_of(item.get("summary"), f"{where}.summary", ("summary_text",))
            return {"role": "assistant", "content": "", **({"reasoning_content": text} if text else {})}
        case "function_call":
            call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            text = text_of(item.get("output"), f"{where}.output", _TEXTS, required=True)
            id = expect(item.get("call_id"), str, f"{where}.call_id")
            return {"role": "tool", "tool_call_id": id, "content": text}
    text = text_of(item.get("content"), f"{where}.content", _TEXTS, required=True)
    return {"role": role_of(item, where, "system", "user", "assistant"), "content": text}


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    """Return a ``Response`` with the exact tokens; how many of them are reasoning or were cached is not known."""
    status = "incomplete" if reply.finish == "length" else "completed"
    output: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        output.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": [thought]})
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        output.append({"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "content": [part]})
    for i, call in enumerate(reply.calls):
        what = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        output.append({"type": "function_call", "id": f"fc_{reply.id}_{i}", **what})
    prompt, sampled = len(reply.prompt), len(reply.tokens)
    return {
        **{name: asked.body.get(name) for name in _ECHOED},
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reply.finish == "length" else None,
        "output": [{**item, "status": status} for item in output],
        "parallel_tool_calls": True,
        "tool_choice": asked.body.get("tool_choice") or "auto",
        "tools": [{"parameters": None, "strict": False, **tool} for tool in asked.body.get("tools") or ()],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
        "token_ids": reply.tokens,
        **reply.exact,
    }


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    """Yield a stream's events; the last one has the whole answer."""
    numbers = itertools.count()

    def one(kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    whole = answer(asked, reply)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    begun = {name: value for name, value in begun.items() if name not in ("token_ids", *reply.exact)}
    yield one("created", response=begun)
    yield one("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield one("output_item.added", output_index=index, item={**item, "status": "in_progress", **empty})
        if item["type"] == "function_call":
            yield one("function_call_arguments.delta", **at, delta=item["arguments"])
            yield one("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        else:
            [part], at = item["content"], {**at, "content_index": 0}
            more = {"logprobs": []} if part["type"] == "output_text" else {}
            yield one("content_part.added", **at, part={**part, "text": ""})
            yield one(f"{part['type']}.delta", **at, delta=part["text"], **more)
            yield one(f"{part['type']}.done", **at, text=part["text"], **more)
            yield one("content_part.done", **at, part=part)
        yield one("output_item.done", output_index=index, item=item)
    yield one(whole["status"], response=whole)
