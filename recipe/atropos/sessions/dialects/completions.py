"""OpenAI's completions of a prompt that is used as it is."""

from collections.abc import Iterator
from typing import Any

from recipe.atropos.sessions.messages import (
    DONE,
    Asked,
    Reply,
    RequestError,
    event,
    expect,
    ids_of,
    refuse,
    sampling_of,
    token_logprobs,
    typed,
    usage_of,
)

PATH = "/v1/completions"


def read(body: dict[str, Any]) -> Asked:
    """Return what a request asks; ``logprobs`` is 0 at most, which gives those of the sampled tokens.

    Raises:
        RequestError: it cannot be answered.
    """
    refuse(body, ("echo", "suffix", "prompt_logprobs", "prompt_embeds"))
    if body.get("response_format"):
        typed(body["response_format"], "response_format", "text")
    if body.get("logprobs") not in (None, 0):
        raise RequestError(f"logprobs is {body['logprobs']!r:.80}; give 0, for those of the sampled tokens only")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise RequestError(f"prompt holds {len(prompt)} prompts; a session answers one prompt in a request")
    if not prompt or not isinstance(prompt, str):
        prompt = ids_of(prompt, "prompt")
    expect(body.get("stream_options") or {}, dict, "stream_options")
    return Asked(
        prompt=prompt,
        sampling={"max_new_tokens": 16, **sampling_of(body)},  # OpenAI's default
        stream=expect(body.get("stream") or False, bool, "stream"),
        body=body,
    )


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    """Return a ``Completion`` with the exact tokens."""
    logprobs = None
    if type(asked.body.get("logprobs")) is int:
        logprobs = {"tokens": [one["token"] for one in token_logprobs(reply)], "token_logprobs": reply.logprobs}
    return {
        "id": f"cmpl-{reply.id}",
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [
            {
                "index": 0,
                "text": reply.content,
                "logprobs": logprobs,
                "finish_reason": reply.finish,
                "token_ids": reply.tokens,
            }
        ],
        "usage": usage_of(reply),
        **reply.exact,
    }


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    """Yield the whole answer as one chunk, then its usage, if it was asked for."""
    whole = answer(asked, reply)
    usage = whole.pop("usage")
    yield event(whole)
    if (asked.body.get("stream_options") or {}).get("include_usage"):
        yield event({**whole, "choices": [], "usage": usage})
    yield DONE
