"""Hydra's command line for ``main.py``: what a user gives, checked by ``compose`` and handed to ``@hydra.main``.

Guarantees:

- ``key=value`` and ``config=FILE`` mean what they mean to ``compose_config``, with the same errors, and Hydra composes,
  shows (``--cfg``) and passes on just that;
- ``~key``, ``hydra.*`` and all flags are Hydra's own, except that several runs (``-m``) are refused;
- what Hydra composes, also of a primary configuration of the user's (``--config-name``), passes the same checks.
"""

from collections.abc import Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from recipe.atropos.config.compose import (
    chosen_preset,
    compose_config,
    compose_values,
    differences,
    given_keys,
    given_values,
    leaves,
    quoted,
    resolved,
    shipped,
)
from recipe.atropos.config.derived import set_derived
from recipe.atropos.config.keys import is_free
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.secret import check_not_hidden


def hydra_arguments(argv: Sequence[str]) -> list[str]:
    """Return the command line for Hydra. It exits with Hydra's usage if Hydra does not know a flag.

    Raises:
        ConfigurationError: as ``compose_config``; or several runs are asked for.
    """
    arguments = get_args_parser().parse_args(argv)
    if arguments.shell_completion:
        return [*argv]
    own = [word for word in arguments.overrides if not _is_hydras(word)]
    hydras = [word for word in arguments.overrides if _is_hydras(word)]
    if arguments.multirun or any(word.lstrip("+").startswith("hydra.mode=") for word in hydras):
        raise ConfigurationError("-m, --multirun, hydra.mode: one command trains one run; start it once for each value")
    shipped(None)  # for checked_config: while Hydra runs a task, no other configuration can be composed
    flags = [word for word in argv if word not in arguments.overrides]
    return [*flags, *hydras, *_as_hydras(own)]


def _is_hydras(word: str) -> bool:
    return word.startswith("~") or word.lstrip("+").startswith(("hydra.", "hydra/"))


def _as_hydras(overrides: Sequence[str]) -> list[str]:
    """Return overrides that make of ``trainer.yaml``, by Hydra's rules, what ``compose_config`` makes of these."""
    preset = chosen_preset(given_values(overrides))
    base, composed = shipped(preset), compose_config(overrides, print)
    removed = (key for key in differences(base, composed) if OmegaConf.select(composed, key) is None)
    changed = differences(composed, base, given_keys(overrides))
    return [
        *([] if preset is None else [f"preset={preset}"]),
        *(f"~{key}" for key in removed if key not in changed),
        *(f"++{key}={_literal(value)}" for key, value in changed.items()),
    ]


def _literal(value: Any) -> str:
    """Write a value in Hydra's override grammar."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    return "null" if value is None else str(value).lower()


def checked_config(composed: DictConfig) -> DictConfig:
    """Return what Hydra composed, resolved, with the checks of ``compose_config`` and of the schema.

    Raises:
        ConfigurationError: as ``load_config``; or a key of ``trainer.yaml`` is missing.
    """
    old, new = (dict(leaves(OmegaConf.to_container(config))) for config in (shipped(None), composed))
    for key in old:
        if key not in new and not is_free(key):
            raise ConfigurationError(
                f"{key} is missing: key=null leaves an option out; a configuration of your own needs "
                "defaults: [trainer, _self_]"
            )
    preset = next((word[7:] for word in HydraConfig.get().overrides.task if word.startswith("preset=")), None)
    compose_values([*differences(composed).items()], base=shipped(preset))
    check_not_hidden(OmegaConf.to_container(composed))
    return set_derived(resolved(composed))
