"""vLLM's /inference/v1/generate, from ids to ids: the ``renderers`` package calls it, so verifiers and prime-rl do."""

from functools import partial
from typing import Any

from recipe.atropos.sessions.messages import (
    Asked,
    Reply,
    RequestError,
    expect,
    ids_of,
    refuse,
    sampling_of,
    token_logprobs,
    usage_of,
    whole,
)

PATH = "/inference/v1/generate"


def read(body: dict[str, Any]) -> Asked:
    """Return what a request asks; ``logprobs`` may be 1, but no other token's than the sampled one's are known.

    Raises:
        RequestError: it cannot be answered.
    """
    refuse(body, ("features", "content_parts"))
    params = expect(body.get("sampling_params") or {}, dict, "sampling_params")
    refuse(params, ("prompt_logprobs",))
    if params.get("logprobs") not in (None, 0, 1):
        raise RequestError(f"logprobs is {params['logprobs']!r:.80}; give 1, for those of the sampled tokens")
    return Asked(
        prompt=ids_of(body.get("token_ids"), "token_ids"),
        sampling=sampling_of(params),
        stream=expect(body.get("stream") or False, bool, "stream"),
        body=body,
    )


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    """Return vLLM's answer; its logprobs are always there, since that client needs them."""
    return {
        "request_id": reply.id,
        "choices": [
            {
                "index": 0,
                "token_ids": reply.tokens,
                "logprobs": {"content": token_logprobs(reply)},
                "finish_reason": reply.finish,
            }
        ],
        "usage": usage_of(reply),
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        **reply.exact,
    }


events = partial(whole, answer)
