"""Timeouts that the configuration leaves null, derived from the maximum answer length."""

import math

from omegaconf import DictConfig, OmegaConf

_SLOWEST = 5.0  # tokens per second of one sequence among many
_LEAST = {"trainer.atropos.max_wait_time": 600.0, "evaluation.timeout": 300.0}
_ANSWERS = {"trainer.atropos.max_wait_time": 4, "evaluation.timeout": 2}


def answer_seconds(config: DictConfig) -> int:
    """Return the seconds that the longest answer may take."""
    return math.ceil(config.data.max_response_length / _SLOWEST)


def derived_wait(key: str, max_response_length: int) -> float:
    """Return the seconds of a timeout that is null: ``_ANSWERS`` of the longest (tokens), and at least ``_LEAST``."""
    return max(_LEAST[key], _ANSWERS[key] * float(math.ceil(max_response_length / _SLOWEST)))


def worker_timeout(config: DictConfig) -> float:
    """Return the seconds that an environment's item may take: well below the longest wait for a batch, so that a hung
    item is replaced before the run ends for want of its group.
    """
    return config.trainer.atropos.max_wait_time / 2


def set_waits(config: DictConfig) -> DictConfig:
    """Set null timeouts for a batch and an evaluation.

    A run's ``config.yaml`` keeps null: the next run that uses it may have longer answers.
    """
    for key in _LEAST:
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, derived_wait(key, config.data.max_response_length))
    return config
