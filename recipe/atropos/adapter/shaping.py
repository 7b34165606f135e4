"""The reward bridge in front of an environment: ``utils.reward_bridge`` says what it does, here it is done.

    adapt(MyEnv, bridge)      # or env_adapter serve --reward-bridge FILE.yaml

``Shaped`` acts in ``handle_send_to_api``, and so on what goes to the Trajectory API alone. It stands right after
``Checked``, which observes the raw scores: what is behind it, BaseEnv's check for equal scores too, sees the shaped.
"""

import asyncio
import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from numbers import Real
from typing import Any

import numpy as np
from atroposlib.envs import base

from recipe.atropos.adapter.completion_cache import trained_spans
from recipe.atropos.adapter.reward_bridge import KEY, RewardBridge, RewardBridgeError
from recipe.atropos.errors import EnvironmentFailure

_GROUPS: ContextVar[list["_RecordedGroup"] | None] = ContextVar("groups", default=None)  # of the item in hand
_ORIGINAL = base.ScoredDataGroup


class _RecordedGroup(dict):
    """What environments then find under the name ``ScoredDataGroup``: the same dict, and the item's worker knows of it.

    Most of Atropos' environments fill one, see that all scores are equal, and return None. There is no hook between.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if (groups := _GROUPS.get()) is not None:
            groups.append(self)


def _record_groups() -> None:
    """In every module that has imported the name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("ScoredDataGroup") is _ORIGINAL:
            module.ScoredDataGroup = _RecordedGroup


@contextlib.contextmanager
def _recorded() -> Iterator[list[_RecordedGroup]]:
    groups: list[_RecordedGroup] = []
    token = _GROUPS.set(groups)
    try:
        yield groups
    finally:
        _GROUPS.reset(token)


def _sizes(group: Mapping[str, Any]) -> dict[str, int]:
    values = {key: group.get(key) for key in ("tokens", "masks", "scores")}
    return {key: 0 if value is None else len(value) for key, value in values.items()}


class Shaped:
    """Goes before ``BaseEnv`` and the other mixins; see the module.

    It needs ``Reporting`` behind it, and says there: the means ``score/raw``, ``score/shaped``, ``shaping/TERM`` and
    ``shaping/weight``; the counts ``shaping/equal_raw`` (groups in which only the shaping decides),
    ``shaping/recovered`` (those of them that the environment had dropped) and ``shaping/rank_inversions``.
    """

    reward_bridge: RewardBridge

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._shaping_failure: Exception | None = None
        check_literals(self.reward_bridge, self.tokenizer)
        if self.reward_bridge.send_equal_raw:
            _record_groups()

    async def get_status(self) -> None:
        """Raises what shaping failed with: BaseEnv would log it and go on."""
        if self._shaping_failure is not None:
            raise EnvironmentFailure(str(self._shaping_failure)) from self._shaping_failure
        await super().get_status()

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """The environment's own; a whole group of equal scores that it made and dropped comes back."""
        with _recorded() as made:
            groups, backlog = await super().collect_trajectories(item)
        size = self.config.group_size
        dropped = [g for g in made if set(_sizes(g).values()) == {size} and len(set(g["scores"])) == 1]
        if dropped and not (any(groups) if isinstance(groups, list) else groups):
            self.report.count("shaping/recovered")
            groups = dropped[-1]
        return groups, backlog

    async def handle_send_to_api(self, scored_data: Any, *args: Any, **kwargs: Any) -> None:
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        try:
            shaped = [await self._shape(group) for group in groups if group is not None]
        except Exception as error:
            self._shaping_failure = error
            raise
        kept = [group for group in shaped if group is not None]
        if kept:
            await super().handle_send_to_api(kept if isinstance(scored_data, list) else kept[0], *args, **kwargs)

    async def _shape(self, group: Mapping[str, Any]) -> dict[str, Any] | None:
        """A copy with shaped scores; None where the group is not sent."""
        check_no_advantages(group, self.report.name)
        sizes = _sizes(group)
        if len(set(sizes.values())) > 1 or not sizes["tokens"]:
            return self.report.refuse("malformed", f"lengths {sizes}")
        if not all(isinstance(score, Real) and math.isfinite(score) for score in group["scores"]):
            return self.report.refuse("nonfinite_score", f"scores {group['scores']}")
        raw = [float(score) for score in group["scores"]]
        equal, bridge, step = len(set(raw)) == 1, self.reward_bridge, self.curr_step
        if equal and self.config.ensure_scores_are_not_same and not bridge.send_equal_raw:
            return self.report.refuse("equal_scores", f"all {raw[0]:g}, and {KEY}.send_equal_raw is false")
        texts = judged(self.tokenizer, group)
        try:
            terms = await asyncio.to_thread(lambda: [bridge.terms(*each) for each in texts])
        except TimeoutError as error:
            return self.report.refuse("marker_timeout", str(error))
        scores = [bridge.shaped(score, each, step) for score, each in zip(raw, terms, strict=True)]
        self._tell(raw, scores, terms, bridge.weight(step), equal)
        overrides = {**(group.get("group_overrides") or {}), "raw_scores": raw}
        return {**group, "scores": scores, "group_overrides": overrides}

    def _tell(
        self, raw: list[float], scores: list[float], terms: list[dict[str, float]], weight: float, equal: bool
    ) -> None:
        for name, values in (("score/raw", raw), ("score/shaped", scores), ("shaping/weight", [weight])):
            for value in values:
                self.report.observe(name, value)
        for each in terms:
            for name, value in each.items():
                self.report.observe(f"shaping/{name}", value)
        if equal:
            self.report.count("shaping/equal_raw")
        pairs = list(zip(raw, scores, strict=True))
        if any(less < more and now >= then for less, now in pairs for more, then in pairs):
            self.report.count("shaping/rank_inversions")


def check_literals(bridge: RewardBridge, tokenizer: Any) -> None:
    """Raises RewardBridgeError for a literal pattern that can match nothing, because it holds a special token."""
    for pattern in bridge.literals():
        if special := [token for token in tokenizer.all_special_tokens if token in pattern]:
            raise RewardBridgeError(
                f"{KEY}: pattern {pattern!r} can never match: {special[0]!r} is a special token of "
                f"{tokenizer.name_or_path}, and the judged text is without them"
            )


def check_no_advantages(group: Mapping[str, Any], name: str) -> None:
    """Raises RewardBridgeError where the group of environment ``name`` has advantages for its tokens."""
    if any(values is not None and np.size(values) for values in group.get("advantages") or ()):
        raise RewardBridgeError(
            f"environment {name} sends advantages of its own for each token, which are trained on "
            f"instead of scores, so {KEY} has no effect there; leave it out"
        )


def judged(tokenizer: Any, group: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(text, length in tokens) of what the policy wrote in each sequence of a group; see ``utils.reward_bridge``."""

    def of_sequence(tokens: Sequence[int], masks: Sequence[int]) -> tuple[str, int]:
        turns = [list(tokens[start:end]) for start, end in trained_spans(masks)]
        texts = [tokenizer.decode(turn, skip_special_tokens=True, clean_up_tokenization_spaces=False) for turn in turns]
        return "\n".join(texts), sum(map(len, turns))

    return [of_sequence(*sequence) for sequence in zip(group["tokens"], group["masks"], strict=True)]


def shaped_by(bridge: RewardBridge) -> type[Shaped]:
    return type("Shaped", (Shaped,), {"reward_bridge": bridge})
