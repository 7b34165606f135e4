"""Apply the reward bridge to groups before they are sent; ``algorithm.reward_bridge`` defines what it does.

It runs right after validation, where raw scores are observed; BaseEnv's check for equal scores sees the shaped scores.
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from atroposlib.envs import base

from recipe.atropos.algorithm.reward_bridge import KEY, RewardBridge, RewardBridgeError
from recipe.atropos.credit.group import has_advantages
from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.data.scored_group import trajectory_numbers
from recipe.atropos.run.reporting import EnvReport

_GROUPS: ContextVar[list[dict[str, Any]] | None] = ContextVar("groups", default=None)  # of the current item
_ORIGINAL = base.ScoredDataGroup


class _RecordedGroup(dict):
    """Drop-in replacement for ``ScoredDataGroup``: the same dict, which the current item's worker keeps track of.

    Most of Atropos' environments fill one, see that all scores are equal, and return None. There is no hook in between.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.by_base = sys._getframe(1).f_globals is vars(base)  # not by the environment itself
        if (groups := _GROUPS.get()) is not None:
            groups.append(self)


def record_groups() -> None:
    """Replace ``ScoredDataGroup`` in every module that has imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("ScoredDataGroup") is _ORIGINAL:
            module.ScoredDataGroup = _RecordedGroup


@contextlib.contextmanager
def recorded() -> Iterator[list[dict[str, Any]]]:
    """Collect the groups that are made in this context, after ``record_groups``; may be nested."""
    groups: list[dict[str, Any]] = []
    outer, token = _GROUPS.get(), _GROUPS.set(groups)
    try:
        yield groups
    finally:
        _GROUPS.reset(token)
        if outer is not None:
            outer += groups


def dropped_by_environment(made: list[dict[str, Any]], size: int) -> dict[str, Any] | None:
    """Return the last complete group of equal scores in ``made``, or None; only for an environment that returned no
    group.
    """
    for group in reversed(made):
        parts = [group.get(key) for key in ("tokens", "masks", "scores")]
        if all(part is not None and len(part) == size for part in parts) and len(set(group["scores"])) == 1:
            return group
    return None


async def shape(
    bridge: RewardBridge, group: dict[str, Any], tokenizer: Any, step: int, drop_equal: bool, report: EnvReport
) -> None:
    """Shape the scores of a validated group in place; the raw scores are kept in ``group_overrides``. If they are
    equal, the bridge has ``send_equal_raw: false`` and ``drop_equal`` is false, they stay.

    Reports the means ``score/raw``, ``score/shaped``, ``shaping/TERM`` and ``shaping/weight``, and the counts
    ``shaping/equal_raw`` (groups in which only the shaping makes a difference) and ``shaping/rank_inversions``.

    Raises:
        RefusedGroup: the raw scores are equal and ``drop_equal`` drops such groups, or a pattern takes too long.
        RewardBridgeError: the environment sends its own advantages.
    """
    check_no_advantages(group, report.name)
    raw = group["scores"]
    equal = len(set(raw)) == 1
    group["group_overrides"] |= {"raw_scores": raw}
    if equal and not bridge.send_equal_raw:
        if drop_equal:
            raise RefusedGroup(Reason.EQUAL_SCORES, f"all {raw[0]:g}, and {KEY}.send_equal_raw is false")
        return  # unshaped: equal scores give no gradient
    texts = judged(tokenizer, group)
    try:
        terms = await asyncio.to_thread(lambda: [bridge.terms(*each) for each in texts])
    except TimeoutError as error:
        raise RefusedGroup(Reason.MARKER_TIMEOUT, str(error)) from error
    scores = [bridge.shaped(score, each, step) for score, each in zip(raw, terms, strict=True)]
    observed = {
        "score/raw": raw,
        "score/shaped": scores,
        "shaping/weight": [bridge.weight(step)],
        **{f"shaping/{name}": [each[name] for each in terms] for name in terms[0]},
    }
    for name, values in observed.items():
        report.observe(name, *values)
    if equal:
        report.count("shaping/equal_raw")
    pairs = list(zip(raw, scores, strict=True))
    if any(less < more and now >= then for less, now in pairs for more, then in pairs):
        report.count("shaping/rank_inversions")
    group["scores"] = scores


def check_literals(bridge: RewardBridge, tokenizer: Any) -> None:
    """Raise RewardBridgeError for a literal pattern that can never match because it contains a special token."""
    parts = [*bridge.format_markers, *filter(None, [bridge.answer_present])]
    for pattern in [part.pattern for part in parts if not part.regex]:
        if special := [token for token in tokenizer.all_special_tokens if token in pattern]:
            raise RewardBridgeError(
                f"{KEY}: pattern {pattern!r} can never match: {special[0]!r} is a special token of "
                f"{tokenizer.name_or_path}, and the judged text is without them"
            )


def check_no_advantages(group: Mapping[str, Any], name: str) -> None:
    """Raise RewardBridgeError if the group of environment ``name`` has per-token advantages."""
    if has_advantages(group):
        raise RewardBridgeError(
            f"environment {name} sends advantages of its own for each token, which are trained on "
            f"instead of scores, so {KEY} has no effect there; leave it out"
        )


def judged(tokenizer: Any, group: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return (text, length in tokens) of what the policy wrote in the trajectory of each sequence of a group; see
    ``reward_bridge``.
    """
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    numbers = trajectory_numbers(group.get("group_overrides") or {}, len(group["tokens"]))
    turns: dict[int, list[list[int]]] = {number: [] for number in numbers}
    for number, tokens, masks in zip(numbers, group["tokens"], group["masks"], strict=True):
        turns[number] += [list(tokens[start:end]) for start, end in trained_spans(masks)]
    found = {
        number: ("\n".join(tokenizer.decode(turn, **plain) for turn in each), sum(map(len, each)))
        for number, each in turns.items()
    }
    return [found[number] for number in numbers]
