"""Changes to verl where it has no seam. A test of each fails once verl has one."""

from unittest.mock import patch

from omegaconf import DictConfig
from verl.trainer.ppo import rollout_corr_helper

from recipe.atropos.verl_ext.batch import DataProto


def correct_without_metrics(rows: DataProto, config: DictConfig) -> DataProto:
    """Return ``rows`` after verl's rollout correction, without its metrics, which take nine tenths of its time.

    verl computes the metrics in the functions that return the weights and the mask.
    """
    with patch.multiple(
        rollout_corr_helper,
        compute_is_metrics=lambda **_: {},
        compute_rs_metrics=lambda **_: {},
        compute_offpolicy_metrics=lambda **_: {},
    ):
        return rollout_corr_helper.compute_rollout_correction_and_add_to_batch(rows, config)[0]
