"""OpenAI's completions of a text, or of token ids."""

from collections.abc import Iterator
from typing import Any

from recipe.atropos.sessions.dialects.chat import KEEP_ALIVE, error, failed, usage
from recipe.atropos.sessions.messages import Asked, Reply, RequestError, event, flag, refuse, sampling_of, token_ids

__all__ = ["KEEP_ALIVE", "PATHS", "answer", "error", "events", "failed", "read"]

PATHS = ("/v1/completions",)
_TOKENS = 16  # of a reply, where a request does not say


def read(body: dict[str, Any]) -> Asked:
    refuse(body, ("echo", "suffix", "logit_bias", "logprobs"))
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise RequestError(f"{name}={body[name]!r}: a session answers with one choice; ask several times")
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        prompt = token_ids(prompt, "prompt")
    sampling = {"max_new_tokens": _TOKENS, **sampling_of(body)}
    return Asked(prompt=prompt, sampling=sampling, stream=flag(body, "stream"), body=body)


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    head = {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": reply.created, "model": reply.model}
    choice = {"index": 0, "text": reply.content, "finish_reason": reply.finish, "logprobs": None}
    return {**head, "choices": [choice | {"token_ids": reply.tokens}], "usage": usage(reply), **reply.exact}


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    whole = answer(asked, reply)
    if not (asked.body.get("stream_options") or {}).get("include_usage"):
        del whole["usage"]
    yield event(whole)
    yield event("[DONE]")
