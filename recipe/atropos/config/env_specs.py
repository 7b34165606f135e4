"""The environments that a configuration asks for.

``environment`` is the one environment of a run; with ``target: null`` the run starts none, and others join it. Where
``environments`` has entries, NAME: {settings}, these are the run's instead, and ``environment`` says what they leave
out; only ``args`` and ``reward_bridge`` are each one's own.

The Trajectory API fills a batch with packs of as many sequences as the largest group has, and, where an environment has
an allocation, with at least so many of its sequences, or not at all. What could never fill one is refused here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.errors import ConfigurationError

_OWN_KEYS = {  # flags of the environment that are keys of their own
    "group_size": "group_size",
    "inference_weight": "weight",
    "min_batch_allocation": "min_batch_allocation",
}


@dataclass(frozen=True)
class EnvironmentSpec:
    """One environment. ``key`` is where the configuration has it, ``name`` what it registers, logs and reports as.

    ``weight``: its part of what is not allocated, against the others'; ``min_batch_allocation``: its part of every
    batch, in (0, 1]; ``max_restarts``: how often it is started again; ``start_timeout``: seconds until it must have
    registered; ``args``: its own flags; ``reward_bridge``: what ``adapter/reward_bridge.py`` reads.

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
    def place(self) -> str:
        """The module or file of ``target``, without its class."""
        return self.target.partition(":")[0]


def environment_specs(config: DictConfig) -> dict[str, EnvironmentSpec]:
    """The run's environments by name, in the configuration's order. Types and ranges are ``config.schema``'s.

    Raises:
        ConfigurationError: a key or value that cannot be; names it.
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
    """What a single environment is called: as its own flag says, else as its module or file."""
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
    """Whether a batch of ``batch_size`` sequences can be filled by these environments, and each has a part in it.

    Raises:
        ConfigurationError: naming the key.
    """
    largest = max(specs, key=lambda spec: spec.group_size, default=None)
    for spec in specs:
        if batch_size % spec.group_size:
            raise ConfigurationError(
                f"{spec.key}.group_size={spec.group_size} does not divide the batch of {batch_size} sequences "
                "(data.train_batch_size groups x actor_rollout_ref.rollout.n): the Trajectory API would never fill "
                "one; change either"
            )
        if largest.group_size % spec.group_size:
            raise ConfigurationError(
                f"{spec.key}.group_size={spec.group_size} does not divide {largest.key}.group_size="
                f"{largest.group_size}: the Trajectory API packs groups to the size of the largest and would never "
                "fill a batch; change either"
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
