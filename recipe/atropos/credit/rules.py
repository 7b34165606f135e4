"""Rules that give each decision of a group its advantage; NumPy alone, usable in any environment.

A *decision* is what is credited as one: a turn, or a part of it. The decisions of a group are a forest: each follows
another, or begins the episode; independent rollouts are chains, branches share the decisions before them. Guarantees:

- A decision is compared with others that the same policy took, never with what follows itself: an advantage is its
  return minus a mean over other decisions. So before it is scaled the estimate of the policy gradient is unbiased,
  also where the policy decides when to stop, if values are exact or gamma and lambda are 1, and nothing is shrunk.
  ``microscope`` measures it.
- At one decision for each rollout, and with chains, no values and no equal states at any number of them, the advantages
  are those of GRPO: (score - mean) / standard deviation (arXiv 2402.03300, section 4.1.2).
- The order of siblings changes nothing, and a branch follows its ancestors whatever the order of the others.

Shapes: D decisions, each after its parent.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

_EPSILON = 1e-6  # verl's, of the division by a deviation
_PRIOR = 4.0  # decisions; ``microscope`` prefers 4 to 0 and 1, and finds little beyond


@dataclass(frozen=True)
class Decisions:
    """The decisions of a group.

    ``parents``, (D,) int: the index of the decision before, less than the own; -1 at the beginning.
    ``outcomes``, (D,) float: the score where an episode ends, NaN elsewhere.
    ``values``, (D,) float: what the environment's check gives after each, in units of the outcome; None if it has none.
    ``states``: the state before each decision, equal where the histories are as good as the same; None if only what has
    the same parent is.
    """

    parents: np.ndarray
    outcomes: np.ndarray
    values: np.ndarray | None = None
    states: Sequence[Hashable] | None = None

    @property
    def ends(self) -> np.ndarray:
        """Whether an episode ends with a decision, (D,) bool."""
        return ~np.isnan(self.outcomes)


def returns(group: Decisions, gamma: float = 1.0, lam: float = 0.0, shrink: float = 0.0) -> np.ndarray:
    """Return what each decision brought, (D,) float: with values the sum over what follows of (gamma lam)^k times the
    progress of the k-th decision after it, gamma times the value after minus the value before; the mean over branches.

    The value after the last decision is the outcome, so with gamma = lam = 1 it is the outcome minus the value before:
    progress that the outcome does not confirm is taken back (generalized advantage estimation, arXiv 1506.02438, with
    the environment's check as value function).

    Without values it is V after the decision: the outcome at an episode's end, else the mean over the n leaves below,
    shrunk to V before the decision as by ``shrink`` more leaves of that worth, (n mean + shrink V) / (n + shrink); V of
    the beginning is the mean over all leaves. So few leaves tell less; above 0 it is biased (empirical Bayes).
    """
    count = len(group.parents)
    if group.values is None:
        values, decay, discount = np.zeros(count), 1.0, 1.0
    else:
        values, decay, discount = group.values, gamma * lam, gamma
    before = np.where(group.parents >= 0, values[group.parents], 0.0)
    found = np.where(group.ends, group.outcomes, discount * values) - before
    below, leaves = np.zeros(count), group.ends.astype(float)
    for i in range(count - 1, -1, -1):
        if not group.ends[i]:
            found[i] += decay * below[i] / leaves[i]
        if (parent := group.parents[i]) >= 0:
            below[parent] += leaves[i] * found[i]
            leaves[parent] += leaves[i]
    if shrink and group.values is None:
        start = group.outcomes[group.ends].mean()
        for i in np.flatnonzero(~group.ends):  # each after its parent
            above = found[parent] if (parent := group.parents[i]) >= 0 else start
            found[i] = (leaves[i] * found[i] + shrink * above) / (leaves[i] + shrink)
    return found


def centered(group: Decisions, found: np.ndarray) -> np.ndarray:
    """Return returns minus the mean of other decisions' returns, (D,), none of them before or after it.

    The others are at the same depth, as returns shrink with the decisions that are left. An episode that has ended is
    one of them at every greater depth: by 0 with values, since nothing is left to bring, else by its outcome. With
    values they are those in the same state, and, counted as ``_PRIOR`` decisions, all. Without values they are those in
    the same state, else the nearest relatives, under the closest ancestor that has any. What nothing can be compared
    with keeps its return.
    """
    depths, forks = _lineages(group)
    keys: list[list[Hashable]] = []  # of the decisions to compare each with, from those in the same state to all
    for i, (parent, depth) in enumerate(zip(group.parents.tolist(), depths, strict=True)):
        state = parent if group.states is None or parent < 0 else (group.states[i],)  # the beginnings are in one state
        keys.append([(depth, state), *((depth, fork) for fork in forks[i])])
    sums: defaultdict[Hashable, float] = defaultdict(float)
    counts: defaultdict[Hashable, int] = defaultdict(int)
    for own, value in zip(keys, found, strict=True):
        for key in dict.fromkeys(own):
            sums[key] += value
            counts[key] += 1
    deepest = max(depths)
    for i in np.flatnonzero(group.ends):
        for key in itertools.product(range(depths[i] + 1, deepest + 1), forks[i]):
            sums[key] += found[i] if group.values is None else 0.0
            counts[key] += 1
    others = np.zeros(len(found))
    for i, own in enumerate(keys):
        means = {key: (sums[key] - found[i]) / (counts[key] - 1) for key in own if counts[key] > 1}
        if group.values is None:
            others[i] = next(iter(means.values()), 0.0)
        elif means:
            alike = counts[own[0]] - 1
            others[i] = (alike * means.get(own[0], 0.0) + _PRIOR * means[own[-1]]) / (alike + _PRIOR)
    return found - others


def _lineages(group: Decisions) -> tuple[list[int], list[list[int]]]:
    """Return the depth of each decision, and the indices of those before it that branch, the closest first, up to -1:
    below the others there is nothing that is not below the next of these.
    """
    depths: list[int] = []
    forks: list[list[int]] = []
    for parent, alone in zip(group.parents.tolist(), _siblings(group) == 1, strict=True):
        above = forks[parent] if parent >= 0 else []
        forks.append(above if alone and parent >= 0 else [parent, *above])
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths, forks


def _siblings(group: Decisions) -> np.ndarray:
    """Return how many decisions follow the same one as each, itself included, (D,)."""
    return np.bincount(group.parents + 1)[group.parents + 1]


def weights(group: Decisions) -> np.ndarray:
    """Return the part of a rollout that each decision stands for, (D,): 1, shared equally where it branches.

    With it the decisions of branches count as often as the policy comes to them, as those of chains do.
    """
    branches, found = _siblings(group), np.ones(len(group.parents))
    for i, parent in enumerate(group.parents):
        if parent >= 0:
            found[i] = found[parent] / branches[i]
    return found


def scaled(group: Decisions, advantages: np.ndarray) -> np.ndarray:
    """Return advantages, (D,), as multiples of their root mean square, to which each of the N episodes contributes the
    mean of its decisions, times ((N - 1) / N)^(1/2); 0 where all are 0.

    So they are GRPO's, which divides by a deviation with N - 1, where each decision has its episode's.
    """
    squares, (depths, _) = np.zeros(len(advantages)), _lineages(group)  # sums along the way to each decision
    for i, parent in enumerate(group.parents):
        squares[i] = advantages[i] ** 2 + (squares[parent] if parent >= 0 else 0.0)
    episodes = group.ends.sum()
    root = np.sqrt((squares / depths)[group.ends].mean())
    factor = np.sqrt((episodes - 1) / episodes)
    return factor * advantages / (root + _EPSILON) if root > _EPSILON else np.zeros(len(advantages))


def outcome_advantages(group: Decisions) -> np.ndarray:
    """Return GRPO's advantages, (D,): of each decision the mean over the episodes that it is part of."""
    plain = Decisions(group.parents, group.outcomes)
    return scaled(plain, weights(plain) * centered(plain, returns(plain)))


def _normalized(values: np.ndarray, among: Sequence[Hashable]) -> np.ndarray:
    """Return (value - mean) / deviation over the decisions of the same key, (D,); 0 for the only one of a key."""
    found = np.zeros(len(values))
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, key in enumerate(among):
        members[key].append(i)
    for alike in members.values():
        if len(alike) > 1:
            own = values[alike]
            found[alike] = (own - own.mean()) / (own.std(ddof=1) + _EPSILON)
    return found


def _discounted(group: Decisions, gamma: float) -> np.ndarray:
    """Return the outcome times gamma for each decision that follows, (D,)."""
    return returns(Decisions(group.parents, group.outcomes, np.zeros(len(group.parents))), gamma, 1.0)


def gigpo(group: Decisions, gamma: float, weight: float) -> np.ndarray:
    """Return GiGPO's advantages (arXiv 2505.10978, F a deviation), (D,): GRPO's, and ``weight``, its omega, times the
    discounted outcome, normalized over all decisions in the same state."""
    return outcome_advantages(group) + weight * _normalized(_discounted(group, gamma), group.states or ())


def vineppo(group: Decisions, gamma: float, weight: float) -> np.ndarray:
    """Return VinePPO's advantages (arXiv 2410.01679), (D,): gamma V(after) - V(before), the outcome instead of V at the
    end. ``values`` are means of more answers from there; V of the prompt is the mean of the group's other answers."""
    first, plain = group.parents < 0, _discounted(group, gamma)
    others = (plain[first].sum() - plain) / max(1, first.sum() - 1)
    return returns(group, gamma) - first * others


def mt_grpo(group: Decisions, gamma: float, weight: float) -> np.ndarray:
    """Return MT-GRPO's advantages (arXiv 2505.11821, as in its authors' code), (D,): GRPO's, and ``weight`` times the
    turn's own reward, which ``values`` has here, None for 0, normalized over the group's turns of its number."""
    turns, _ = _lineages(group)
    rewards = np.zeros(len(turns)) if group.values is None else group.values
    return outcome_advantages(group) + weight * _normalized(rewards, turns)


PAPERS = {"gigpo": gigpo, "vineppo": vineppo, "mt_grpo": mt_grpo}  # of independent rollouts


def advantages(
    group: Decisions,
    gamma: float = 1.0,
    lam: float = 0.0,
    mix: float = 0.0,
    shrink: float = 0.0,
    method: str = "progress",
    weight: float = 1.0,
) -> np.ndarray:
    """Return the advantages of a group's decisions, (D,), those of ``PAPERS`` for a ``method`` of these; ``mix`` is the
    share of outcome GRPO in them."""
    if method in PAPERS:
        credit = PAPERS[method](group, gamma, weight)
    else:
        credit = scaled(group, weights(group) * centered(group, returns(group, gamma, lam, shrink)))
    return (1 - mix) * credit + mix * outcome_advantages(group) if mix else credit
