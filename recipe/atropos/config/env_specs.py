"""The environments of a configuration.

``environment`` is the only environment of a run; with ``target: null`` the run starts none, and others join it. If
``environments`` has entries, NAME: {settings}, the run has these instead, and ``environment`` supplies the settings
that they omit, except ``args`` and ``reward_bridge``.

Environments may have any group sizes up to a batch. An allocation holds over consecutive batches
(``trajectory_api/batching.py``).
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.errors import ConfigurationError

NO_STEP_LIMIT = 10**9
"""``--env.total_steps`` of an environment that serves until it is stopped."""

_LEAST_FILL = 0.8
_OWN_KEYS = {  # flags of the environment that have their own keys
    "group_size": "group_size",
    "inference_weight": "weight",
    "min_batch_allocation": "min_batch_allocation",
}


@dataclass(frozen=True)
class EnvironmentSpec:
    """One environment. ``key`` is its key in the configuration, ``name`` what it registers, logs and reports as.

    ``weight``: its share of the unallocated part, relative to the others'; ``min_batch_allocation``: its least share of
    the batches, in (0, 1]; ``max_restarts``: how often it is restarted; ``start_timeout``: seconds until it must have
    registered; ``args``: its own flags; ``reward_bridge``: what ``algorithm/reward_bridge.py`` reads;
    ``python``: its interpreter, a path or a name on PATH, None for the launcher's.

    Raises:
        ConfigurationError: naming key and value.
    """

    key: str
    name: str
    target: str
    group_size: int
    weight: float = 1.0
    min_batch_allocation: float | None = None
    max_restarts: int = 3
    start_timeout: float = 300.0
    evaluate: bool = True
    args: Mapping[str, Any] = field(default_factory=dict)
    reward_bridge: Mapping[str, Any] | None = None
    python: str | None = None

    def __post_init__(self) -> None:
        for flag in _OWN_KEYS.keys() & self.args.keys():
            raise ConfigurationError(f"{self.key}.args.{flag}: give {self.key}.{_OWN_KEYS[flag]} instead")
        if self.several and "wandb_name" in self.args:
            raise ConfigurationError(f"{self.key}.args.wandb_name: it is called {self.name}, as its key; drop it")

    @property
    def several(self) -> bool:
        """Whether it is one of ``environments``."""
        return self.key != "environment"

    @property
    def service(self) -> str:
        return f"environment-{self.name}" if self.several else "environment"

    @property
    def interpreter(self) -> str:
        """The program that runs it. A path is made absolute; a name is left to PATH."""
        python = os.path.expanduser(self.python or sys.executable)
        return os.path.abspath(python) if os.sep in python else python

    @property
    def place(self) -> str:
        """The module or file of ``target``, without its class."""
        return self.target.partition(":")[0]


def environment_specs(config: DictConfig) -> dict[str, EnvironmentSpec]:
    """Return the run's environments by name, in the configuration's order. ``config.schema`` checks types and ranges.

    Raises:
        ConfigurationError: a key or value is invalid; names it.
    """
    single = OmegaConf.to_container(config.environment, resolve=True)
    several = OmegaConf.to_container(config.environments, resolve=True) if config.environments else {}
    if not several:
        if single["target"] is None:
            return {}
        return {spec.name: spec for spec in [_spec("environment", _name_of(single), single)]}
    shared = {key: value for key, value in single.items() if key not in ("args", "reward_bridge")}
    specs = {}
    for name, own in several.items():
        if {**shared, **own}["target"] is None:
            raise ConfigurationError(f"environments.{name}.target is not set, and environment.target=null; give one")
        specs[name] = _spec(f"environments.{name}", name, {**shared, **own})
    return specs


def _name_of(settings: Mapping[str, Any]) -> str:
    """Return the name of a single environment: that of its own flag, else of its module or file."""
    given = (settings.get("args") or {}).get("wandb_name")
    if given:
        return re.sub(r"[^\w-]", "_", str(given))
    place = str(settings["target"]).partition(":")[0]
    name = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return re.sub(r"[^\w-]", "_", name) or "environment"


def _spec(key: str, name: str, settings: Mapping[str, Any]) -> EnvironmentSpec:
    given = {k: v for k, v in settings.items() if v is not None or k in ("min_batch_allocation", "reward_bridge")}
    return EnvironmentSpec(key=key, name=name, **given)


def check_specs(specs: Sequence[EnvironmentSpec], batch_size: int) -> None:
    """Check that groups of these environments fit into a batch of ``batch_size`` sequences, and each has a share of it.

    Raises:
        ConfigurationError: naming the key.
    """
    for spec in specs:
        if spec.group_size > batch_size:
            raise ConfigurationError(
                f"{spec.key}.group_size={spec.group_size} is larger than the batch of {batch_size} sequences "
                "(data.train_batch_size groups x actor_rollout_ref.rollout.n); change either"
            )
    shares = {spec.key: spec.min_batch_allocation for spec in specs if spec.min_batch_allocation is not None}
    total = sum(shares.values())
    listed = " + ".join(f"{key}.min_batch_allocation={share:g}" for key, share in shares.items())
    if total > 1 + 1e-6:
        raise ConfigurationError(f"{listed} = {total:g} of a batch: together they may be 1 at most; lower one")
    without = [spec.key for spec in specs if spec.min_batch_allocation is None]
    if without and total > 1 - 1e-6:
        raise ConfigurationError(
            f"{listed} leaves nothing of a batch to {', '.join(without)}; give it a part, or leave it out"
        )


def fill_warnings(specs: Iterable[EnvironmentSpec], batch_size: int) -> list[str]:
    """Return a warning for each environment whose whole groups alone fill less than ``_LEAST_FILL`` of a batch."""
    found = []
    for spec in specs:
        filled = batch_size // spec.group_size * spec.group_size
        if filled < _LEAST_FILL * batch_size:
            found.append(
                f"{spec.key}.group_size={spec.group_size}: whole groups fill {filled} of a batch of {batch_size} "
                "sequences, and padding the rest; give a size that divides it"
            )
    return found


def options(flags: Mapping[str, Any]) -> list[str]:
    """``--key=value`` for each flag that is not None."""
    return [f"--{key}={_text(value)}" for key, value in flags.items() if value is not None]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
