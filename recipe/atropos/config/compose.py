"""The checked configuration of a command line: ``trainer.yaml``, a preset, a file, and ``key=value`` arguments; and the
complete configuration of a run, ``config.yaml`` in its folder, which is only read.

Guarantees:

- a key that does not exist is an error that names the nearest one, whether it is given as ``key``, ``+key``, ``++key``
  or inside ``key={...}``; so is a verl key that has no effect here, if its value differs from the shipped one, and,
  wherever it occurs, a key of another recipe for Atropos, whose error names the key of this one; one error names them
  all, each on its line;
- every value is checked by ``schema``;
- verl, torch and Ray are not imported.

``config=FILE`` names the user's YAML file, whose values override those of ``trainer.yaml`` and the preset, and are
overridden by the other arguments. Its mappings are merged, and ``preset: NAME`` in it chooses a preset. If it is the
complete configuration of a run, the values that the run was given are taken, from the file beside it.

The values of arguments follow Hydra's override grammar. A free-form mapping (``FREE``) is replaced as a whole by
``key={...}``, so ``environment.args={}`` empties it, and extended by ``key.name=value``.
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import json
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from recipe.atropos.config.derived import set_derived
from recipe.atropos.config.keys import (
    as_given,
    checked,
    flat,
    keys_of,
    of_all,
    unsupported,
    without_effect,
    wrong_values,
)
from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.config.unsupported import CONDITIONAL
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.secret import (
    COMPLETE,
    HIDDEN,
    check_not_hidden,
    escaped,
    is_secret,
    read_config_yaml,
    restore,
    shown_value,
)

_FOLDER = Path(__file__).parent
# Keys for a trainer without the launcher, and what a user of the launcher gives instead.
LAUNCHER_KEYS = {
    "evaluation.evaluated_file": "nothing",
    "inference.gateway": "inference.host and inference.gateway_port",
    "inference.urls": "inference.servers, inference.host and inference.port",
    "trainer.atropos.api_url": "api.host and api.port",
    "trainer.atropos.replay": "verl-atropos replay RUN",
    "trainer.atropos.startup_timeout": "inference.start_timeout",
}


class _Folders(SearchPathPlugin):
    """Let Hydra find verl's configuration, and ``trainer.yaml`` from a primary configuration in another folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        verl = importlib.util.find_spec("verl")  # not imported, which takes seconds and warns
        if verl is None or not verl.submodule_search_locations:
            raise ConfigurationError("verl is not installed in this environment; install it as the README says")
        for folder in (_FOLDER, Path(verl.submodule_search_locations[0]) / "trainer" / "config"):
            search_path.append("recipe.atropos", f"file://{folder}")


Plugins.instance().register(_Folders)


def presets() -> list[str]:
    return sorted(path.stem for path in (_FOLDER / "preset").glob("*.yaml"))


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
    with initialize_config_dir(str(_FOLDER), version_base=None):
        return pickle.dumps(compose("trainer", overrides=[f"preset={preset}"] if preset is not None else []))


def load_config(overrides: Sequence[str]) -> DictConfig:
    """Compose, resolve and check.

    Raises:
        ConfigurationError: naming key and value, and the nearest key, the choices, or what to set instead.
    """
    return set_derived(resolved(compose_config(overrides)))


def resolved(composed: DictConfig) -> DictConfig:
    """Return a resolved and checked copy of what ``compose_config`` returned; raises as ``load_config``.

    A literal ``${`` in it is escaped, as in what was composed, so that it can be resolved again.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigurationError(_first_line(error)) from error
    if wrong := wrong_values(values):
        raise ConfigurationError("\n".join(wrong.values()))
    return OmegaConf.create(escaped(values), flags={"struct": OmegaConf.is_struct(composed)})


def with_values(composed: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return a copy with other values, by key; keys that refer to them follow."""
    config = copy.deepcopy(composed)
    with open_dict(config):
        for key, value in values.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def compose_config(overrides: Sequence[str], tell: Callable[[str], None] = lambda _: None) -> DictConfig:
    """Compose as ``load_config`` does, with interpolations, and values not yet checked by the schema.

    ``tell`` is called with messages for the user.
    """
    config = compose_values(given_values(overrides), tell)
    check_not_hidden(OmegaConf.to_container(config))
    return config


def compose_values(
    given: list[tuple[str, Any]], tell: Callable[[str], None] = lambda _: None, base: DictConfig | None = None
) -> DictConfig:
    """Compose what ``given_values`` returns, over ``base`` or, without it, ``trainer.yaml`` and a preset."""
    preset = None if base else chosen_preset(given)
    config = copy.deepcopy(base) if base else shipped(preset)
    known = dict(keys_of(OmegaConf.to_container(config)))
    before = {key: OmegaConf.select(config, key) for key in CONDITIONAL}
    items = [item for key, value in given if base or key != "preset" for item in flat(key, value, known)]
    changes, wrong = of_all(lambda item: checked(item[0], item[1], known, config), items)
    _drop_for_another_target(config, preset, changes, tell)
    with open_dict(config):
        for key, value in (change for change in changes if not unsupported(change[0])[0]):
            try:
                OmegaConf.update(config, key, value, merge=False, force_add=True)
            except OmegaConfBaseException as error:
                raise ConfigurationError(f"{key}={shown_value(key, value)}: {_first_line(error)}") from error
    for key, value in changes:
        if unsupported(key)[0] and value not in (known[key], OmegaConf.select(config, key)):
            wrong.append(str(without_effect(key, value)))
    for key in filter(CONDITIONAL.get, dict(changes)):
        with contextlib.suppress(OmegaConfBaseException):  # a wrong reference is reported later
            value = OmegaConf.select(config, key)
            if value not in (before[key], None) and (value != 0 or value is False):
                wrong += _unmet_conditions(config, key, value)
    if wrong:
        keys = {key for key, _ in changes}
        values = wrong_values(OmegaConf.to_container(config))
        raise ConfigurationError("\n".join([*wrong, *(line for key, line in values.items() if key in keys)]))
    return config


def _unmet_conditions(config: DictConfig, key: str, value: Any) -> Iterator[str]:
    """Yield why a key's value has no effect, if it depends on another key that has no value for it."""
    switch, values = CONDITIONAL[key]
    found = OmegaConf.select(config, switch)
    if found not in values if values else not found:
        advice = f"set that to {' or '.join(map(as_given, values))}" if values else "give that too"
        yield f"{key}={as_given(value)} has no effect with {switch}={as_given(found)}; {advice}, or leave it out"


def load_complete(path: Path, hidden: Sequence[str] = ()) -> DictConfig:
    """Load the configuration of a run as its launcher wrote it, resolved and checked; nothing is composed.

    ``hidden``: what ``secret.hidden_settings`` returned, in JSON.

    Raises:
        ConfigurationError: there is no such file, or its values are not valid in this version.
    """
    config = _read_run(path)
    restore(config, map(json.loads, hidden))
    return set_derived(resolved(config))


def load_recorded(path: Path) -> DictConfig:
    """Load a configuration that an earlier version of the recipe may have written: what it lacks has its default.

    Raises:
        ConfigurationError: as ``load_complete``.
    """
    defaults, recorded = compose_config([]), _read_run(path)
    OmegaConf.set_struct(defaults, False)
    return set_derived(resolved(OmegaConf.merge(defaults, recorded)))


def _read_run(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigurationError(f"{path} is not there; give the folder of a run that launch_services started")
    return read_config_yaml(path)


def quoted(value: str | Path) -> str:
    """Quote a value for Hydra's override grammar, as a string even if it contains ``=``, commas or spaces."""
    # Hydra takes backslashes literally, except before a quote.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value)) + "'"


def given_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys that overrides set, however spelled: ``+run.dir=a`` and ``run={dir: a}`` both set run.dir.

    Raises:
        ConfigurationError: an override cannot be read, or a file is not a mapping.
    """
    return {key for item in given_values(overrides) for key, _ in keys_of(dict([item]))}


def given_values(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the values of a file, and then the others, as (key, value) without the ``+`` before a key.

    Raises:
        ConfigurationError: as ``given_keys``.
    """
    parsed, wrong = of_all(_parse, overrides)
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    given = [(override.key_or_group, override.value()) for override in parsed]
    files = [value for key, value in given if key == "config"]
    if len(files) > 1:
        raise ConfigurationError(f"config={files[-1]}: a second file, after {files[0]}; merge them into one")
    others = [item for item in given if item[0] != "config"]
    named = any(key == "run.name" for item in others for key, _ in keys_of(dict([item])))
    return [item for file in files for item in leaves(_read(file, named))] + others


def _read(file: Any, named: bool) -> dict[str, Any]:
    """Return what a file gives. That of a run gives its folder too, unless ``named``: then another run is begun."""
    path = Path(str(file)).expanduser()
    try:
        with path.open("rb") as opened:
            complete = opened.readline() == COMPLETE  # with what follows from other values, too
        path = RunDir(path.parent).given if complete else path
        if not path.exists():
            raise ConfigurationError(
                f"config={file}: an earlier version or a replay wrote it, without {path.name}, which has what was "
                "given; give the arguments of that run (its own command resumes it, and verl-atropos replay reads it)"
            )
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigurationError(f"config={file}: {' '.join(str(error).split())}; give a YAML file") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"config={file}: it holds no mapping of keys to values")
    if complete and named:
        (found.get("run") or {}).pop("dir", None)
    for key in ("defaults", "hydra"):
        if key in found:
            raise ConfigurationError(
                f"config={file}: {key}: has no effect here: the file overrides trainer.yaml; preset: NAME chooses one"
            )
    return found


def differences(config: DictConfig, base: DictConfig | None = None, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of ``config`` that ``base``, by default ``trainer.yaml``, does not have, by dotted key, and
    those of ``given`` keys; with interpolations.
    """
    old, new = (dict(leaves(OmegaConf.to_container(each))) for each in (base or shipped(None), config))
    return {key: value for key, value in new.items() if key in given or key not in old or old[key] != value}


def leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return (dotted key, value) of a nested mapping; an empty mapping is a value, OmegaConf's "missing" is skipped."""
    return (item for item in keys_of(values) if item[1] != "???" and not (isinstance(item[1], dict) and item[1]))


def _parse(text: str) -> Override:
    name = re.split("[:=]", text)[0]
    shown = f"{name}={HIDDEN}" if any(map(is_secret, re.split(r"[^\w.-]+", text))) else text
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        quote = (
            ", and quote a value that holds spaces, commas, colons or braces: key='\"VALUE\"', in a list each: "
            "key='[\"VALUE\"]'"
        )
        raise ConfigurationError(f"{shown}: give key=value{quote if '=' in text else ''}") from error
    key = override.key_or_group
    if override.is_delete() or override.package is not None or key.split(".")[0] == "hydra":
        raise ConfigurationError(f"{shown}: give key=value; key=null leaves an option out, key={{}} empties a mapping")
    if override.is_sweep_override():
        raise ConfigurationError(f"{shown}: a value with commas needs brackets or quotes: {key}=[A,B], {key}='\"A,B\"'")
    return override


def chosen_preset(values: Sequence[tuple[str, Any]]) -> str | None:
    return next((value for key, value in reversed(values) if key == "preset"), None)


def _drop_for_another_target(
    config: DictConfig, preset: str | None, changes: list[tuple[str, Any]], tell: Callable[[str], None]
) -> None:
    """Drop a preset's args, reward bridge and credit if the user names another environment than the preset."""
    given = dict(changes)
    for key in [f"environments.{name}" for name in config.environments] or ["environment"]:
        settings = OmegaConf.select(config, key)
        program = given.get(f"{key}.command") or given.get(f"{key}.agent")
        target = program or given.get(f"{key}.target", settings.target)
        if preset is None or target == settings.target:
            continue
        for name, empty in (("args", {}), ("reward_bridge", None), ("credit", None)):
            if settings.get(name):
                tell(f"preset {preset}: its {key}.{name} is for {settings.target}, and left out for {target or 'null'}")
                settings[name] = empty
        if target is None and config.evaluation.every is not None:
            tell(f"preset {preset}: its evaluation.every is for {settings.target}, and left out for null")
            config.evaluation.every = None


def _first_line(error: OmegaConfBaseException) -> str:
    where = f"{error.full_key}: " if error.full_key else ""
    return where + str(error.msg or error).splitlines()[0]


# ---------------------------------------------------------------- options of train, doctor and plan


def _path(text: str) -> str:
    return text and quoted(Path(text).expanduser().resolve())


_OPTIONS: dict[str, tuple[str, Callable[[str], object], str, str]] = {  # key, how it is read, place holder and help
    "--preset": ("preset", str, "PRESET", "a file of config/preset, without .yaml; demo runs on two CPU cores"),
    "--config": ("config", _path, "FILE", "a YAML file of your own, over trainer.yaml and the preset"),
    "--steps": ("trainer.total_training_steps", int, "STEPS", "updates to train (trainer.total_training_steps)"),
    "--run-dir": ("run.dir", _path, "RUN_DIR", "folder of the run (run.dir); an unfinished run there is resumed"),
    "--model": (MODEL_KEY, quoted, "MODEL", f"local folder or hub name ({MODEL_KEY})"),
    "--resume-from": ("run.resume_from", quoted, "RUN[@STEP]", "begin with another run's weights (run.resume_from)"),
    "--gpus": (
        "trainer.n_gpus_per_node",
        int,
        "GPUS",
        "ranks of the trainer (trainer.n_gpus_per_node); on a CPU, processes",
    ),
    "--seed": ("seed", int, "SEED", "of the data, the sampling and the small policy (seed)"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    for option, (key, kind, metavar, text) in _OPTIONS.items():
        parser.add_argument(option, dest=key, type=kind, metavar=metavar, help=text)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")


def compose_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return these options as key=value; the user's own key=value come last and win."""
    given = {key: getattr(arguments, key) for key, *_ in _OPTIONS.values()}
    return [f"{key}={value}" for key, value in given.items() if value is not None] + arguments.overrides
