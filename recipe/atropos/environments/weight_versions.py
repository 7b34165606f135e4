"""Which weights sampled which tokens: from SGLang's replies into ``group_overrides`` of the groups that are posted.

atroposlib reads tokens and logprobs of a reply and drops the rest. An environment with ``WeightVersions`` in front of
its base class keeps the versions too, and finds each sampled span again in the sequences that it posts:

    class MyEnv(WeightVersions, BaseEnv): ...

- ``policy_version_min`` and ``policy_version_max``, lists over the group's sequences, are the oldest and the newest
  weight version among the trained tokens. A sequence with a token that no reply is known for has None: unknown is
  unknown.
- Two replies with the same tokens are told apart by their logprobs; where these are not posted, by ``sampled_book``'s
  order: those of the same item first.
- SGLang from 0.5.19 on says which version sampled each token. Before, a reply has one version, the one at its end; that
  is true of all its tokens, because the servers are paused in mode "abort" there, and no reply spans a push.

It stamps what leaves, after every other mixin is through with it.
"""

from collections.abc import Sequence
from typing import Any

from atroposlib.envs.base import ScoredDataGroup

from recipe.atropos.environments.sampled_book import IGNORED, Book
from recipe.atropos.environments.sampled_calls import calls_of


def of_sequence(
    book: Book, tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float] | None
) -> tuple[int, int] | None:
    """(oldest, newest) version among the trained tokens of a sequence; None where one is unknown."""
    found = []
    for piece in book.pieces(tokens, masks, logprobs):
        if all(mask == IGNORED for mask in masks[piece.start : piece.end]):
            continue
        as_sampled = piece.completion is not None and piece.tokens == list(tokens[piece.start : piece.end])
        if not as_sampled or piece.completion.versions is None:
            return None
        found.append(piece.completion.versions)
    return (min(v[0] for v in found), max(v[1] for v in found)) if found else None


def stamp(group: ScoredDataGroup, book: Book, env_name: str | None = None) -> None:
    """Put versions, and the environment's name, into ``group_overrides``; what is there already stays."""
    logprobs = group.get("inference_logprobs") or [None] * len(group["tokens"])
    versions = [
        of_sequence(book, tokens, masks, values or None)
        for tokens, masks, values in zip(group["tokens"], group["masks"], logprobs, strict=True)
    ]
    stamped = {
        "policy_version_min": [None if v is None else v[0] for v in versions],
        "policy_version_max": [None if v is None else v[1] for v in versions],
    }
    if env_name:
        stamped["env_name"] = env_name
    group["group_overrides"] = stamped | dict(group.get("group_overrides") or {})


class WeightVersions:
    """Goes before ``BaseEnv``; see the module. Only servers of type "sglang" report versions."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        calls_of(self)  # its servers remember what they sample

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            stamp(group, calls_of(self).books["train"], self.config.wandb_name)
        await super()._send_scored_data_to_api(scored_data)
