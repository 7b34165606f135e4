"""From scores to advantages: the KL in the reward, the off-policy correction, and padding rows."""

import numpy as np
import pytest
import torch
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

from helpers.trainer import compose_config
from recipe.atropos.algorithm.advantages import KLCoefficient, RunningMoments, add_advantages
from recipe.atropos.algorithm.metrics import batch_metrics
from recipe.atropos.algorithm.off_policy import compare_with_engine, configure_bypass_mode, correct_rollout
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.verl_ext.algorithm import AdaptiveKLController, FixedKLController


def advantages_of(old, reference, *overrides, kl_controller=None):
    """(batch, metrics) of a row with 1 trained token and score 1, one with 3 and score 2, and a padding row.

    The engine's logprobs are -1; ``old`` and ``reference`` are the trainer's of the rows, at all of their tokens.
    """
    group = {
        "tokens": [[5, 6], [5, 6, 7, 8]],
        "masks": [[-100, 6], [-100, 6, 7, 8]],
        "scores": [1.0, 2.0],
        "inference_logprobs": [[1.0, -1.0], [1.0, -1.0, -1.0, -1.0]],
    }
    batch, _ = groups_to_data_proto([group], RowLimits(8, 0), multiple_of=3)
    shape = batch.batch["responses"].shape
    for key, values in (("old_log_probs", old), ("ref_log_prob", reference)):
        batch.batch[key] = torch.tensor([*values, 0.0])[:, None].expand(shape).clone()
    options = ["algorithm.norm_adv_by_std_in_grpo=false", "algorithm.rollout_correction.rollout_is=null", *overrides]
    config = compose_config("actor_rollout_ref.model.path=none", *options)
    return batch, add_advantages(batch, config.algorithm, config.trainer.atropos, RunningMoments(), kl_controller)


def test_kl_in_the_reward_is_subtracted_at_each_trained_token():
    """Of 1 nat at the first row's token, and of 2 at each of the other's three, a tenth."""
    options = ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=kl")
    batch, metrics = advantages_of((-1.0, -1.0), (-2.0, -3.0), *options, kl_controller=FixedKLController(0.1))
    wanted = torch.tensor([[0.9, 0.0, 0.0], [-0.2, -0.2, 1.8], [0.0] * 3])
    torch.testing.assert_close(batch.batch["token_level_rewards"], wanted)
    torch.testing.assert_close(batch.batch["advantages"], torch.tensor([[-0.25, 0.0, 0.0], [0.25] * 3, [0.0] * 3]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(1.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_survivors_adaptive_kl_adapts_by_the_number_of_rows():
    """Of two rows; the KL is far above its target, so the coefficient rises by a fifth of 2 / 10."""
    options, controller = ("algorithm.use_kl_in_reward=true",), AdaptiveKLController(0.1, target_kl=0.01, horizon=10)
    advantages_of((-1.0, -1.0), (-2.0, -3.0), *options, kl_controller=controller)
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


REJECTING = [
    f"algorithm.rollout_correction.{setting}"
    for setting in ("rollout_is=token", "rollout_rs=token_k1", "rollout_rs_threshold=0.5_2.0")
]


@pytest.mark.parametrize(("far", "kept"), [((-1.0, -9.0), [True, False]), ((-9.0, -9.0), [False, False])])
def test_advantages_are_of_the_tokens_that_the_correction_keeps(far, kept):
    """The scores of the others stay in the mean of their group."""
    batch, _ = advantages_of(far, far, *REJECTING)
    of_first = [-0.5 * kept[0], 0.0, 0.0]
    assert batch.batch["response_mask"].any(-1).tolist() == [*kept, False]
    assert batch.batch["advantages"].tolist() == [of_first, [0.0] * 3, [0.0] * 3]
    assert batch.non_tensor_batch["has_signal"].tolist() == [*kept, False]
    assert batch.batch["rollout_is_weights"].shape == (3, 3) and not batch.batch["rollout_is_weights"][2].any()


def test_advantages_in_bypass_mode_are_of_every_token():
    batch, metrics = advantages_of(
        (-9.0, -9.0), (-9.0, -9.0), *REJECTING, "algorithm.rollout_correction.bypass_mode=true"
    )
    assert batch.batch["response_mask"].sum(-1).tolist() == [1, 3, 0] and not metrics
    assert batch.batch["advantages"].tolist() == [[-0.5, 0.0, 0.0], [0.5] * 3, [0.0] * 3]
    assert batch.batch["token_level_rewards"].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0] * 3]
    assert "rollout_is_weights" not in batch.batch and batch.non_tensor_batch["has_signal"].tolist() == [True] * 2 + [
        False
    ]


def test_kl_coefficient_is_restored_where_it_adapts():
    """A fixed one is what the configuration says, also if that was changed before the run was resumed."""
    reached = AdaptiveKLController(init_kl_coef=0.1, target_kl=1.0, horizon=10)
    reached.update(current_kl=9.0, n_steps=5)
    state = KLCoefficient(reached).state_dict()
    assert state == {"value": reached.value} and reached.value > 0.1
    adaptive, fixed = AdaptiveKLController(init_kl_coef=0.1, target_kl=1.0, horizon=10), FixedKLController(0.2)
    for controller in (adaptive, fixed):
        KLCoefficient(controller).load_state_dict(state)
    assert adaptive.value == reached.value and fixed.value == 0.2


LIMITS = RowLimits(max_length=90, pad_token_id=0)


def rows_of(ratios, without=()):
    """Rows whose tokens had these ``ratios`` trainer / engine; those ``without`` logprobs of the engine by index.

    One token of the environment stands between the first trained one and the others.
    """
    length = max(map(len, ratios))
    group = {
        "tokens": [[5] + [6] * (len(row) + 1) for row in ratios],
        "masks": [[-100, 6, -100] + [6] * (len(row) - 1) for row in ratios],
        "scores": [float(i + 1) for i in range(len(ratios))],
        "inference_logprobs": [[1.0, -2.0, 1.0] + [-2.0] * (len(row) - 1) for row in ratios],
    }
    for i in without:
        group["inference_logprobs"][i] = [1.0] * len(group["tokens"][i])
    data, _ = groups_to_data_proto([group], LIMITS)
    full = torch.tensor([[row[0], 1.0, *row[1:], *[1.0] * (length - len(row))] for row in ratios])
    data.batch["old_log_probs"] = -2.0 + full.log()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"].clone()
    return data


def test_metrics_of_credit_count_turns_as_they_were_sampled():
    """Not as rejection cuts them; and what an estimator made is no credit of the environment's."""
    settings = ("rollout_is=null", "rollout_rs=token_k1", "rollout_rs_threshold=0.5_2.0")
    for estimator in ("grpo_atropos", "rloo"):
        config = compose_config(
            f"algorithm.adv_estimator={estimator}", *(f"algorithm.rollout_correction.{each}" for each in settings)
        )
        rows = rows_of([[1.0, 1.0, 9.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
        rows.batch["atropos_advantages"] = torch.ones_like(rows.batch["old_log_probs"])
        rows.non_tensor_batch["has_advantages"][:] = True
        rows.non_tensor_batch["credit"][:] = "lam=0"
        add_advantages(rows, config.algorithm, config.trainer.atropos, RunningMoments(), None)
        assert rows.batch["response_mask"].sum() == 7
        found = batch_metrics(rows)
        if estimator == "rloo":
            assert not [name for name in found if "/credit/" in name]
        else:
            shares = [found.get(f"atropos/credit/turn_share/{turn}") for turn in (1, 2, 3)]
            assert shares == [pytest.approx(2 / 7), pytest.approx(5 / 7), None]


def correction(**settings):
    given = {"rollout_is": "null", "rollout_rs": "null"} | settings
    overrides = [f"algorithm.rollout_correction.{key}={value}" for key, value in given.items()]
    return compose_config("actor_rollout_ref.model.path=none", *overrides).algorithm.rollout_correction


def test_correction_weighs_rows_with_logprobs_alone():
    data = rows_of([[0.5, 1.5, 4.0], [3.0, 3.0], [0.25]], without=[1])
    settings = correction(rollout_is="token", rollout_is_threshold=2.0)
    metrics = compare_with_engine(data, version=0, correction=settings)
    correct_rollout(data, settings)
    expected = [[0.5, 0, 1.5, 2.0], [1, 0, 1, 0], [0.25, 0, 0, 0]]
    torch.testing.assert_close(data.batch["rollout_is_weights"], torch.tensor(expected))
    assert data.batch["response_mask"].tolist() == [[1, 0, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0]]
    assert torch.equal(data.batch["token_level_rewards"], data.batch["token_level_scores"])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((0.5 + 1.5 + 2.0 + 0.25) / 4)


def test_correction_moves_rewards_to_the_last_token_that_stays():
    """Each row's rewards sum to what they did."""
    data = rows_of([[1.0, 1.0, 9.0], [9.0, 1.0], [9.0], [9.0, 9.0, 9.0], [1.0, 9.0]], without=[3])
    data.batch["token_level_rewards"][:2, 0] = 0.25  # as the KL in the reward adds
    correct_rollout(data, correction(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"))
    assert data.batch["response_mask"].tolist() == [[1, 0, 1, 0], [0, 0, 1, 0], [0] * 4, [1, 0, 1, 1], [1, 0, 0, 0]]
    expected = [[0.25, 0, 1.0, 0], [0, 0, 2.25, 0], [3.0, 0, 0, 0], [0, 0, 0, 4.0], [5.0, 0, 0, 0]]
    assert data.batch["token_level_rewards"].tolist() == expected, "of a row that loses all tokens it stays"
    assert "rollout_is_weights" not in data.batch


def test_correction_of_rows_without_any_logprobs_changes_nothing():
    data = rows_of([[9.0, 1.0], [9.0]], without=[0, 1])
    data.batch["rollout_log_probs"] = torch.zeros_like(data.batch["old_log_probs"])
    mask = data.batch["response_mask"].clone()
    settings = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    settings = correction(rollout_is="token", rollout_is_threshold=2.0, **settings)
    assert compare_with_engine(data, version=0, correction=settings) == {}
    correct_rollout(data, settings)
    assert torch.equal(data.batch["response_mask"], mask)
    assert torch.equal(data.batch["rollout_is_weights"], mask.float())


def test_logprob_difference_is_over_trained_tokens_of_known_rows():
    data = rows_of([[np.exp(0.1), np.exp(-0.3)], [9.0], [1.0]], without=[1])
    data.non_tensor_batch["policy_version_min"] = np.array([3, 4, 4], dtype=object)
    settings = correction(bypass_mode="true")
    metrics = compare_with_engine(data, version=4, correction=settings)
    assert metrics["atropos/logprob_diff/mean"] == pytest.approx(0.4 / 3, abs=1e-6)
    assert metrics["atropos/logprob_diff/max"] == pytest.approx(0.3, abs=1e-6)
    assert metrics["atropos/logprob_diff/fresh_mean"] == pytest.approx(0, abs=1e-6)
    assert "training/rollout_probs_diff_valid" in metrics, "and verl's own"
    assert "atropos/logprob_diff/fresh_mean" not in compare_with_engine(data, version=5, correction=settings)
    assert not any(name.startswith("rollout_corr/") for name in metrics), "the loss has them"


@pytest.mark.parametrize("bypass", [True, False])
def test_correction_is_given_to_the_loss_in_bypass_mode_alone(bypass):
    option = f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}"
    config = compose_config("actor_rollout_ref.model.path=none", option)
    configure_bypass_mode(config)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    assert (policy_loss.loss_mode == "bypass_mode") is bypass
    assert (policy_loss.get("rollout_correction") == config.algorithm.rollout_correction) is bypass


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_is": "token"},
        {"rollout_is": "sequence"},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0", "rollout_is_batch_normalize": "true"},
        {"rollout_rs": "'token_k1,seq_mean_k3'", "rollout_rs_threshold": "'0.5_2.0,0.9'"},
    ],
    ids=lambda settings: ", ".join(settings.values()),
)
def test_correction_is_verls(settings):
    """Its weights and mask, some rows at once, are those of verl's own call, whose metrics come later."""
    ratios, settings = [*[[0.5, 1.5, 4.0], [1.0, 1.1], [0.25]] * 6, [3.0, 3.0]], correction(**settings)
    expected, metrics = compute_rollout_correction_and_add_to_batch(rows_of(ratios), settings)
    found = rows_of(ratios)
    assert compare_with_engine(found, 0, settings).items() >= metrics.items() and metrics
    correct_rollout(found, settings)
    for key in ("response_mask", *(["rollout_is_weights"] if settings.rollout_is else [])):
        assert torch.equal(found.batch[key], expected.batch[key]), key


def test_weights_may_all_be_zero():
    """As IcePop's are where every token is outside: verl's metrics of them divide by 0."""
    settings, rows = correction(rollout_is="sequence", rollout_is_threshold="0.5_2.0"), rows_of([[4.0, 3.0]])
    assert compare_with_engine(rows, 0, settings)["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    correct_rollout(rows, settings)
    assert not rows.batch["rollout_is_weights"].any()
