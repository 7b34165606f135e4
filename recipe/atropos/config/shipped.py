"""The shipped configuration: ``trainer.yaml`` over verl's ``ppo_trainer``, with or without a preset.

verl, torch and Ray are not imported.
"""

import functools
import importlib.util
import pickle
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from recipe.atropos.errors import ConfigurationError

FOLDER = Path(__file__).parent


def verl_config_folder() -> Path:
    """Return the folder of verl's YAML without importing verl, which takes seconds and warns."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError("verl is not installed in this environment; install it as the README says")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


class _Folders(SearchPathPlugin):
    """Let Hydra find verl's configuration, and ``trainer.yaml`` from a primary configuration in another folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in (FOLDER, verl_config_folder()):
            search_path.append("recipe.atropos", f"file://{folder}")


Plugins.instance().register(_Folders)


def presets() -> list[str]:
    return sorted(path.stem for path in (FOLDER / "preset").glob("*.yaml"))


def shipped(preset: str | None) -> DictConfig:
    """Return ``trainer.yaml`` with a preset, with interpolations.

    Raises:
        ConfigurationError: there is no such preset, or no verl.
    """
    return pickle.loads(_shipped(preset))  # faster than a deep copy


@functools.cache
def _shipped(preset: str | None) -> bytes:
    if preset is not None and preset not in presets():
        raise ConfigurationError(f"preset={preset}: no such preset; choose one of {', '.join(presets())}")
    with initialize_config_dir(str(FOLDER), version_base=None):
        return pickle.dumps(compose("trainer", overrides=[f"preset={preset}"] if preset is not None else []))
