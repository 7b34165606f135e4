"""Load the environment class that a target names, from a module or a file, imported as its authors run it."""

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

from atroposlib.envs.base import BaseEnv

from recipe.atropos.errors import AtroposError


class EnvironmentTargetError(AtroposError, ValueError):
    """A target that names no environment; the message says why, and what to give instead."""


def load_environment(target: str) -> type[BaseEnv]:
    """Return the class that ``MODULE:Class``, ``MODULE``, ``FILE.py:Class`` or ``FILE.py`` names.

    Without a class name, it is the one concrete subclass of ``BaseEnv`` that the module itself defines. A file is
    imported as ``python FILE.py`` would or, if it has relative imports, as part of its package; parent folders that it
    imports from (``from environments.x import y``) become importable. Modules of atroposlib that are not installed come
    from the Atropos checkout around the file.

    Raises:
        EnvironmentTargetError: no such module, file or class, or no unique one; an abstract class; or no ``BaseEnv``.
            With a cause: what the module raised when it was imported.
    """
    place, _, name = target.partition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place, target)
    except EnvironmentTargetError:
        raise
    except (Exception, SystemExit) as error:
        frames, file = traceback.extract_tb(error.__traceback__), str(Path(place).resolve())
        at = [f" (line {frame.lineno})" for frame in frames if frame.filename == file][-1:]
        what = f"{type(error).__name__}: {error}{''.join(at)}"
        raise EnvironmentTargetError(f"{target} cannot be imported: {what}") from error
    if name:
        found = getattr(module, name, None)
        if not (isinstance(found, type) and issubclass(found, BaseEnv)):
            raise EnvironmentTargetError(f"{target}: {place} has no class {name} that derives from BaseEnv")
    else:
        classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, BaseEnv)]
        own = dict.fromkeys(cls for cls in classes if cls.__module__ == module.__name__)
        whole = [cls for cls in own if not inspect.isabstract(cls)] or list(own)
        if len(whole) != 1:
            names = ", ".join(cls.__name__ for cls in whole)
            has = f"environments that it defines: {names}" if names else "none of its own classes derives from BaseEnv"
            raise EnvironmentTargetError(f"{target}: give {place}:CLASS; {has}")
        [found] = whole
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise EnvironmentTargetError(f"{target}: {found.__name__} is no whole environment: it lacks {lacking}")
    return found


def _import_module(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise EnvironmentTargetError(
                f"{target}: no module {error.name}; put its folder on PYTHONPATH, or give the path of a .py file"
            ) from None
        raise


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise EnvironmentTargetError(f"{path}: no such file")
    path = path.resolve()
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__file__", None) == str(path):
            return module
    _first_on_path(path.parent)
    imports = [node for node in ast.walk(ast.parse(path.read_bytes(), str(path))) if isinstance(node, ast.ImportFrom)]
    levels = max((node.level for node in imports), default=0)  # dots before a name, 0 if all imports are absolute
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
    """Return whether the checkout around ``path`` has atroposlib's missing module ``name``; make it importable."""
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
