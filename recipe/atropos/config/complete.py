"""Read the complete configuration of a run, ``config.yaml`` in its folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.config.compose import compose_config, resolved
from recipe.atropos.config.derived_timeouts import set_waits
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.secret import read_config_yaml, restore


def load_complete(path: Path, hidden: Sequence[str] = ()) -> DictConfig:
    """Load the configuration of a run as its launcher wrote it, resolved and checked; nothing is composed.

    ``hidden``: what ``secret.hidden_settings`` returned, in JSON.

    Raises:
        ConfigurationError: there is no such file, or its values are not valid in this version.
    """
    config = _read(path)
    restore(config, map(json.loads, hidden))
    return set_waits(resolved(config))


def load_recorded(path: Path) -> DictConfig:
    """Load a configuration that an earlier version of the recipe may have written: what it lacks has its default.

    Raises:
        ConfigurationError: as ``load_complete``.
    """
    defaults, recorded = compose_config([]), _read(path)
    OmegaConf.set_struct(defaults, False)
    return set_waits(resolved(OmegaConf.merge(defaults, recorded)))


def _read(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigurationError(f"{path} is not there; give the folder of a run that launch_services started")
    return read_config_yaml(path)
