"""Which weights sampled which tokens, and how: from SGLang's replies into ``group_overrides`` of the posted groups.

atroposlib reads tokens and logprobs of a reply and drops the rest. An environment with ``WeightVersions`` in front of
its base class keeps versions and sampling parameters too, and finds each sampled span again in what it posts:

    class MyEnv(WeightVersions, BaseEnv): ...

- ``policy_version_min`` and ``policy_version_max``, lists over the group's sequences, are the oldest and the newest
  weight version among the trained tokens. A sequence with a token that no reply is known for has None: unknown is
  unknown.
- ``sampling_params``, likewise, lists the distinct parameters that the trained tokens were sampled with
  (``recipe.atropos.data.sampling``).
- Two replies with the same tokens are told apart by their logprobs; where these are not posted, by the
  cache's order: those of the same item first.
- SGLang from 0.5.19 on says which version sampled each token. Before, a reply has one version, the one at its end; that
  is true of all its tokens, because the servers are paused in mode "abort" there, and no reply spans a push.

It stamps what leaves, after every other mixin is through with it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.envs.base import ScoredDataGroup

from recipe.atropos.adapter.completion_cache import IGNORED, CompletionCache
from recipe.atropos.adapter.sampled_calls import calls_of
from recipe.atropos.data.sampling import SamplingParams


class Origin(NamedTuple):
    """Of the trained tokens of a sequence: (oldest, newest) version, and the distinct parameters; None if unknown."""

    versions: tuple[int, int] | None = None
    sampling: tuple[SamplingParams, ...] | None = None


def of_sequence(
    cache: CompletionCache, tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float] | None
) -> Origin:
    """Where the trained tokens of a sequence come from; all unknown where one was not found as it was sampled."""
    found = []
    for piece in cache.pieces(tokens, masks, logprobs):
        if all(mask == IGNORED for mask in masks[piece.start : piece.end]):
            continue
        if piece.completion is None or piece.tokens != list(tokens[piece.start : piece.end]):
            return Origin()
        found.append(piece.completion)
    versions = [completion.versions for completion in found]
    sampling = list(dict.fromkeys(completion.sampling for completion in found))  # in the order of the turns
    return Origin(
        None if not found or None in versions else (min(v[0] for v in versions), max(v[1] for v in versions)),
        None if not found or None in sampling else tuple(sampling),
    )


def stamp(group: ScoredDataGroup, cache: CompletionCache, env_name: str | None = None) -> None:
    """Put versions, parameters and the environment's name into ``group_overrides``; what is there already stays."""
    logprobs = group.get("inference_logprobs") or [None] * len(group["tokens"])
    origins = [
        of_sequence(cache, tokens, masks, values or None)
        for tokens, masks, values in zip(group["tokens"], group["masks"], logprobs, strict=True)
    ]
    stamped = {
        "policy_version_min": [None if o.versions is None else o.versions[0] for o in origins],
        "policy_version_max": [None if o.versions is None else o.versions[1] for o in origins],
        "sampling_params": [None if o.sampling is None else [p.to_mapping() for p in o.sampling] for o in origins],
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
            stamp(group, calls_of(self).caches["train"], self.config.wandb_name)
        await super()._send_scored_data_to_api(scored_data)
