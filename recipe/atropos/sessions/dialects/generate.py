"""SGLang's own /generate."""

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
    whole,
)

PATH = "/generate"

_REFUSED = (
    "input_embeds image_data video_data audio_data session_params lora_path custom_logit_processor"
    " top_logprobs_num token_ids_logprob return_hidden_states"
).split()


def read(body: dict[str, Any]) -> Asked:
    """Return what a request asks.

    Raises:
        RequestError: it cannot be answered.
    """
    refuse(body, _REFUSED)
    if body.get("logprob_start_len") not in (None, -1):
        raise RequestError(f"logprob_start_len is {body['logprob_start_len']!r:.80}; a session has no prompt logprobs")
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("give either text or input_ids")
    if ids is None and not expect(text, str, "text"):
        raise RequestError("text is empty; give a prompt")
    params = expect(body.get("sampling_params") or {}, dict, "sampling_params")
    default = {} if "max_new_tokens" in params else {"max_new_tokens": 128}  # SGLang's
    return Asked(
        prompt=text if ids is None else ids_of(ids, "input_ids"),
        sampling={**default, **sampling_of(params)},
        stream=expect(body.get("stream") or False, bool, "stream"),
        body=body,
    )


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    """Return SGLang's answer: a token ended the reply unless a stop string or the length did."""
    finish = {"type": "length", "length": len(reply.tokens)}
    if reply.finish == "stop":
        matched = reply.tokens[-1] if reply.stop is None and reply.tokens else reply.stop
        finish = {"type": "stop", "matched": matched}
    meta = {
        "id": reply.id,
        "finish_reason": finish,
        "prompt_tokens": len(reply.prompt),
        "completion_tokens": len(reply.tokens),
        "weight_version": reply.versions[-1]["version"] if reply.versions else None,
        "weight_versions": reply.versions,
    }
    if asked.body.get("return_logprob"):
        pairs = zip(reply.logprobs, reply.tokens, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return {"text": reply.content, "output_ids": reply.tokens, "meta_info": meta, **reply.exact}


events = partial(whole, answer)  # SGLang's events repeat the text from its start
