"""What not sending groups of equal scores does to the gradient: exact, on a bandit with every outcome enumerated."""

from itertools import product

import numpy as np
import pytest
from atroposlib.envs.base import BaseEnvConfig

from helpers.loss import in_the_loss
from recipe.atropos.adapter.validate import check_limits, validated
from recipe.atropos.data.reasons import Reason, RefusedGroup

SIZE = 4
SOLVED = np.array([0.02, 0.3, 0.9, 0.995])  # success of the items, each asked as often as the others
FEATURES = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])  # logits are these @ weights
OUTCOMES = list(product([0, 1], repeat=SIZE))


def is_sent(scores):
    group = {"tokens": [[5, 6]] * SIZE, "masks": [[-100, 6]] * SIZE, "scores": scores}
    try:
        check_limits(validated(group), BaseEnvConfig(group_size=SIZE), 0)
    except RefusedGroup as refused:
        assert refused.reason == Reason.EQUAL_SCORES
        return False
    return True


@pytest.mark.parametrize("by_std", [False, True], ids=["success", "grpo"])
def test_dynamic_sampling_has_the_bias_that_is_documented(by_std):
    groups = [
        {
            "tokens": [[5, 6 + answer] for answer in outcome],
            "masks": [[-100, 6 + answer] for answer in outcome],
            "inference_logprobs": [[1.0, -0.5]] * SIZE,
            "scores": [float(answer) for answer in outcome],
        }
        for outcome in OUTCOMES
    ]
    option = f"algorithm.norm_adv_by_std_in_grpo={str(by_std).lower()}"
    advantages = np.array([row[1] for row in in_the_loss(groups, 40, option).advantages]).reshape(-1, SIZE)
    sent = np.array([is_sent(group["scores"]) for group in groups])
    answers = np.array(OUTCOMES)
    solved = SOLVED[:, None, None]
    odds = np.prod(np.where(answers, solved, 1 - solved), -1) / len(SOLVED)  # of item and outcome
    score_function = (answers - solved)[..., None] * FEATURES[:, None, None]
    gradients = (advantages[..., None] * score_function).sum(2)  # of each item's groups, with respect to the weights

    mixed = 1 - SOLVED**SIZE - (1 - SOLVED) ** SIZE
    assert odds[:, sent].sum(1) * len(SOLVED) == pytest.approx(mixed), "P(mixed) of each item"
    unfiltered = np.einsum("io,iow->w", odds, gradients)
    trained = np.einsum("io,iow->w", odds[:, sent], gradients[:, sent]) / odds[:, sent].sum()
    assert trained == pytest.approx(unfiltered / mixed.mean(), rel=1e-4), "the same direction, by 1 / P(mixed) longer"
    if not by_std:
        success = ((SOLVED * (1 - SOLVED))[:, None] * FEATURES).mean(0)
        assert trained == pytest.approx((SIZE - 1) * success / mixed.mean(), rel=1e-4)

    entropy = -(np.log(SOLVED / (1 - SOLVED)) * SOLVED * (1 - SOLVED))[:, None] * FEATURES  # gradient, of each item
    shares = odds[:, sent].sum(1) / odds[:, sent].sum()  # of the groups that are trained
    assert shares == pytest.approx(mixed / mixed.sum())
    of_all, of_trained = entropy.mean(0), shares @ entropy
    cosine = of_all @ of_trained / np.linalg.norm(of_all) / np.linalg.norm(of_trained)
    assert cosine < 0.99, "a term of its own has another direction"
