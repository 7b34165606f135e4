"""verl's estimators, losses, corrections and metrics."""

from verl.trainer.ppo.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    agg_loss,
    compute_grpo_outcome_advantage,
    get_adv_estimator_fn,
    get_kl_controller,
    kl_penalty,
    register_adv_est,
    register_policy_loss,
)
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
)
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
