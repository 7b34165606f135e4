"""The environments of a configuration.

``environment`` is the only environment of a run; with ``target: null`` the run starts none, and others join it. If
``environments`` has entries, NAME: {settings}, the run has these instead, and ``environment`` supplies the settings
that they omit, except ``args``, ``reward_bridge`` and ``credit``.

Environments may have any group sizes up to a batch. An allocation holds over consecutive batches
(``trajectory_api/batching.py``).
"""

import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.config.schema import EnvironmentSection
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.hosts import cluster_address
from recipe.atropos.utils.private_process import is_loopback

NO_STEP_LIMIT = 10**9
"""``--env.total_steps`` of an environment that serves until it is stopped."""

_LEAST_FILL = 0.8
_PROGRAM = "recipe.atropos.environments.program"
_PROGRAM_KEYS = ("command", "agent", "items", "score")
_NULL_IS_A_VALUE = ("python", "reward_bridge", "credit", "min_batch_allocation")
_OWN_KEYS = {  # flags of the environment that have their own keys
    "group_size": "group_size",
    "inference_weight": "weight",
    "min_batch_allocation": "min_batch_allocation",
}


class EnvironmentSpec(EnvironmentSection):
    """One environment, with the settings of the schema, none of which is omitted.

    ``key`` is its key in the configuration, ``name`` what it registers, logs and reports as.
    """

    key: str
    name: str

    @property
    def several(self) -> bool:
        """Whether it is one of ``environments``."""
        return self.key != "environment"

    @property
    def program(self) -> dict[str, Any]:
        """Flags of an environment that runs a program, by name; empty for any other."""
        return {f"env.{key}": getattr(self, key) for key in _PROGRAM_KEYS} if self.target == _PROGRAM else {}

    @property
    def service(self) -> str:
        return f"environment-{self.name}" if self.several else "environment"

    @property
    def services(self) -> list[str]:
        """The name of each replica's service."""
        return [self.service_of(replica) for replica in range(self.replicas)]

    def service_of(self, replica: int) -> str:
        return f"{self.service}.{replica}" if replica else self.service

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
    local = any(host is not None and is_loopback(host) for host in (config.api.host, config.inference.host))
    on_cluster = not local and cluster_address(config.ray_kwargs.ray_init) is not None
    if not several:
        single = _with_program(single)
        name = _name_of(single)
        return {} if single["target"] is None else {name: _spec("environment", name, single, on_cluster)}
    shared = single | {"args": {}, "reward_bridge": None, "credit": None}
    specs = {}
    for name, own in several.items():
        given = {key: value for key, value in own.items() if value is not None or key in _NULL_IS_A_VALUE}
        own_target = {"command": None, "agent": None} if "target" in given else {}
        settings = _with_program(shared | own_target | given)
        if settings["target"] is None:
            raise ConfigurationError(f"environments.{name}.target is not set, and environment.target=null; give one")
        specs[name] = _spec(f"environments.{name}", name, settings, on_cluster)
    return specs


def _with_program(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the target that runs a program, if they have one."""
    return settings | {"target": _PROGRAM} if settings["command"] or settings["agent"] else settings


def _name_of(settings: Mapping[str, Any]) -> str:
    """Return the name of a single environment: that of its own flag, else of its module or file."""
    place = str(settings["target"]).partition(":")[0]
    own = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    given = (settings.get("args") or {}).get("wandb_name")
    return re.sub(r"[^\w-]", "_", str(given or own)) or "environment"


def _spec(key: str, name: str, settings: Mapping[str, Any], on_cluster: bool) -> EnvironmentSpec:
    if settings["placement"] is None:  # an interpreter of its own is prepared on this machine alone
        spread = on_cluster and settings["replicas"] > 1 and settings["python"] is None
        settings = {**settings, "placement": "ray" if spread else "launcher"}
    spec = EnvironmentSpec.model_construct(key=key, name=name, **settings)  # config.schema has checked the values
    for flag in _OWN_KEYS.keys() & spec.args.keys():
        raise ConfigurationError(f"{key}.args.{flag}: give {key}.{_OWN_KEYS[flag]} instead")
    if spec.several and "wandb_name" in spec.args:
        raise ConfigurationError(f"{key}.args.wandb_name: it is called {name}, as its key; drop it")
    return spec


def fill_warnings(specs: Collection[EnvironmentSpec], batch_size: int) -> list[str]:
    """Return a warning for each environment whose whole groups alone fill less than ``_LEAST_FILL`` of a batch."""
    filled = {spec.key: batch_size // spec.group_size * spec.group_size for spec in specs}
    return [
        f"{spec.key}.group_size={spec.group_size}: whole groups fill {filled[spec.key]} of a batch of {batch_size} "
        "sequences, and padding the rest; give a size that divides it"
        for spec in specs
        if filled[spec.key] < _LEAST_FILL * batch_size
    ]


def options(flags: Mapping[str, Any]) -> list[str]:
    """``--key=value`` for each flag that is not None."""
    given = {key: value for key, value in flags.items() if value is not None}
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]
