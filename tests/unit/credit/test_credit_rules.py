"""The rules of credit: hand-computed cases, what they promise in general, and what they estimate."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.atropos.credit.microscope import (
    RULES,
    STOP,
    Item,
    Microscope,
    Rule,
    Sample,
    draw,
    first_logits,
    main,
    sample,
    softmax,
)
from recipe.atropos.credit.rules import Decisions, advantages, centered, outcome_advantages, returns, scaled, weights

NAN = math.nan


def chains(outcomes, lengths, values=None):
    """Rollouts from one prompt: ``values`` after each decision, the last of a rollout left out."""
    parents, ends, after = [], [], []
    for i, (outcome, length) in enumerate(zip(outcomes, lengths, strict=True)):
        for k in range(length):
            parents.append(len(parents) - 1 if k else -1)
            ends.append(outcome if k == length - 1 else NAN)
            after.append(values[i][k] if values is not None and k < length - 1 else 0.0)
    return Decisions(np.array(parents), np.array(ends), None if values is None else np.array(after))


def grpo(outcomes):
    outcomes = np.array(outcomes)
    return (outcomes - outcomes.mean()) / (outcomes.std(ddof=1) + 1e-6)


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 0.0, [0.5, 0.25, 0.25, 0.0, 0.0]),
        (1.0, 0.5, [0.5 + 0.25 * 0.5 + 0.25 * 0.25, 0.25 + 0.25 * 0.5, 0.25, 0.0, 0.0]),
        (1.0, 1.0, [1.0, 0.5, 0.25, 0.0, 0.0]),
        (0.5, 0.0, [0.25, 0.375 - 0.5, 1 - 0.75, 0.0, 0.0]),
    ],
)
def test_credit_returns_by_hand(gamma, lam, expected):
    group = chains([1.0, 0.0], [3, 2], [[0.5, 0.75], [0.0]])
    assert returns(group, gamma, lam) == pytest.approx(expected)


def test_credit_compares_with_the_nearest_relatives_by_hand():
    """A root with two decisions; the first goes on in two ways, the second in one."""
    #        0       1       2       3       4
    tree = Decisions(np.array([-1, 0, 0, -1, 3]), np.array([NAN, 1.0, 0.0, NAN, 0.0]))
    found = returns(tree)
    assert found == pytest.approx([0.5, 1.0, 0.0, 0.0, 0.0])  # of a decision that goes on: the mean below
    # 0 against 3; 1 and 2 against each other; 3 against 0; 4 has no sibling: against 1 and 2, its cousins
    assert centered(tree, found) == pytest.approx([0.5, 1.0, -1.0, -0.5, -0.5])


def test_credit_shrinks_a_turn_trees_values_by_hand():
    """V of the start is 0.5, over four leaves; below it two leaves count beside two more, or one beside two."""
    #        0      (1,  2)        3    (4)   5
    tree = Decisions(np.array([-1, 0, 0, -1, 3, -1]), np.array([NAN, 1.0, 1.0, NAN, 0.0, 0.0]))
    found = returns(tree, shrink=2.0)
    assert found == pytest.approx([(2 * 1.0 + 2 * 0.5) / 4, 1.0, 1.0, (0.0 + 2 * 0.5) / 3, 0.0, 0.0])
    deeper = Decisions(np.array([-1, 0, 1, -1]), np.array([NAN, NAN, 1.0, 0.0]))
    assert returns(deeper, shrink=1.0) == pytest.approx([(1 + 0.5) / 2, (1 + 0.75) / 2, 1.0, 0.0]), "to its parent's"
    with_values = chains([1.0, 0.0], [2, 2], [[0.0], [0.5]])
    assert returns(with_values, shrink=2.0) == pytest.approx(returns(with_values)), "the environment's are not shrunk"


def test_credit_with_values_compares_with_state_and_all():
    group = chains([1.0, 0.0, 0.0], [2, 2, 2], [[0.5], [0.25], [0.25]])
    states = ["start", "a", "start", "b", "start", "b"]
    found = centered(replace(group, states=states), returns(group))
    assert found[::2] == pytest.approx([0.25, -0.125, -0.125]), "beginnings with beginnings alone"
    # progress after it: 0.5, -0.25, -0.25; in b the other counts once, all of the other episodes four times
    assert found[1] == pytest.approx(0.5 + 0.25)
    assert found[[3, 5]] == pytest.approx([-0.25 - (-0.25 + 4 * 0.125) / 5] * 2)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("states", [None, ["start", "a", "b", "c"] * 8])
def test_credit_of_a_group_in_which_nothing_differs_is_zero(lam, states):
    group = replace(chains([1.0] * 8, [4] * 8, [[-0.5, 0.0, 0.5]] * 8), states=states)
    assert not advantages(group, lam=lam).any()


@pytest.mark.parametrize(
    ("lengths", "values"), [([1] * 4, None), ([1] * 4, [[]] * 4), ([3, 1, 5, 2], None)], ids=["one", "values", "long"]
)
def test_credit_at_one_decision_or_without_values_is_grpo(lengths, values):
    outcomes = [1.0, -1.0, -1.0, 0.5]
    expected = pytest.approx(np.repeat(grpo(outcomes), lengths), abs=1e-5)
    for lam, mix in ((0.0, 0.0), (0.7, 0.3)):
        assert advantages(chains(outcomes, lengths, values), lam=lam, mix=mix) == expected
    assert outcome_advantages(chains(outcomes, lengths, [[9.0] * (length - 1) for length in lengths])) == expected


def test_credit_mix():
    group = chains([1.0, 0.0], [2, 2], [[0.0], [0.5]])
    assert advantages(group, mix=0.5) == pytest.approx(0.5 * advantages(group) + 0.5 * outcome_advantages(group))


def test_credit_scale_counts_an_episode_once():
    """Three decisions of one episode and one of the other weigh as much."""
    group = chains([1.0, 0.0], [3, 1])
    given_ = np.array([2.0, 2.0, 2.0, -4.0])
    assert scaled(group, given_) == pytest.approx(given_ / np.sqrt((4 + 16) / 2) * np.sqrt(1 / 2), abs=1e-5)
    assert not scaled(group, np.zeros(4)).any()


# ---------------------------------------------------------------------- in general


@st.composite
def forests(draw):
    """A forest in any order in which parents come first, with values or without."""
    count = draw(st.integers(2, 14))
    parents = [-1] + [draw(st.integers(-1, i - 1)) for i in range(1, count)]
    inner = set(parents)
    number = st.floats(-2, 2, allow_subnormal=False)
    outcomes = [NAN if i in inner else draw(number) for i in range(count)]
    values = [draw(number) for _ in range(count)] if draw(st.booleans()) else None
    return Decisions(np.array(parents), np.array(outcomes), None if values is None else np.array(values))


def reordered(group, seed):
    """The same forest in another order, and where each decision stands in it."""
    rng, left, order = np.random.default_rng(seed), set(range(len(group.parents))), []
    while left:
        ready = [i for i in sorted(left) if group.parents[i] < 0 or group.parents[i] in order]
        order.append(ready[rng.integers(len(ready))])
        left.remove(order[-1])
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    parents = np.array([place[int(group.parents[old])] for old in order])
    values = None if group.values is None else group.values[order]
    return Decisions(parents, group.outcomes[order], values), np.array(order)


@settings(max_examples=200, deadline=None)
@given(
    group=forests(), seed=st.integers(0, 5), lam=st.sampled_from([0.0, 0.5, 1.0]), shrink=st.sampled_from([0.0, 3.0])
)
def test_credit_follows_ancestors_not_the_order(group, seed, lam, shrink):
    other, order = reordered(group, seed)
    found = advantages(group, lam=lam, shrink=shrink)
    assert advantages(other, lam=lam, shrink=shrink) == pytest.approx(found[order], abs=1e-7)
    beginnings = centered(group, returns(group, lam=lam))[group.parents < 0]
    if len(beginnings) > 1:  # siblings: their mean is 0
        assert abs(beginnings.mean()) < 1e-9


# ---------------------------------------------------------------------- what is estimated


def episodes(item, policy, begun=(0, 0)):
    """All episodes of an item from a state on with their probabilities, as (probability, states, actions, outcome)."""

    def go_on(state, probability, states, actions):
        for action in range(3):
            chance = probability * policy[item.row(state), action]
            after, outcome = item.after(state, action)
            taken = ([*states, state], [*actions, action])
            if outcome is None:
                yield from go_on(after, chance, *taken)
            else:
                yield chance, *taken, outcome

    return list(go_on(begun, 1.0, [], []))


def as_sample(item, group):
    lengths = [len(actions) for _, _, actions, _ in group]
    chosen = [[item.value(item.after(s, a)[0]) for s, a in zip(*each[1:3], strict=True)] for each in group]
    decisions = chains([each[3] for each in group], lengths, chosen)
    states = [state for each in group for state in each[1]]
    rows = np.array([item.row(state) for state in states])
    return Sample(replace(decisions, states=states), rows, np.concatenate([each[2] for each in group]))


def mean_gradient(item, policy, rule):
    """The exact mean of a rule's estimates over all pairs of episodes."""
    total = np.zeros_like(policy)
    for pair in itertools.product(episodes(item, policy), repeat=2):
        found = as_sample(item, pair)
        total += pair[0][0] * pair[1][0] * found.gradient(policy, rule(found.group))
    return total


def by_index(group):
    """Standardized over the rollouts at each index, as is often done."""
    found, depth = returns(group, lam=1.0), np.zeros(len(group.parents), int)
    for i, parent in enumerate(group.parents):
        depth[i] = 0 if parent < 0 else depth[parent] + 1
    return np.array([found[i] - found[depth == depth[i]].mean() for i in range(len(found))])


@pytest.mark.parametrize("with_values", [True, False])
def test_credit_is_unbiased_where_the_policy_stops(with_values):
    item = Item((0, 1), skills=2, slack=1)
    policy = softmax(first_logits(item, 0.3) + np.random.default_rng(0).normal(size=(3, 3)))
    success, exact = item.success(policy)
    assert success == pytest.approx(sum(chance * outcome for chance, _, _, outcome in episodes(item, policy)))

    def rule(group):
        group = group if with_values else replace(group, values=None)
        return centered(group, returns(group, lam=1.0))

    assert mean_gradient(item, policy, rule) == pytest.approx(exact, abs=1e-12)
    cosine = np.vdot(mean_gradient(item, policy, by_index), exact)
    cosine /= np.linalg.norm(exact) * np.linalg.norm(mean_gradient(item, policy, by_index))
    assert cosine < 0.999, "normalizing by the index of a turn is biased"


@pytest.mark.parametrize("with_values", [True, False])
def test_credit_of_branches_is_unbiased(with_values):
    """Two rollouts, each of which goes on in two ways after its first decision, if it goes on."""
    item = Item((0,), skills=1, slack=0)
    policy = softmax(first_logits(item, 0.3) + np.random.default_rng(0).normal(size=(2, 3)))
    trees = []  # of one rollout: probability, parents, outcomes, states, actions
    for first in range(3):
        after, outcome = item.after((0, 0), first)
        chance = policy[item.row((0, 0)), first]
        if outcome is not None:
            trees.append((chance, [-1], [outcome], [(0, 0)], [first]))
            continue
        for pair in itertools.product(range(3), repeat=2):
            ends = [item.after(after, action)[1] for action in pair]
            both = chance * math.prod(policy[item.row(after), action] for action in pair)
            trees.append((both, [-1, 0, 0], [NAN, *ends], [(0, 0), after, after], [first, *pair]))
    total = {True: np.zeros_like(policy), False: np.zeros_like(policy)}
    for one, two in itertools.product(trees, repeat=2):
        parents = np.array([*one[1], *(parent + len(one[1]) * (parent >= 0) for parent in two[1])])
        states, actions = one[3] + two[3], np.array(one[4] + two[4])
        values = np.array([item.value(item.after(*each)[0]) for each in zip(states, actions, strict=True)])
        group = Decisions(parents, np.array([*one[2], *two[2]]), values if with_values else None)
        found = Sample(group, np.array([item.row(state) for state in states]), actions)
        credit = centered(group, returns(group, lam=1.0))
        for weighted in total:
            gradient = found.gradient(policy, credit * (weights(group) if weighted else 1.0))
            total[weighted] += one[0] * two[0] * gradient * group.ends.sum() / 2  # of two rollouts
    assert total[True] == pytest.approx(item.success(policy)[1], abs=1e-12)
    assert np.abs(total[False] - item.success(policy)[1]).max() > 0.01


def test_microscope_gradient_is_that_of_its_success():
    item, step = Item((1, 0, 1), skills=2, slack=2), 1e-6
    logits = first_logits(item, 0.2) + np.random.default_rng(2).normal(size=(3, 3)) / 4
    _, exact = item.success(softmax(logits))
    for at in np.ndindex(logits.shape):
        moved = [logits.copy(), logits.copy()]
        moved[0][at], moved[1][at] = logits[at] + step, logits[at] - step
        more, less = (item.success(softmax(one))[0] for one in moved)
        assert (more - less) / (2 * step) == pytest.approx(exact[at], abs=1e-7)
    assert item.success(softmax(first_logits(item, 0.2)))[0] == pytest.approx(0.2)
    assert item.after((3, 2), STOP) == ((3, 2), 1.0) and item.after((2, 0), STOP)[1] == 0.0


def test_microscope_turn_tree_is_unbiased():
    """Where a branch was chosen among the turns that happened, long episodes would count too much: 7 deviations."""
    item = Item((0,), skills=1, slack=1)
    policy = softmax(first_logits(item, 0.3) + np.random.default_rng(0).normal(size=(2, 3)))
    rng, found = np.random.default_rng(1), []
    for _ in range(4000):
        tree = sample(item, policy, rng, 8, 2)
        group = replace(tree.group, values=None)
        found.append(tree.gradient(policy, weights(group) * returns(group)).ravel())
    mean, error = np.mean(found, 0), np.std(found, 0) / math.sqrt(len(found))
    exact = item.success(policy)[1].ravel()
    exact *= (mean @ exact) / (exact @ exact)  # a branch counts as a part of an episode
    assert (np.abs(mean - exact) < 4 * error).all()


def test_microscope_variance_is_that_of_one_groups_estimate():
    """By hand from the groups that it draws; the gradient is the mean of many of outcome GRPO's without a baseline."""
    item = Item((0,), skills=1, slack=0)
    scope, rule = (
        Microscope([item], first_logits(item, 0.3), 2),
        Rule(lambda group: returns(replace(group, values=None))),
    )
    rng, policy = np.random.default_rng(0), softmax(scope.logits)
    drawn = [scope.draw(rule, policy, rng) for _ in range(400)]
    estimates = np.array([gradient.ravel() for _, gradient in drawn])
    exact = item.success(policy)[1].ravel()
    signal = (estimates.mean(0) @ exact) ** 2 / (exact @ exact)
    variance = ((estimates - estimates.mean(0)) ** 2).mean(0).sum() / signal
    angle, found, samples = scope.estimate(rule, 400)
    assert found == pytest.approx(variance) and samples == pytest.approx(
        variance * np.mean([s.sampled for s, _ in drawn])
    )
    assert angle < 5, "unbiased"


def test_microscope_sees_the_bias_of_shrunk_values():
    """At 4 steps the mean of a shrunk tree's estimates turns away from the gradient, and is less noisy."""
    item = Item((0,) * 4, skills=1, slack=4)
    scope = Microscope([item], first_logits(item, 0.1), 8)
    (angle, noise, _), (biased, less, _) = (
        scope.estimate(Rule(lambda group, k=k: advantages(replace(group, values=None), shrink=k), 0.5), 600)
        for k in (0.0, 8.0)
    )
    assert angle < 5 < 12 < biased and less < noise, (angle, noise, biased, less)


def test_microscope_continuations_tell_values():
    """Each value is the success from there on, and the decisions sampled for it are counted."""
    item = Item((0, 0), skills=1, slack=1)
    policy, rng, found = softmax(first_logits(item, 0.3)), np.random.default_rng(0), {}
    for _ in range(500):
        drawn = sample(item, policy, rng, 4, continued=2)
        inner = np.flatnonzero(~drawn.group.ends)
        assert drawn.sampled >= len(drawn.actions) + 2 * len(inner)
        for i in inner:
            after, _ = item.after(drawn.group.states[i], drawn.actions[i])
            found.setdefault(after, []).append(drawn.group.values[i])
    for after, values in found.items():
        exact = sum(chance * outcome for chance, _, _, outcome in episodes(item, policy, after))
        assert np.mean(values) == pytest.approx(exact, abs=4 * np.std(values) / math.sqrt(len(values))), after


@pytest.mark.parametrize("size", [2, 4, 8])
def test_microscope_half_of_a_trees_episodes_branch(size):
    scope = Microscope([Item((0,) * 8, skills=1, slack=0)], np.zeros((2, 3)), size)
    policy, rng = softmax(10 * np.eye(3)[[0, 2]]), np.random.default_rng(0)  # nearly always right
    parents = scope.draw(RULES["turn tree"], policy, rng)[0].group.parents
    assert (parents == -1).sum() == size / 2 and (np.bincount(parents + 1)[1:] > 1).any()


@pytest.mark.parametrize(
    ("option", "fix"),
    [("--group-size 1", ": give 2 to "), ("--steps 1 0", ": give 1 to "), ("--solved 0.9", ": give 0.001 to "),
     ("--slack nan", ": give 0 to "), ("--groups 1", ": give 2 to "), ("--skills 0", ": give 1 to "),
     ("--seeds 0", ": give 1 to "), ("--plot credit.jpeg", "=credit.jpeg: give a .png or .svg file")],
)  # fmt: skip
def test_microscope_refuses_what_it_cannot_measure_or_draw(option, fix, capsys):
    with pytest.raises(SystemExit):
        main(option.split())
    assert f"{option.split()[0]}{fix}" in capsys.readouterr().err


def test_microscope_draws_a_line_for_each_rule(tmp_path):
    samples = {(slack, name): [1.0, 0.5] for slack in (0.0, 1.0) for name in RULES}
    draw(samples, [1, 4], tmp_path / "credit.svg")
    text = (tmp_path / "credit.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in RULES)
    assert text.index("<!-- 1 errors forgiven a step -->") < text.index("<!-- 0 errors forgiven a step -->")
