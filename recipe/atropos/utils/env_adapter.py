"""Any Atropos environment, unmodified:

    python -m recipe.atropos.utils.env_adapter serve|evaluate|process --env MODULE:Class|FILE.py[:Class] [its own flags]

or, in code, ``adapt(load_environment(target))``. ``--reward-bridge FILE.yaml`` shapes its scores (``reward_bridge``).
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from atroposlib.envs.base import BaseEnv

from recipe.atropos.environments.pacing import Paced
from recipe.atropos.environments.reporting import Reporting
from recipe.atropos.environments.shaping import shaped_by
from recipe.atropos.environments.weight_versions import WeightVersions
from recipe.atropos.utils.reward_bridge import RewardBridge, RewardBridgeError, read_bridge

_MIXINS = (Reporting, WeightVersions, Paced)  # in the order in which calls pass through them


class EnvironmentTargetError(ValueError):
    """A target that names no environment; the message says why, and what to give instead."""


def load_environment(target: str) -> type[BaseEnv]:
    """The class that ``MODULE:Class``, ``MODULE``, ``FILE.py:Class`` or ``FILE.py`` names.

    Without a class, the one subclass of ``BaseEnv`` that the module itself defines.

    Raises:
        EnvironmentTargetError: there is no such module, file or class, it is no ``BaseEnv``, or several could be meant.
        ImportError and whatever else the module raises when it is imported.
    """
    place, _, name = target.partition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place, target)
    if name:
        found = getattr(module, name, None)
        if not (isinstance(found, type) and issubclass(found, BaseEnv)):
            raise EnvironmentTargetError(f"{target}: {place} has no class {name} that derives from BaseEnv")
        return found
    candidates = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseEnv) and value.__module__ == module.__name__
    ]
    if len(candidates) != 1:
        names = ", ".join(candidate.__name__ for candidate in candidates) or "none"
        raise EnvironmentTargetError(f"{target}: give {place}:CLASS; classes there that derive from BaseEnv: {names}")
    return candidates[0]


def _import_module(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise EnvironmentTargetError(
                f"{target}: no module {error.name}; put its folder on PYTHONPATH, or give the path of a .py file"
            ) from error
        raise


def _import_file(path: Path) -> ModuleType:
    """As ``python FILE.py`` finds what it imports: its own folder comes first."""
    if not path.is_file():
        raise EnvironmentTargetError(f"{path}: no such file")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def adapt(environment: type[BaseEnv], bridge: RewardBridge | None = None) -> type[BaseEnv]:
    """A subclass of ``environment`` with every mend that it lacks; its name and its command line stay.

    With ``bridge`` its scores are shaped before they are sent.
    """
    mixins = tuple(mixin for mixin in _MIXINS if not issubclass(environment, mixin))
    if bridge is not None:
        mixins = (shaped_by(bridge), *mixins)
    body = {"__doc__": environment.__doc__, "__module__": environment.__module__}
    return type(environment.__name__, (*mixins, environment), body)


def main() -> None:
    arguments = sys.argv[1:]
    if "--env" not in arguments[:-1]:
        sys.exit(f"usage: {__spec__.name} serve|evaluate|process --env MODULE:Class|FILE.py[:Class] [flags]")
    position = arguments.index("--env")
    target = arguments[position + 1]
    del arguments[position : position + 2]
    bridge = None
    if "--reward-bridge" in arguments[:-1]:
        position = arguments.index("--reward-bridge")
        try:
            bridge = read_bridge(arguments[position + 1])
        except RewardBridgeError as error:
            sys.exit(f"--reward-bridge {error}")
        del arguments[position : position + 2]
    sys.argv[1:] = arguments
    try:
        environment = adapt(load_environment(target), bridge)
    except EnvironmentTargetError as error:
        sys.exit(f"--env {error}")
    environment.cli()


if __name__ == "__main__":
    main()
