"""Waits that follow from how long an answer may be, where the configuration leaves them null."""

import math

from omegaconf import DictConfig, OmegaConf

_SLOWEST = 5.0  # tokens a second of a sequence among many
_LEAST = {"trainer.atropos.max_wait_time": 600.0, "evaluation.timeout": 300.0}


def answer_seconds(config: DictConfig) -> int:
    """Seconds that the longest answer may take."""
    return math.ceil(config.data.max_response_length / _SLOWEST)


def set_waits(config: DictConfig) -> DictConfig:
    """``config`` with those for a batch and for an evaluation: two of the longest answers, and at least ``_LEAST``.

    A run's ``config.yaml`` keeps null: the next run that takes it may have longer answers.
    """
    for key, least in _LEAST.items():
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, max(least, 2.0 * answer_seconds(config)))
    return config
