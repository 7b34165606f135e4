"""From scores to advantages: the KL in the reward, the off-policy correction, and padding rows."""

import pytest
import torch

from helpers.trainer import compose_config
from recipe.atropos.algorithm.advantages import KLCoefficient, RunningMoments, add_advantages
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


def test_advantages_without_kl_in_the_reward_are_of_the_scores():
    batch, metrics = advantages_of((-1.0, -1.0), (-2.0, -2.0))
    assert batch.batch["token_level_rewards"].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0] * 3]
    assert batch.batch["advantages"].tolist() == [[-0.5, 0.0, 0.0], [0.5] * 3, [0.0] * 3]
    assert batch.non_tensor_batch["has_signal"].tolist() == [True, True, False]
    assert not any("kl_penalty" in key for key in metrics)


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
    assert "rollout_is_weights" not in batch.batch


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
