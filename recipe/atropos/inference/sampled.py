"""What a reply of SGLang's /generate says of the tokens that it sampled."""

from typing import Any, NamedTuple

NOT_PUSHED = -1  # a version older than all others: the trainer drops what such weights sampled


class SampledReply(NamedTuple):
    """A whole reply: n >= 1 tokens, and the logprob of each; ``finish`` is SGLang's finish_reason."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: dict[str, Any]
    versions: tuple[int, int] | None  # see ``versions_of``


def read_reply(answer: dict[str, Any]) -> SampledReply | None:
    """Return a sample of /generate; None if it was aborted, or has no tokens."""
    info = answer["meta_info"]
    sampled, finish = info.get("output_token_logprobs"), info.get("finish_reason") or {}
    if not sampled or finish.get("type") == "abort":
        return None
    tokens, logprobs = [token for _, token, *_ in sampled], [value for value, *_ in sampled]
    return SampledReply(answer.get("text"), tokens, logprobs, finish, versions_of(info))


def versions_of(meta_info: dict[str, Any]) -> tuple[int, int] | None:
    """Return the (oldest, newest) version of a reply's tokens; None if the server reports none.

    A version that is no number, such as "default", means weights that no trainer pushed: ``NOT_PUSHED``.
    """
    spans = meta_info.get("weight_versions") or [{"version": meta_info.get("weight_version")}]
    names = [span.get("version") for span in spans]
    if any(name is None for name in names):
        return None
    versions = [int(name) if str(name).isdecimal() else NOT_PUSHED for name in names]
    return min(versions), max(versions)
