"""OpenAI's chat completions."""
from collections.abc import Iterator
from typing import Any

from recipe.atropos.sessions.messages import Asked, Message, Reply, RequestError, event, refuse, sampling_of, text_of

PATHS = ("/v1/chat/completions",)
KEEP_ALIVE = b": keep-alive\n\n"


def read(body: dict[str, Any]) -> Asked:
    messages = []
    for i, m in enumerate(body.get("messages") or []):
        found: Message = {"role": {"developer": "system"}.get(m["role"], m["role"]), "content": text_of(m.get("content"), f"messages[{i}]")}
        for key in ("tool_calls", "tool_call_id", "name", "reasoning_content"):
            if m.get(key):
                found[key] = m[key]
        messages.append(found)
    return Asked(messages=messages, tools=body.get("tools") or None, sampling=sampling_of(body, ("max_tokens", "max_completion_tokens")), stream=bool(body.get("stream")), body=body)


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    message = reply.message()
    message["content"] = message["content"] or None
    return {"id": f"chatcmpl-{reply.id}", "object": "chat.completion", "created": reply.created, "model": reply.model,
      "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if reply.calls else reply.finish, "logprobs": None, "token_ids": reply.tokens}],
      "usage": {"prompt_tokens": len(reply.prompt), "completion_tokens": len(reply.tokens), "total_tokens": len(reply.prompt) + len(reply.tokens)}, **reply.exact}


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    yield event("[DONE]")


def error(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def failed(status: int, message: str, kind: str) -> bytes:
    return event(error(status, message, kind))
