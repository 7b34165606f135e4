"""SGLang's own /generate, for one prompt: a text or token ids."""

from collections.abc import Iterator
from typing import Any

from recipe.atropos.sessions.dialects.chat import KEEP_ALIVE, error, failed
from recipe.atropos.sessions.messages import Asked, Reply, RequestError, event, flag, refuse, sampling_of, token_ids

__all__ = ["KEEP_ALIVE", "PATHS", "answer", "error", "events", "failed", "read"]

PATHS = ("/generate",)
_TOKENS = 128  # of a reply, where a request does not say: SGLang's
_CONSTRAINTS = ("regex", "json_schema", "ebnf", "structural_tag", "logit_bias", "custom_params", "stop_regex")


def read(body: dict[str, Any]) -> Asked:
    refuse(body, ("image_data", "audio_data", "video_data", "input_embeds", "lora_path", "top_logprobs_num"))
    given = body.get("sampling_params") or {}
    if not isinstance(given, dict):
        raise RequestError(f"sampling_params is {given!r}; give a mapping")
    refuse(given, _CONSTRAINTS)
    if given.get("n") not in (None, 1):
        raise RequestError(f"sampling_params.n={given['n']!r}: a session answers with one reply; ask several times")
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None) or not isinstance(text, str | None):
        raise RequestError("give one of text, a string, and input_ids, a list")
    names = {"min_tokens": given.get("min_new_tokens"), "seed": given.get("sampling_seed")}
    sampling = {"max_new_tokens": _TOKENS, **sampling_of({**given, **names}, ("max_new_tokens",))}
    prompt = text if ids is None else token_ids(ids, "input_ids")
    return Asked(prompt=prompt, sampling=sampling, stream=flag(body, "stream"), body=body)


def answer(asked: Asked, reply: Reply) -> dict[str, Any]:
    finish: dict[str, Any] = {"type": reply.finish}
    if reply.finish == "length":
        finish["length"] = len(reply.tokens)
    else:
        finish["matched"] = reply.tokens[-1] if reply.stop is None else reply.stop
    info = {
        "id": reply.id,
        "finish_reason": finish,
        "prompt_tokens": len(reply.prompt),
        "completion_tokens": len(reply.tokens),
        "weight_versions": reply.versions,
        "weight_version": reply.versions[-1]["version"] if reply.versions else None,
    }
    if asked.body.get("return_logprob"):
        info["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(reply.logprobs, reply.tokens, strict=True)
        ]
    return {"text": reply.content, "output_ids": reply.tokens, "meta_info": info, **reply.exact}


def events(asked: Asked, reply: Reply) -> Iterator[bytes]:
    yield event(answer(asked, reply))
    yield event("[DONE]")
