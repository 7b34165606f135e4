"""What a rule of credit will save, on a task small enough to enumerate: ``python -m recipe.atropos credit``.

An episode is right if its policy takes ``steps`` right decisions and then stops; ``slack`` wrong ones are forgiven.
Each step needs one of ``skills`` skills, which the episode's item names, so that what is learned in one place is used
in others, as by the turns of a language model. The policy is a softmax over three logits (right, wrong, stop) for each
skill, and for the end. So its success and the gradient of it are known exactly, and for each rule the table says

- angle: degrees between the mean of its estimates and the gradient, which is its bias;
- variance: of the estimate by one group, the trace of the covariance over the square of the signal;
- samples: the decisions that an estimate of equal signal to noise needs, as a ratio to outcome GRPO's;
- to 80%: the sampled decisions until the success is 0.8, as a ratio to outcome GRPO's, trained with Adam on one group
  for each update, each rule with the best of three learning rates; "-" if none gets there.

All decisions that are sampled count, those of branches and continuations too. With ``--run NAME`` the command measures
the gradient of a recorded step instead (``--run NAME --help``).
"""

import argparse
import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from recipe.atropos.credit.rules import Decisions, advantages, outcome_advantages

RIGHT, _WRONG, STOP = range(3)
RATES, UPDATES, HELD_OUT, EVERY = (0.03, 0.1, 0.3), 1000, 24, 4
SHRINK = 2.0
_OPTIONS: dict[str, tuple[Any, float, float, str]] = {  # default, the least and the most
    "steps": ([1, 4, 8], 1, 100, "right decisions that an episode needs"),
    "slack": ([1.0], 0, 100, "wrong decisions forgiven for each step"),
    "solved": (0.1, 0.001, 0.79, "success rate of the first policy"),
    "skills": (8, 1, 1000, "number of skills"),
    "group-size": (8, 2, 1000, "episodes of a group"),
    "groups": (300, 2, 10**6, "groups sampled for each rule's gradient"),
    "seeds": (3, 1, 1000, "training runs for each rule and learning rate"),
}
Advantages = Callable[[Decisions], np.ndarray]
State = tuple[int, int]  # right steps and wrong ones so far


@dataclass(frozen=True)
class Item:
    """An episode's task: the skill of each step, of ``skills`` in all, and how many wrong decisions are forgiven."""

    needs: tuple[int, ...]
    skills: int
    slack: int

    def row(self, state: State) -> int:
        """Return the row of the policy's logits, (skills + 1, 3), that decides in a state."""
        return self.needs[state[0]] if state[0] < len(self.needs) else self.skills

    @property
    def longest(self) -> int:
        """The most decisions of an episode."""
        return len(self.needs) + self.slack + 1

    def after(self, state: State, action: int) -> tuple[State, float | None]:
        """Return the state after an action, and the outcome if the episode ends."""
        right, wrong = state
        if action == STOP:
            return state, float(right == len(self.needs) and wrong <= self.slack)
        good = action == RIGHT and right < len(self.needs)
        state = (right + good, wrong + (not good))
        return state, 0.0 if sum(state) > len(self.needs) + self.slack else None

    def value(self, state: State) -> float:
        """The environment's check of what was reached: the part of the right decisions that were taken."""
        return state[0] / (len(self.needs) + 1)

    def chances(self, policy: np.ndarray) -> tuple[float, dict[State, list[float]]]:
        """Return the probability of a right episode, and after each action in each state, those that follow first."""
        rows, found = policy.tolist(), dict[State, list[float]]()

        def below(state: State) -> float:
            if state not in found:
                ends = (self.after(state, action) for action in range(3))
                found[state] = [below(follows) if outcome is None else outcome for follows, outcome in ends]
            return sum(map(mul, rows[self.row(state)], found[state]))

        return below((0, 0)), found

    def success(self, policy: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the probability of a right episode, and its gradient with respect to the logits, (skills + 1, 3)."""
        success, chances = self.chances(policy)
        reached, gradient = defaultdict[State, float](float, {(0, 0): 1.0}), np.zeros_like(policy)
        for state, values in reversed(chances.items()):
            row, chance = self.row(state), reached[state]
            gradient[row] += chance * policy[row] * (values - policy[row] @ values)
            for action in (RIGHT, _WRONG):
                reached[self.after(state, action)[0]] += chance * policy[row, action]
        return success, gradient


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def first_logits(item: Item, success: float) -> np.ndarray:
    """Return logits with this success, as good at each skill as at the end."""
    best = np.eye(3)[[RIGHT] * item.skills + [STOP]]
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if item.chances(softmax(middle * best))[0] < success else (low, middle)
    return high * best


@dataclass(frozen=True)
class Sample:
    """A group's decisions, with the policy's row and the action of each, (D,) int.

    ``more``: the decisions of continuations, which tell values alone.
    """

    group: Decisions
    rows: np.ndarray
    actions: np.ndarray
    more: int = 0

    @property
    def sampled(self) -> int:
        return len(self.actions) + self.more

    def gradient(self, policy: np.ndarray, advantages: np.ndarray) -> np.ndarray:
        """Return the estimate of the policy gradient, the mean over episodes, (skills + 1, 3)."""
        found = np.zeros_like(policy)
        np.add.at(found, (self.rows, self.actions), advantages)
        np.add.at(found, self.rows, -advantages[:, None] * policy[self.rows])
        return found / self.group.ends.sum()


def rollout(
    item: Item, policy: np.ndarray, rng: np.random.Generator, state: State
) -> Iterator[tuple[float, State, State, int]]:
    """Yield the decisions from a state to the episode's end: outcome (NaN before), state before and after, action."""
    steps, outcome = np.cumsum(policy, -1).tolist(), None
    while outcome is None:
        action = min(STOP, bisect_left(steps[item.row(state)], rng.random()))
        before, (state, outcome) = state, item.after(state, action)
        yield math.nan if outcome is None else outcome, before, state, action


def sample(
    item: Item,
    policy: np.ndarray,
    rng: np.random.Generator,
    episodes: int,
    begun: int | None = None,
    continued: int = 0,
) -> Sample:
    """Sample ``episodes``, ``begun`` of them (None: all) from the start.

    Each other one goes on after a decision of one of these, which are drawn before it is known how long that one is.
    Where it has ended by then, the other begins at the start too. Values are the environment's; with ``continued`` the
    mean outcome of so many continuations after each decision, of which nothing is learned.
    """
    taken: list[tuple[int, float, State, State, int]] = []  # parent, and what ``rollout`` yields

    def episode(parent: int) -> list[int]:
        own = []
        for decision in rollout(item, policy, rng, taken[parent][3] if parent >= 0 else (0, 0)):
            taken.append((parent, *decision))
            own.append(parent := len(taken) - 1)
        return own

    roots = [episode(-1) for _ in range(episodes if begun is None else begun)]
    for _ in range(episodes - len(roots)):
        root, turn = roots[rng.integers(len(roots))], int(rng.integers(item.longest - 1))
        episode(root[turn] if turn < len(root) - 1 else -1)
    parents, outcomes, states, after, actions = zip(*taken, strict=True)
    values, more = np.array([item.value(state) for state in after]), 0
    for i in np.flatnonzero(np.isnan(outcomes)) if continued else ():
        ends = [list(rollout(item, policy, rng, after[i])) for _ in range(continued)]
        values[i] = np.mean([end[-1][0] for end in ends])
        more += sum(map(len, ends))
    group = Decisions(np.array(parents), np.array(outcomes), values, states)
    return Sample(group, np.array([item.row(state) for state in states]), np.array(actions), more)


@dataclass(frozen=True)
class Rule:
    """A rule to compare: the advantages of a group, which part of its episodes begins at the start, and how many
    continuations after each decision tell its value.
    """

    advantages: Advantages
    begun: float = 1.0
    continued: int = 0


def _outcomes(rule: Advantages) -> Advantages:
    """Without the environment's values."""
    return lambda group: rule(replace(group, values=None))


RULES = {
    "outcome GRPO": Rule(outcome_advantages),
    "same state": Rule(_outcomes(advantages)),
    "progress, lam 0": Rule(partial(advantages, lam=0.0)),
    "progress, lam 0.5": Rule(partial(advantages, lam=0.5)),
    "progress, lam 1": Rule(partial(advantages, lam=1.0)),
    "progress, mix 0.5": Rule(partial(advantages, lam=0.5, mix=0.5)),
    "turn tree": Rule(_outcomes(advantages), 0.5),
    "turn tree, shrunk": Rule(_outcomes(partial(advantages, shrink=SHRINK)), 0.5),
    "turn tree, progress": Rule(partial(advantages, lam=0.5), 0.5),
    "VinePPO": Rule(partial(advantages, lam=0.0), continued=4),  # arXiv 2410.01679, with this kit's baseline
}


@dataclass(frozen=True)
class Microscope:
    """The comparison of rules on items, from the first policy's logits on."""

    items: Sequence[Item]
    logits: np.ndarray
    group_size: int

    def draw(self, rule: Rule, policy: np.ndarray, rng: np.random.Generator) -> tuple[Sample, np.ndarray]:
        item = self.items[rng.integers(len(self.items))]
        found = sample(item, policy, rng, self.group_size, int(self.group_size * rule.begun), rule.continued)
        return found, found.gradient(policy, rule.advantages(found.group))

    def estimate(self, rule: Rule, groups: int) -> tuple[float, float, float]:
        """Return the angle in degrees between mean and gradient, and noise over signal: of one group, of one decision.

        Signal is the square of the mean's length along the gradient, noise the trace of the estimates' covariance.
        """
        rng, policy = np.random.default_rng(0), softmax(self.logits)
        exact = np.mean([item.success(policy)[1] for item in self.items], 0).ravel()
        found = [self.draw(rule, policy, rng) for _ in range(groups)]
        gradients = np.array([gradient.ravel() for _, gradient in found])
        mean, variance = gradients.mean(0), gradients.var(0).sum()
        along = mean @ exact / np.linalg.norm(exact)
        length = math.sqrt(max(mean @ mean - variance / groups, along**2))
        sampled = sum(one.sampled for one, _ in found) / groups
        noise = variance / along**2
        return math.degrees(math.acos(along / length)), noise, sampled * noise

    def train(self, rule: Rule, rate: float, seed: int) -> float:
        """Return the decisions that are sampled until the success is 0.8, infinity if it is not reached."""
        rng, logits = np.random.default_rng(seed), self.logits.copy()
        first, second, sampled = np.zeros_like(logits), np.zeros_like(logits), 0
        for update in range(1, UPDATES + 1):
            policy = softmax(logits)
            if update % EVERY == 1 and np.mean([item.chances(policy)[0] for item in self.items[:HELD_OUT]]) >= 0.8:
                return sampled
            found, gradient = self.draw(rule, policy, rng)
            sampled += found.sampled
            first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
            logits += rate * first / (1 - 0.9**update) / (np.sqrt(second / (1 - 0.99**update)) + 1e-8)
        return math.inf

    def decisions_to_80(self, rule: Rule, seeds: int) -> float:
        """Return the decisions of the best learning rate, the mean over seeds."""
        return min(sum(self.train(rule, rate, seed) for seed in range(seeds)) / seeds for rate in RATES)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m recipe.atropos credit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, *_, about) in _OPTIONS.items():
        kind, several = type(np.min(default).item()), "+" if isinstance(default, list) else None
        about = f"{about}; default: {str(default).strip('[]').replace(',', '')}"
        parser.add_argument(f"--{name}", type=kind, nargs=several, default=default, help=about)
    parser.add_argument("--plot", type=Path, help="draw the column samples into this .png or .svg file")
    options = parser.parse_args(argv)
    for name, (_, low, high, _) in _OPTIONS.items():
        if not low <= np.min(given := vars(options)[name.replace("-", "_")]) <= np.max(given) <= high:
            parser.error(f"--{name}: give {low:g} to {high:g}")
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        parser.error(f"--plot={options.plot}: give a .png or .svg file")
    samples: dict[tuple[float, str], list[float]] = {}
    for slack, steps in itertools.product(options.slack, options.steps):
        rng, forgiven = np.random.default_rng(0), round(slack * steps)
        needs = [tuple(rng.integers(options.skills, size=steps).tolist()) for _ in range(100)]
        items = [Item(one, options.skills, forgiven) for one in needs]
        scope = Microscope(items, first_logits(items[0], options.solved), options.group_size)
        print(f"\n{steps} steps, {forgiven} wrong ones forgiven, {options.solved:.0%} solved at first\n")
        print(f"{'rule':<22}{'angle':>7}{'variance':>10}{'samples':>9}{'to 80%':>9}", flush=True)
        reference: tuple[float, float] | None = None
        for name, rule in RULES.items():
            angle, variance, noise = scope.estimate(rule, options.groups)
            needed = scope.decisions_to_80(rule, options.seeds)
            reference = reference or (noise, needed)
            ratio = f"{needed / reference[1]:>9.2f}" if math.isfinite(needed) else f"{'-':>9}"
            samples.setdefault((slack, name), []).append(noise / reference[0])
            print(f"{name:<22}{angle:>7.1f}{variance:>10.1f}{noise / reference[0]:>9.2f}{ratio}", flush=True)
    if options.plot:
        draw(samples, options.steps, options.plot)
    return 0


def draw(samples: dict[tuple[float, str], list[float]], steps: Sequence[int], path: Path) -> None:
    """Draw the samples over the number of steps, a panel for each slack, a line for each rule."""
    from matplotlib.figure import Figure  # imported here: it takes a second

    slacks = sorted({slack for slack, _ in samples}, reverse=True)
    figure = Figure((5 * len(slacks), 3.5), layout="constrained")
    panels = figure.subplots(1, len(slacks), sharey=True, squeeze=False)[0]
    for panel, slack in zip(panels, slacks, strict=True):
        panel.set(title=f"{slack:g} errors forgiven a step", xlabel="steps", xticks=steps, yscale="log")
        for name in RULES:
            panel.plot(steps, samples[slack, name], marker="o", label=name)
    panels[0].set(ylabel="samples, outcome GRPO = 1", yticks=[0.25, 0.5, 1, 2, 4, 8, 16])
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].minorticks_off()
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path)
