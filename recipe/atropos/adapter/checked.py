"""Groups as environments make them, and as they must be: plain values, rows of one length, finite numbers.

``Checked`` goes before everything that reads a group. What cannot be fixed is refused and counted, by name:

- ``no_group``: the environment made none; it keeps its reasons to itself.
- ``no_tokens``: no sequence, or one without tokens; ``nothing_trained``: no token of the group is trained on.
- ``unequal_lengths``: scores or masks that are not as many as the tokens; of what is optional, logprobs and advantages,
  that is asked last, in ``check_rows``: what stands between may have set it right.
- ``nan_score``: a score that is missing, NaN or infinite.
- ``bad_value``: not a group, a number that is none elsewhere, or something that JSON has no form for.

numpy's and torch's scalars and arrays, tuples and pydantic objects, wherever they stand, become plain values.
"""

import logging
from typing import Any

import orjson

from recipe.atropos.errors import AtroposError

logger = logging.getLogger(__name__)

_IGNORED = -100
_OPTIONAL_ROWS = ("inference_logprobs", "advantages", "ref_logprobs")  # one value a token, where they are there
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class Refused(AtroposError, ValueError):
    """A group that cannot be sent: ``reason``, as it is counted, and what is wrong."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


def to_json(value: Any) -> bytes:
    """JSON of plain values and of the numeric libraries'; NaN becomes null. Raises TypeError, naming the type."""
    return orjson.dumps(value, default=_plain, option=_OPTIONS)


def _plain(value: Any) -> Any:
    for method in ("tolist", "model_dump"):  # numpy arrays that orjson does not know, torch; pydantic
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError  # orjson says which type


def checked(group: Any) -> dict[str, Any]:
    """A copy of the group, of plain values only.

    Raises:
        Refused: see the module.
    """
    if not isinstance(group, dict):
        raise Refused("bad_value", f"a group is a dict, not {type(group).__name__}: {str(group)[:100]}")
    try:
        plain = orjson.loads(to_json(group))
    except TypeError as error:
        raise Refused("bad_value", str(error)) from error
    tokens, scores = plain.get("tokens"), plain.get("scores")
    if not tokens or not isinstance(tokens, list) or not all(isinstance(row, list) and row for row in tokens):
        raise Refused("no_tokens", f"{len(tokens or [])} sequences, some or all without tokens")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise Refused("unequal_lengths", f"{len(tokens)} sequences, scores {str(group.get('scores'))[:100]}")
    if None in scores:
        raise Refused("nan_score", f"scores {str(group['scores'])[:200]}")
    try:
        plain["scores"] = [float(score) for score in scores]
    except (TypeError, ValueError) as error:
        raise Refused("bad_value", f"scores {str(scores)[:100]}: {error}") from error
    _check("masks", plain.get("masks"), tokens)
    if all(mask == _IGNORED for row in plain["masks"] for mask in row):
        raise Refused("nothing_trained", f"all masks of {len(tokens)} sequences are {_IGNORED}")
    return plain


def check_rows(group: dict[str, Any]) -> None:
    """Raises Refused where an optional row is there and has not one number a token."""
    for name in _OPTIONAL_ROWS:
        if group.get(name):
            _check(name, group[name], group["tokens"])


def _check(name: str, rows: Any, tokens: list[list[int]]) -> None:
    if not isinstance(rows, list) or len(rows) != len(tokens):
        found = len(rows) if isinstance(rows, list) else rows
        raise Refused("unequal_lengths", f"{len(tokens)} sequences, {name} {found}")
    for i, (row, ids) in enumerate(zip(rows, tokens, strict=True)):
        if not isinstance(row, list):
            raise Refused("bad_value", f"{name} of sequence {i} is {str(row)[:100]}: one value a token")
        if len(row) != len(ids):
            raise Refused("unequal_lengths", f"sequence {i}: {len(ids)} tokens, {len(row)} {name}")
        if None in row:
            raise Refused("bad_value", f"{name} of sequence {i} has no number at {row.index(None)}")


class Checked:
    """Goes before ``BaseEnv`` and after ``Reporting``; see the module."""

    async def get_next_item(self) -> Any:
        item = await super().get_next_item()
        if item is None:  # BaseEnv asks again, for ever, and says nothing
            if not self.report.counts["no_item"]:
                logger.error("%s: get_next_item() has no more items; nothing new begins", self.report.name)
            self.report.count("no_item")
        return item

    async def handle_send_to_api(self, scored_data: Any, *args: Any, **kwargs: Any) -> Any:
        several = isinstance(scored_data, list)
        kept = []
        for group in scored_data if several else [scored_data]:
            try:
                if group is None:
                    raise Refused("no_group", "one of the groups of an item is None")
                group = checked(group)
            except Refused as refused:
                self.report.refuse(refused.reason, str(refused))
                continue
            for score in group["scores"]:
                self.report.observe("score", score)
            kept.append(group)
        if kept:
            return await super().handle_send_to_api(kept if several else kept[0], *args, **kwargs)
