"""Validate the groups that environments make: plain values, rows of equal length, finite numbers.

``validated`` runs before anything else reads a group, ``check_limits`` last. What cannot be fixed is refused, by name:

- ``no_group``: the environment made no group, and gives no reason.
- ``empty_group``: no sequence, or one without tokens; ``no_trained_token``: no token of the group is trained on.
- ``unequal_lengths``: there are not as many scores or masks as tokens. The optional fields, such as logprobs and
  advantages, are checked last, since restoring the sampled tokens may have corrected them.
- ``nonfinite_scores``: a score that is missing, NaN or infinite.
- ``malformed``: not a group, a missing or non-finite number in another field, or a value that has no JSON form.
- ``wrong_size``, ``equal_scores``, ``too_long``: BaseEnv drops these with a warning.

NumPy and torch scalars and arrays, tuples and pydantic objects become plain values, at any depth.
"""

from typing import Any

import orjson
from atroposlib.envs.base import BaseEnvConfig

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import IGNORED

_OPTIONAL_ROWS = ("inference_logprobs", "advantages", "ref_logprobs")  # one value per token, if given
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def to_json(value: Any) -> bytes:
    """Return JSON of plain and numeric-library values, with NaN as null. Raise TypeError, naming any other type."""
    return orjson.dumps(value, default=_plain, option=_OPTIONS)


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
        plain = orjson.loads(to_json(group))
    except TypeError as error:
        raise RefusedGroup(Reason.MALFORMED, str(error)) from error
    tokens, scores = plain.get("tokens"), plain.get("scores")
    if not tokens or not isinstance(tokens, list) or not all(isinstance(row, list) and row for row in tokens):
        raise RefusedGroup(Reason.EMPTY_GROUP, f"{len(tokens or [])} sequences, some or all without tokens")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{len(tokens)} sequences, scores {str(group.get('scores'))[:100]}")
    if None in scores:
        raise RefusedGroup(Reason.NONFINITE_SCORES, f"scores {str(group['scores'])[:200]}")
    try:
        plain["scores"] = [float(score) for score in scores]
    except (TypeError, ValueError) as error:
        raise RefusedGroup(Reason.MALFORMED, f"scores {str(scores)[:100]}: {error}") from error
    _check("masks", plain.get("masks"), tokens)
    if all(mask == IGNORED for row in plain["masks"] for mask in row):
        raise RefusedGroup(Reason.NO_TRAINED_TOKEN, f"all masks of {len(tokens)} sequences are {IGNORED}")
    plain["group_overrides"] = plain.get("group_overrides") or {}
    return plain


def check_limits(group: dict[str, Any], config: BaseEnvConfig, max_token_len: int) -> None:
    """Refuse what BaseEnv would drop with a warning, and what the API or the trainer would reject.

    ``max_token_len``: the trainer's limit in tokens; 0 or less means no limit.

    Raises:
        RefusedGroup: see the module docstring.
    """
    size, expected = len(group["tokens"]), group["group_overrides"].get("group_size", config.group_size)
    longest = max(map(len, group["tokens"]))
    if size != expected:
        raise RefusedGroup(Reason.WRONG_SIZE, f"{size} sequences, expected {expected}")
    if config.ensure_scores_are_not_same and len(set(group["scores"])) == 1:
        raise RefusedGroup(Reason.EQUAL_SCORES, f"all {size} scores are {group['scores'][0]}")
    if 0 < max_token_len <= longest:
        raise RefusedGroup(Reason.TOO_LONG, f"{longest} tokens, fewer than {max_token_len} are allowed")
    for name in _OPTIONAL_ROWS:
        if group.get(name):
            _check(name, group[name], group["tokens"])


def _check(name: str, rows: Any, tokens: list[list[int]]) -> None:
    if not isinstance(rows, list) or len(rows) != len(tokens):
        found = len(rows) if isinstance(rows, list) else rows
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{len(tokens)} sequences, {name} {found}")
    for i, (row, ids) in enumerate(zip(rows, tokens, strict=True)):
        if not isinstance(row, list):
            raise RefusedGroup(
                Reason.MALFORMED, f"{name} of sequence {i} is {str(row)[:100]}: one value per token expected"
            )
        if len(row) != len(ids):
            raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"sequence {i}: {len(ids)} tokens, {len(row)} {name}")
        if None in row:
            raise RefusedGroup(Reason.MALFORMED, f"{name} of sequence {i} has no number at {row.index(None)}")
