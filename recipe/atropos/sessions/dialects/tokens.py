"""Token ids in, token ids out: the endpoint by which ``renderers`` and verifiers sample."""

from collections.abc import Iterator
from typing import Any

from recipe.atropos.sessions.dialects.chat import KEEP_ALIVE, error, failed, token_logprobs
from recipe.atropos.sessions.messages import Asked, Reply, RequestError, event, refuse, sampling_of, token_ids

__all__ = ["KEEP_ALIVE", "PATHS", "answer", "error", "events", "failed", "read"]

PATHS = ("/inference/v1/generate",)


def read(body: dict[str, Any]) -> Asked:
    refuse(body, ("stream", "features", "kv_transfer_params"))
    given = body.get("sampling_params") or {}
    if not isinstance(given, dict):
        raise RequestError(f"sampling_params is {given!r}; give a mapping")
    refuse(given, ("logit_bias", "structured_outputs", "allowed_token_ids", "bad_words", "prompt_logprobs"))
    if given.get("n") not in (None, 1):
        raise RequestError(f"sampling_params.n={given['n']!r}: a session answers with one reply; ask several times")
    return Asked(prompt=token_ids(body.get("token_ids"), "token_ids"), sampling=sampling_of(given), body=body)


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    logprobs = {"content": token_logprobs(reply)}
    choice = {"index": 0, "token_ids": reply.tokens, "logprobs": logprobs, "finish_reason": reply.finish}
    return {
        "request_id": reply.id,
        "choices": [choice],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        **reply.exact,
    }


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    yield event(answer(asked, reply))
