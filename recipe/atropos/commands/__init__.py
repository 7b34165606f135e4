"""What ``verl-atropos`` can do beside training."""

from pathlib import Path

from omegaconf import DictConfig

from recipe.atropos.run_dir import RunDir
from recipe.atropos.utils.secret import read_config_yaml


def config_of_run(run: Path) -> DictConfig:
    """The configuration that the launcher left in the run folder.

    Raises:
        FileNotFoundError: it is no run folder.
    """
    path = RunDir(run).config
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give the folder of a run that launch_services started")
    return read_config_yaml(path)
