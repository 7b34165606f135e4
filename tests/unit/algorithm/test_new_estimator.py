"""A new estimator is one function in a file of its own; the configuration chooses it, and it trains rows."""

import importlib
import sys

import numpy as np
import pytest
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from helpers.loss import in_the_loss
from helpers.trainer import compose_config, random_group
from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import ConfigurationError

CHOSEN = "algorithm.adv_estimator=median"


@pytest.fixture
def median(monkeypatch):
    """Declared while the test runs."""
    for registry in (ESTIMATORS, ADV_ESTIMATOR_REGISTRY):
        monkeypatch.setitem(registry, "median", None)
        del registry["median"]
    importlib.import_module("helpers.median_estimator")
    yield
    del sys.modules["helpers.median_estimator"]


def test_a_new_estimator_is_accepted_once_it_is_declared(median, model_path, monkeypatch):
    config = compose_config(
        f"actor_rollout_ref.model.path={model_path}", "data.max_prompt_length=16", "data.max_response_length=16", CHOSEN
    )
    check_config(config)
    config.trainer.atropos.fallback_to_grpo = False
    with pytest.raises(ConfigurationError, match="adv_estimator=median, which reads no advantages"):
        check_config(config)
    monkeypatch.delitem(ESTIMATORS, "median")
    with pytest.raises(ConfigurationError, match="adv_estimator=median; choose one of gpg, grpo, grpo_atropos, .*rloo"):
        check_config(config)


def test_a_new_estimator_weighs_the_tokens_of_a_step(median):
    """Of real rows, in verl's loss; a group that is smaller than it needs gets nothing."""
    groups = [random_group(np.random.default_rng(seed), 50, turns=2, size=size) for seed, size in enumerate((5, 4, 1))]
    for group, scores in zip(groups, ([0.0, 1.0, 3.0, 4.0, 9.0], [2.0, 2.0, 5.0, 7.0], [8.0]), strict=True):
        group["scores"] = scores
    wanted = [score - 3.0 for score in groups[0]["scores"]] + [score - 3.5 for score in groups[1]["scores"]] + [0.0]
    masks = [mask for group in groups for mask in group["masks"]]
    found = in_the_loss(groups, 50, CHOSEN).advantages
    for row, mask, value in zip(found, masks, wanted, strict=True):
        assert row == pytest.approx([0.0 if token == -100 else value for token in mask], abs=1e-4)
    assert "median" in ADV_ESTIMATOR_REGISTRY
