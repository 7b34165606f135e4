"""Any Atropos environment, unmodified:

    python -m recipe.atropos.utils.env_adapter serve|evaluate|process --env MODULE:Class|FILE.py[:Class] [its own flags]

or, in code, ``adapt(load_environment(target))``. What is mended stands in docs/environments.md, and in the modules of
the mixins; ``--reward-bridge FILE.yaml`` shapes the scores (``reward_bridge``). Exit status: 0 done, 1 the environment
failed, 2 a wrong target or flag, 130 interrupted, 143 terminated.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from atroposlib.envs.base import BaseEnv

from recipe.atropos.adapter.checked import Checked
from recipe.atropos.adapter.durable import Durable
from recipe.atropos.adapter.evaluation import Evaluating
from recipe.atropos.adapter.flags import CommandLine, UsageError, take_flag
from recipe.atropos.adapter.lifecycle import Lifecycle
from recipe.atropos.adapter.pacing import Paced
from recipe.atropos.adapter.registration import Registered
from recipe.atropos.adapter.reporting import Reporting
from recipe.atropos.adapter.reward_bridge import RewardBridge, RewardBridgeError, read_bridge
from recipe.atropos.adapter.sampled import SampledTokens
from recipe.atropos.adapter.shaping import shaped_by
from recipe.atropos.adapter.teacher import Taught
from recipe.atropos.adapter.weight_versions import WeightVersions
from recipe.atropos.errors import AtroposError, one_line_errors
from recipe.atropos.utils.private_process import hide_in_output, take_secret_flags

# In front of the environment, in the order in which calls pass through them. The command line and the life of the
# process stand around everything; Reporting before all that count; Checked before SampledTokens, which reads rows of
# one length and plain numbers; Paced last, because it only orders the posts. WeightVersions stamps what leaves,
# wherever it stands. A mixin that changes scores belongs right after Checked, which observes the raw ones.
_MIXINS = (CommandLine, Lifecycle, Reporting, Registered, Evaluating, Checked, SampledTokens, WeightVersions, Paced)
# Behind it, where its own methods find BaseEnv's with super(): what an environment overrides stays in force.
_BASES = (Durable,)

CHECK = "--check"
"""Flag: end with status 0 where the environment would be built, or say what is wrong with target, class or flags."""

_HELP = """\
usage: python -m recipe.atropos.utils.env_adapter serve|evaluate|process --env TARGET [the environment's own flags]

TARGET is MODULE, MODULE:Class, FILE.py or FILE.py:Class, any subclass of atroposlib's BaseEnv; the class is needed
only where there are several. The flags are BaseEnv's (--env.KEY, --openai.KEY, --config FILE); --help after a target
lists them. Here --openai.KEY always counts, a negative number may follow a space, an unknown flag is an error.
--reward-bridge FILE.yaml shapes its scores; --check ends before the environment is built, with its flags checked.
What else differs from running the environment itself: docs/environments.md.
"""


class EnvironmentTargetError(AtroposError, ValueError):
    """A target that names no environment; the message says why, and what to give instead."""


def load_environment(target: str) -> type[BaseEnv]:
    """The class that ``MODULE:Class``, ``MODULE``, ``FILE.py:Class`` or ``FILE.py`` names.

    Without a class, the one subclass of ``BaseEnv`` that the module itself defines and that is not abstract. A file is
    imported as ``python FILE.py`` would, its folder first; where it has relative imports, or names one of its own
    folders (``from environments.x import y``), as a part of that package. Modules of atroposlib that the installed one
    lacks come from the checkout of Atropos that the file is in.

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
        if inspect.isabstract(found):
            lacking = ", ".join(sorted(found.__abstractmethods__))
            raise EnvironmentTargetError(f"{target}: {name} is no whole environment: it lacks {lacking}")
        return found
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseEnv) and value.__module__ == module.__name__
    ]
    whole = [environment for environment in own if not inspect.isabstract(environment)]
    if len(whole) != 1:
        names = ", ".join(dict.fromkeys(environment.__name__ for environment in whole)) or "none"
        raise EnvironmentTargetError(f"{target}: give {place}:CLASS; environments that it defines: {names}")
    return whole[0]


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
    if not path.is_file():
        raise EnvironmentTargetError(f"{path}: no such file")
    path = path.resolve()
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__file__", None) == str(path):
            return module
    _first_on_path(path.parent)
    levels = _levels_of_relative_imports(path)
    while True:
        try:
            return _import_in_package(path, levels) if levels else _import_script(path)
        except ModuleNotFoundError as error:
            if _found_in_checkout(path, error.name or ""):
                continue
            top = (error.name or "").partition(".")[0]
            above = next((folder.parent for folder in path.parents if folder.name == top), None)
            if above is None or str(above) in sys.path:
                raise
            sys.path.append(str(above))


def _found_in_checkout(path: Path, name: str) -> bool:
    """Whether the checkout around ``path`` has the module ``name`` of atroposlib that is not installed; it is added."""
    package, _, module = name.rpartition(".")
    for folder in path.parents if package.split(".")[0] == "atroposlib" else ():
        own = folder.joinpath(*package.split("."))
        places = importlib.import_module(package).__path__
        if (own / f"{module}.py").is_file() and str(own) not in places:
            places.append(str(own))
            return True
    return False


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _levels_of_relative_imports(path: Path) -> int:
    """The most dots of any ``from ...x import y`` in a file; 0 where all its imports are absolute."""
    tree = ast.parse(path.read_bytes(), filename=str(path))
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


def _import_script(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_in_package(path: Path, levels: int) -> ModuleType:
    root = path.parents[levels]
    while (root / "__init__.py").is_file():
        root = root.parent
    _first_on_path(root)
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    module = importlib.import_module(name)
    if getattr(module, "__file__", None) != str(path):
        raise EnvironmentTargetError(
            f"{path}: it has relative imports, so it is imported as {name}, but Python finds {module.__file__} by that "
            f"name; rename the folder {path.parent}"
        )
    return module


def adapt(environment: type[BaseEnv], bridge: RewardBridge | None = None) -> type[BaseEnv]:
    """A subclass of ``environment`` with every mend that it lacks, itself where it lacks none; its name stays.

    With ``bridge`` its scores are shaped before they are sent.
    """
    mixins = list(_MIXINS)
    if hasattr(environment, "teacher_config_init"):
        mixins.append(Taught)
    if bridge is not None:
        mixins.insert(mixins.index(Checked) + 1, shaped_by(bridge))
    before = tuple(mixin for mixin in mixins if not issubclass(environment, mixin))
    behind = tuple(base for base in _BASES if not issubclass(environment, base))
    if not before and not behind:
        return environment
    body = {"__doc__": environment.__doc__, "__module__": environment.__module__}
    return type(environment.__name__, (*before, environment, *behind), body)


def run(target: str, arguments: list[str], prepare: Callable[[type[BaseEnv]], type[BaseEnv]] = adapt) -> NoReturn:
    """Load a target and be its command line, with ``arguments``; ``prepare`` makes of the class what is run."""
    try:
        environment = load_environment(target)
    except EnvironmentTargetError as error:
        wrong_usage(f"--env {error}")
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        wrong_usage(f"--env {target} cannot be imported: {type(error).__name__}: {error}")
    sys.argv[1:] = arguments
    with one_line_errors():
        prepare(environment).cli()
    sys.exit(0)  # an environment's own cli() may return


def wrong_usage(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def main() -> None:
    secret_flags = take_secret_flags()
    hide_in_output(secret_flags)
    arguments = [*sys.argv[1:], *secret_flags]
    if CHECK in arguments:
        arguments.remove(CHECK)
        CommandLine.only_checked = True
    try:
        target, bridge_file = take_flag(arguments, "--env"), take_flag(arguments, "--reward-bridge")
        bridge = None if bridge_file is None else read_bridge(bridge_file)
    except UsageError as error:
        wrong_usage(str(error))
    except RewardBridgeError as error:
        wrong_usage(f"--reward-bridge {error}")
    if "--help" in arguments:
        print(_HELP)
    elif target is None:
        wrong_usage(_HELP.splitlines()[0])
    if target is not None:
        run(target, arguments, lambda environment: adapt(environment, bridge))


if __name__ == "__main__":
    main()
