"""Validate the groups that environments make: plain values, and what ``data.scored_group`` takes.

``validated`` runs before anything else reads a group, ``check_limits`` last. What cannot be fixed is refused, by name:

- ``no_group``: the environment made no group, and gives no reason.
- ``no_trained_token``: no token of the group is trained on.
- The reasons of ``ScoredGroup``, for the fields that they name. The optional per-token fields, such as logprobs and
  advantages, are checked last, since restoring the sampled tokens may have corrected them; each must then have a number
  for every token.
- ``wrong_size``, ``equal_scores``, ``too_long``: BaseEnv drops these with a warning.

NumPy and torch scalars and arrays, tuples and pydantic objects become plain values, at any depth.
"""

from typing import Any

import numpy as np
import orjson
from atroposlib.envs.base import BaseEnvConfig

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import IGNORED
from recipe.atropos.data.scored_group import FLOATS, ScoredGroup, trajectory_numbers

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def _plain(value: Any) -> Any:
    for method in ("tolist", "model_dump"):  # torch, and NumPy arrays that orjson does not support; pydantic
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError  # orjson names the type in its own error


def as_groups(scored_data: Any) -> list:
    """Return a list of groups, whether given one group or a list, since BaseEnv's methods take both."""
    return scored_data if isinstance(scored_data, list) else [scored_data]


def validated(group: Any) -> dict[str, Any]:
    """Return a copy of the group that has only plain values.

    Raises:
        RefusedGroup: see the module docstring.
    """
    if group is None:
        raise RefusedGroup(Reason.NO_GROUP, "one of the groups of an item is None")
    if not isinstance(group, dict):
        raise RefusedGroup(Reason.MALFORMED, f"a group is a dict, not {type(group).__name__}: {str(group)[:100]}")
    try:
        plain = orjson.loads(orjson.dumps(group, default=_plain, option=_OPTIONS))  # NaN becomes None
    except TypeError as error:
        raise RefusedGroup(Reason.MALFORMED, str(error)) from error
    if isinstance(plain.get("scores"), list) and None in plain["scores"]:  # NaN before, or infinite
        raise RefusedGroup(Reason.NONFINITE_SCORES, f"scores {str(group['scores'])[:200]}")
    plain["group_overrides"] = plain.get("group_overrides") or {}
    whole = ScoredGroup.from_mapping({name: values for name, values in plain.items() if name not in FLOATS})
    if (whole.masks == IGNORED).all():
        raise RefusedGroup(Reason.NO_TRAINED_TOKEN, f"all masks of {len(whole.lengths)} sequences are {IGNORED}")
    plain["scores"] = whole.scores.tolist()
    return plain


def size_of(group: dict[str, Any]) -> int:
    """Return the size of a validated group: its number of trajectories."""
    return len(set(trajectory_numbers(group["group_overrides"], len(group["tokens"]))))


def check_limits(group: dict[str, Any], config: BaseEnvConfig, max_token_len: int) -> None:
    """Refuse what BaseEnv would drop with a warning, and what the API or the trainer would reject.

    BaseEnv compares the number of sequences with ``group_overrides.group_size``, which is set to it if that is more
    than the trajectories.

    ``max_token_len``: the trainer's limit in tokens; 0 or less means no limit.

    Raises:
        RefusedGroup: see the module docstring.
    """
    size, expected = size_of(group), group["group_overrides"].get("group_size", config.group_size)
    longest = max(map(len, group["tokens"]))
    if size != expected:
        raise RefusedGroup(Reason.WRONG_SIZE, f"{size} trajectories, expected {expected}")
    if size < len(group["tokens"]):
        group["group_overrides"]["group_size"] = len(group["tokens"])
    if config.ensure_scores_are_not_same and len(set(group["scores"])) == 1:
        raise RefusedGroup(Reason.EQUAL_SCORES, f"all {size} scores are {group['scores'][0]}")
    if 0 < max_token_len <= longest:
        raise RefusedGroup(Reason.TOO_LONG, f"{longest} tokens, fewer than {max_token_len} are allowed")
    whole = ScoredGroup.from_mapping(group)
    for name in whole.irregular:
        for i, row in enumerate(whole.by_sequence(name)):
            if row is None or np.isnan(row).any():
                at = 0 if row is None else int(np.isnan(row).argmax())
                raise RefusedGroup(Reason.MALFORMED, f"{name}[{i}] has no number at position {at}")
