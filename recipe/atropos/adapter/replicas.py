"""Replicas: ``environment.replicas=N`` runs N processes of one environment, each with its own part of the items.

A replica is a process; the environment stays the unit of everything else:

- **Process**: a service, log and report of its own, and its own restarts. Replica 0 has the environment's names,
  replica K ``.K`` after them. A restarted one is the same replica, with the same part, from its own checkpoint.
- **Environment**: one name, so one line in metrics, ``summary.json``, report, alarms and /diagnose. The Trajectory API
  registers each process, and gives all of one name one share and one queue (``apply_shares``): whichever
  asks first takes the environment's turn, and those that are left take over the tickets of one that ends.
- **Items**: every N-th, where the environment's class has ``shard = (0, 1)``, which the adapter sets to (K, N). Else
  its option ``seed`` is raised by K, so that items may be asked by several; without one, by all: both are said before
  the start. Items of a replica that was abandoned are not asked any more.
- **Evaluation** is on all held-out items, in one process, as without replicas.
- **Resumption** with the same N continues each part. Checkpoints of another N are of other parts: they are not read,
  and each replica begins its part anew, with a warning.
"""

import logging
from typing import Any

from recipe.atropos.adapter.settings import AdapterSettings

logger = logging.getLogger(__name__)

_ALL = (0, 1)


def take_part(environment: Any, config: Any, settings: AdapterSettings) -> None:
    """Give an environment that is about to be initialized with ``config`` its part of the items."""
    if settings.replicas == 1:
        return
    if what := sharing(type(environment), config, settings):
        logger.warning("%s", what)
    if getattr(environment, "shard", None) == _ALL:
        environment.shard = (settings.replica, settings.replicas)
    elif _has_seed(config):
        config.seed += settings.replica


def sharing(environment: type, config: Any, settings: AdapterSettings) -> str:
    """Return what is to be said of how replicas of an environment's class share its items; "" if each has its own."""
    if settings.replicas == 1 or getattr(environment, "shard", None) == _ALL:
        return ""
    name = f"replicas={settings.replicas} of {environment.__name__}"
    if _has_seed(config):
        return f"{name}: it has no shard, so each has a seed of its own, and items may be asked by several"
    return f"{name}: it has neither a shard nor a seed, so all may ask the same items"


def checkpoint_name(name: str, settings: AdapterSettings) -> str:
    """Return the folder of a replica's checkpoints, which is the same for each start with as many replicas."""
    return f"{name}_{settings.replica}" + (f"_of_{settings.replicas}" if settings.replicas > 1 else "")


def _has_seed(config: Any) -> bool:
    return isinstance(getattr(config, "seed", None), int)
