"""The plan of a run, made once from a command line: its configuration, its folder, its environments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.checkpoint.start_from import Start
from recipe.atropos.config.compose import (
    LAUNCHER_KEYS,
    compose_config,
    differences,
    given_keys,
    resolved,
    with_values,
)
from recipe.atropos.config.derived import set_derived
from recipe.atropos.config.env_specs import EnvironmentSpec, environment_specs
from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.terminal.progress import say
from recipe.atropos.utils.files import read_json
from recipe.atropos.utils.gpus import decide_device

_MODEL_TO_COME = "model-of-the-run-to-resume-from"  # placeholder until the run to resume from is known


@dataclass(frozen=True)
class RunPlan:
    """A run as its command line means it. ``specs``: the environments that it starts, by name; none if others join.

    ``config`` is resolved, with the device that is decided here, and filled in until the start: the model's folder, the
    number of servers. ``composed`` still has the interpolations, and the device as the user gave it. ``start``: the
    other run whose weights it begins with.
    """

    config: DictConfig
    composed: DictConfig
    files: RunDir
    start: Start | None = None
    specs: Mapping[str, EnvironmentSpec] = field(init=False)

    def __post_init__(self) -> None:
        if self.config:
            decide_device(self.config)
        object.__setattr__(self, "specs", environment_specs(self.config) if self.config else {})

    def given(self) -> dict[str, Any]:
        """Return what differs from ``trainer.yaml``, by key, with interpolations; without what ``start`` brings."""
        brought = self.start.values.keys() - {"run.resume_from"} if self.start else ()
        return {key: value for key, value in differences(self.composed).items() if key not in brought}

    def complete(self, addresses: Mapping[str, Any] | None = None) -> DictConfig:
        """Return the trainer's configuration: what was composed, with what the launcher has decided since.

        That is the folder of the run and of the model, how many servers there are and whether they share the
        trainer's GPUs, and ``addresses`` of services by key.

        Raises:
            ConfigurationError: as ``load_config``.
        """
        decided = {
            "run.dir": str(self.files.path),
            "trainer.default_local_dir": str(Path(self.config.trainer.default_local_dir).resolve()),
            "actor_rollout_ref.model.path": self.config.actor_rollout_ref.model.path,
            "inference.colocated": bool(self.config.inference.colocated),
            "inference.servers": self.config.inference.servers,
            **(addresses or {}),
        }
        return resolved(with_values(self.composed, decided))


def plan_run(overrides: list[str], begins: bool = True) -> RunPlan:
    """Return the plan of a run with ``overrides``. Paths below run.dir are in the folder that is chosen: one that no
    finished run has, if the run ``begins``.

    Raises:
        ConfigurationError: as ``load_config``, ``choose_run_dir`` and ``Start.of``; or a key is given that only a
            trainer without the launcher accepts.
    """
    given, start = given_keys(overrides), None
    if own := [
        f"{key} is not for the launcher, which starts the services itself; drop it and give {LAUNCHER_KEYS[key]}, or "
        "train beside services of your own by python -m recipe.atropos.main"
        for key in sorted(given & LAUNCHER_KEYS.keys())
    ]:
        raise ConfigurationError("\n".join(own))
    later = "run.resume_from" in given and MODEL_KEY not in given  # the model is known once the run's folder is
    composed = compose_config(overrides, tell=say)
    config = resolved(with_values(composed, {MODEL_KEY: _MODEL_TO_COME}) if later else composed)
    directory, values = Path(config.run.dir).expanduser().resolve(), {}
    if begins:
        directory = choose_run_dir(config, explicit="run.dir" in given)
    if directory != Path(config.run.dir).resolve():
        values = {"run.dir": str(directory)}
    if config.run.resume_from:
        start = Start.of(config, directory, given)
        alpha, own = "actor_rollout_ref.model.lora_alpha", config.actor_rollout_ref.model.lora_alpha
        if alpha in given and start.values.get(alpha, own) != own:
            raise ConfigurationError(
                f"{alpha}={own} with run.resume_from={config.run.resume_from}, whose adapter has "
                f"{start.values[alpha]}: leave it out"
            )
        values |= start.values
    if values:
        composed = with_values(composed, values)
        config = resolved(composed)
    if start is not None:
        config.actor_rollout_ref.model.path = start.model_before_the_copy
    return RunPlan(set_derived(config), composed, RunDir(directory), start)


def names_model(overrides: list[str]) -> bool:
    """Return whether what a command line gives says which model a run has."""
    return bool({"preset", "run.resume_from", MODEL_KEY} & given_keys(overrides))


def choose_run_dir(config: DictConfig, explicit: bool) -> Path:
    """Return the folder of the run: the configured one or, if it holds a finished run, the first of NAME-2, NAME-3, ...
    that does not.

    Raises:
        ConfigurationError: the folder was given explicitly and holds a finished run.
    """
    configured = Path(config.run.dir).expanduser().resolve()
    candidate, number = configured, 1
    while _finished_steps(candidate) >= config.trainer.total_training_steps:
        if explicit:
            raise ConfigurationError(
                f"run.dir={candidate} holds a run that has trained {_finished_steps(candidate)} steps already; "
                "give another folder, or more --steps to go on"
            )
        number += 1
        candidate = configured.with_name(f"{configured.name}-{number}")
    return candidate


def _finished_steps(folder: Path) -> int:
    """Return the number of steps of a run that is finished, last evaluation included; 0 if there is none."""
    try:
        return read_json(RunDir(folder).summary, {}).get("finished_steps", 0)
    except OSError as error:
        raise ConfigurationError(f"run.dir={folder}: {error.strerror}; give another --run-dir") from error
