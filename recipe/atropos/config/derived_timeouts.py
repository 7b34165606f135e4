"""Timeouts that the configuration leaves null, derived from the maximum answer length."""

import math

from omegaconf import DictConfig, OmegaConf

_SLOWEST = 5.0  # tokens per second of one sequence among many
_LEAST = {"trainer.atropos.max_wait_time": 600.0, "evaluation.timeout": 300.0}


def answer_seconds(config: DictConfig) -> int:
    """Return the seconds that the longest answer may take."""
    return math.ceil(config.data.max_response_length / _SLOWEST)


def set_waits(config: DictConfig) -> DictConfig:
    """Set null timeouts for a batch and an evaluation: twice the longest answer, and at least ``_LEAST``.

    A run's ``config.yaml`` keeps null: the next run that uses it may have longer answers.
    """
    for key, least in _LEAST.items():
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, max(least, 2.0 * answer_seconds(config)))
    return config
