"""Command line of an environment, on which every flag takes effect.

BaseEnv parses ``sys.argv`` twice, with argparse and with a parser of its own, and uses values only from the second.
Where they disagree, BaseEnv silently loses values. With the adapter:

- ``--openai.KEY`` takes effect whatever ``config_init`` returns, for serve, evaluate and process: one configuration or
  a ``ServerBaseline``, for which BaseEnv ignores the address, or several, for which it rejects the flags. With several,
  ``--openai.base_url`` names the only server to use, and flags without it change each of them. Several servers in the
  ``--config`` file are left to BaseEnv, which rejects flags next to them.
- What neither flags nor file say about the servers is filled in; see ``adapter.defaults``.
- A negative number may follow its flag after a space (BaseEnv reads ``--env.total_steps -1`` as True, so as 1).
- ``--adapter.NAME`` flags are the adapter's own (``settings``).
- An unknown or abbreviated flag is an error that names the closest flag; so is a value of the wrong type. Both exit
  with status 2.
"""

import asyncio
import difflib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, ServerBaseline
from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.utils.cli import extract_namespace, get_double_dash_flags
from pydantic import BaseModel, ValidationError

from recipe.atropos.adapter.defaults import WrongKey, complete
from recipe.atropos.adapter.recorded_calls import cause_of
from recipe.atropos.adapter.replicas import sharing
from recipe.atropos.adapter.settings import PREFIX, WARNING, AdapterSettings
from recipe.atropos.errors import AtroposError, EnvironmentFailure
from recipe.atropos.utils.private_process import hide_in_output
from recipe.atropos.utils.process_exit import TERMINATED, end_on_sigterm, end_process
from recipe.atropos.utils.secret import API_KEY_VARIABLE

_OPENAI = f"{OPENAI_NAMESPACE}{NAMESPACE_SEP}"
_BASELINE_PORTS = range(9004, 9008)  # where BaseEnv looks for servers if none are configured
_SETTINGS = tuple(f"{PREFIX}{name}" for name in AdapterSettings.model_fields)
_SUBCOMMANDS = ("serve", "evaluate", "process")
_NEGATIVE = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|-inf|-nan", re.IGNORECASE)


class UsageError(AtroposError, ValueError):
    """Invalid arguments; the message names them and what to give instead."""


def take_flag(arguments: list[str], flag: str) -> str | None:
    """Remove ``--flag VALUE`` or ``--flag=VALUE`` from ``arguments``, and return VALUE; None if it is not there.

    Raises:
        UsageError: the flag is there without a value.
    """
    for i, argument in enumerate(arguments):
        name, joined, value = argument.partition("=")
        if name == flag:
            if not joined:
                [value] = arguments[i + 1 : i + 2] or ["--"]
                if value.startswith("--"):
                    raise UsageError(f"{flag} needs a value")
            del arguments[i : i + (1 if joined else 2)]
            return value
    return None


def take_settings(arguments: list[str]) -> AdapterSettings | None:
    """Remove the adapter's own flags from ``arguments``, and return the settings; None if there are none.

    Raises:
        UsageError: a flag has no value, or an invalid one.
    """
    given = {flag.removeprefix(PREFIX): take_flag(arguments, flag) for flag in _SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return AdapterSettings(**given) if given else None
    except ValidationError as error:
        [problem, *_] = error.errors()
        name = problem["loc"][0]
        raise UsageError(f"{PREFIX}{name}={problem['input']}: {problem['msg']}") from error


def join_negative_values(arguments: list[str]) -> list[str]:
    """Turn ``--flag -1`` into ``--flag=-1``, which every parser of the command line understands."""
    joined: list[str] = []
    for argument in arguments:
        if joined and re.fullmatch("--[^=]+", joined[-1]) and _NEGATIVE.fullmatch(argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def check_flags(arguments: list[str], known: set[str]) -> None:
    """Raise UsageError, naming the closest of ``known``, for a flag that is not among them."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            near = difflib.get_close_matches(flag, known, n=1) or sorted(k for k in known if k.startswith(flag))[:1]
            raise UsageError(f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else "; see --help"))


def server_configs(
    default: Any, flags: dict[str, Any], in_file: Sequence[dict[str, Any]] = ()
) -> tuple[ServerBaseline | list[APIServerConfig], bool]:
    """Return what ``config_init`` must return so that ``flags`` (without ``openai.``) and a file's servers apply.

    The second value: the flags are already applied, and BaseEnv must not see them, since it rejects them for several.
    """
    if isinstance(default, APIServerConfig):
        return [default], False
    if isinstance(default, ServerBaseline):
        if not flags and not in_file:
            return default, False
        url, rest = "http://localhost:{}/v1", default.model_dump()
        default = [APIServerConfig(**rest, base_url=url.format(port), api_key="x") for port in _BASELINE_PORTS]
    if len(default) < 2 or len(in_file) == 1 or "base_url" in flags:
        return default[:1], False
    if not flags or in_file:
        return default, False
    return [type(config)(**(config.model_dump() | flags)) for config in default], True


class CommandLine:
    """Mixin of ``AdaptedEnv``; see the module docstring."""

    _umask: int | None = None  # the process's own, while a stricter one is set
    only_checked = False  # exit where the environment would be built, with target, class and flags checked
    __completed: tuple[Any, Any] | None = None  # what the command line makes of the environment's own defaults

    def __new__(cls, config: BaseEnvConfig | None = None, *_: Any, **__: Any) -> "CommandLine":
        if cls.only_checked:
            if check := getattr(cls, "check_config", None):  # an environment's own check, such as of its data
                check(config)
            if said := sharing(cls, config, cls.adapter_settings):
                print(f"{WARNING}{said}")
            print("--check: the class is found and its flags are right; nothing was created or started")
            raise SystemExit(0)
        return super().__new__(cls)

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        return cls.__completed or cls.__own_defaults()

    @classmethod
    def __own_defaults(cls) -> tuple[BaseEnvConfig, Any]:
        """Return what the environment's ``config_init`` does; raise EnvironmentFailure if that is no such pair."""
        match made := super().config_init():
            case (BaseEnvConfig(), APIServerConfig() | ServerBaseline() | [APIServerConfig(), *_]):
                return made
        types = [type(each).__name__ for each in made] if isinstance(made, tuple | list) else repr(made)
        raise EnvironmentFailure(
            f"{cls.__name__}.config_init() returns {types!s:.200}; return a configuration and a list of servers, as in "
            'CONFIG, [APIServerConfig(server_type="sglang")]'
        )

    @classmethod
    def cli(cls) -> None:
        """Run BaseEnv's command line, and then end the process, with no child left; see ``utils.process_exit``."""
        code = 1
        try:
            cls.owns_process = True
            end_on_sigterm()
            hide_in_output([os.environ.get(API_KEY_VARIABLE, "")])  # BaseEnv prints its servers' keys
            cls.__prepare_arguments()
            if "evaluate" in sys.argv:  # BaseEnv writes the servers' key to a file, which _run_evaluation rewrites
                cls._umask = os.umask(0o077)
            super().cli()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        except ValidationError as error:
            if not error.title.startswith("Cli"):  # raised by the environment, not by its flags
                traceback.print_exc()
            code = 2
            for problem in error.errors():
                name = ".".join(map(str, problem["loc"]))
                lacking = f"{name} needs a default in the class, or a value in config_init()"  # flags come later
                what = lacking if problem["type"] == "missing" else f"--{name}={problem['input']!r}"
                print(f"error: {error.title}: {what}: {problem['msg']}", file=sys.stderr)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except asyncio.CancelledError:
            code = TERMINATED
        except AtroposError as error:
            if isinstance(error, EnvironmentFailure) and error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            print(f"error: {error}", file=sys.stderr)
            code = 2 if isinstance(error, UsageError | WrongKey) else 1
        except Exception as error:
            traceback.print_exc()
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            print(f"error: {type(cause := cause_of(error)).__name__}: {cause}{notes}", file=sys.stderr)
        end_process(code)

    @classmethod
    def __prepare_arguments(cls) -> None:
        arguments = join_negative_values(sys.argv[1:])
        if not any(argument in _SUBCOMMANDS or argument == "--help" for argument in arguments):
            raise UsageError(f"say what to do: {', '.join(_SUBCOMMANDS)}, or --help")
        sys.argv[1:] = arguments
        if settings := take_settings(sys.argv):
            cls.adapter_settings = settings
        flags = get_double_dash_flags()
        if (path := flags.get("config")) and not Path(path).is_file():
            raise UsageError(f"--config={path}: no such file")
        file = yaml.safe_load(Path(path).read_text() if path else "") or {}
        openai = extract_namespace(flags, _OPENAI)
        _check_names(OPENAI_NAMESPACE, openai, APIServerConfig)
        servers = file.get(OPENAI_NAMESPACE) or []
        servers = [servers] if isinstance(servers, dict) else servers
        env_in_file = file.get(ENV_NAMESPACE) or {}
        env_config, default = cls.__own_defaults()
        try:
            _check_names(ENV_NAMESPACE, env_in_file, type(env_config))
            for one in servers:
                _check_names(OPENAI_NAMESPACE, one, APIServerConfig)
        except UsageError as error:
            raise UsageError(f"--config={path}: {error}") from error
        configs, applied = server_configs(default, openai, servers)
        for name in openai if applied else ():  # which BaseEnv must not see
            take_flag(sys.argv, f"--{_OPENAI}{name}")
        for subcommand in set(_SUBCOMMANDS) & set(arguments):
            known = cls.__flags_of(subcommand) | {"--help", *_SETTINGS}
            if subcommand == "evaluate":  # teacher flags are only serve's; a launcher gives both the same flags
                for flag in cls.__flags_of("serve") - known:
                    take_flag(sys.argv, flag)
            check_flags(sys.argv[1:], known)
        if isinstance(configs, list) and not cls.only_checked:
            first = servers[0] if servers else {}
            if len(servers) > 1:  # BaseEnv takes several of a file as they are; the tokenizer is the environment's, too
                first = APIServerConfig(**first).model_dump(exclude={"tokenizer_name"})
            env_given = extract_namespace(flags, f"{ENV_NAMESPACE}{NAMESPACE_SEP}") | env_in_file
            env_config, configs = complete(env_config, configs, first | openai, env_given, "serve" in arguments)
        cls.__completed = env_config, configs

    @classmethod
    def __flags_of(cls, subcommand: str) -> set[str]:
        return {f"--{name}" for name in getattr(cls, f"get_cli_{subcommand}_config_cls")().model_fields}


def _check_names(namespace: str, given: Iterable[str] | None, model: type[BaseModel]) -> None:
    """Raise UsageError for a key that BaseEnv would ignore."""
    prefix = f"--{namespace}{NAMESPACE_SEP}"
    check_flags([prefix + name for name in given or ()], {prefix + name for name in model.model_fields})
