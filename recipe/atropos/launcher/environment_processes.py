"""The run's environments as processes: how each is started, what happens when it ends, and what it reports.

Guarantees:

- each runs through the adapter in a separate process, under its own name, and reports to ``environments/NAME.jsonl``;
  with ``replicas``, in several (``adapter.replicas``), of which each is started, restarted and abandoned by itself;
- an environment that ends before its first registration has failed to start: it ends the run, with its last log lines;
- one that ends later, or is lost with the node on which Ray has placed it, is restarted up to ``max_restarts`` times
  and then abandoned; when no other is left, the run ends;
- the registration of a process that has ended is removed from the Trajectory API, so that the other environments fill
  its share of each batch. Otherwise the allocation of a dead environment would block every batch forever.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import yaml

import recipe
from recipe.atropos.adapter.settings import WARNING, AdapterSettings
from recipe.atropos.config.derived import groups_in_flight, worker_timeout
from recipe.atropos.config.env_specs import EnvironmentSpec, options
from recipe.atropos.data.sampling import TEMPERATURE_VARIABLE
from recipe.atropos.errors import ConfigurationError, LaunchError, attempt_all
from recipe.atropos.inference.join_commands import adapter_flags, policy_settings
from recipe.atropos.launcher.services import RestartPolicy, Run
from recipe.atropos.run.record import ItemCounts
from recipe.atropos.sessions.client import SESSIONS_VARIABLE
from recipe.atropos.terminal.progress import progress, say
from recipe.atropos.trajectory_api.client import TrajectoryApiError
from recipe.atropos.utils.files import LineReader, append_line, read_lines
from recipe.atropos.utils.hosts import reachable, without_proxy
from recipe.atropos.utils.machine import run_program
from recipe.atropos.utils.private_process import is_loopback
from recipe.atropos.utils.process import Service, ServiceFailed, run_command, stop_all, unstopped
from recipe.atropos.utils.scratch import current
from recipe.atropos.utils.secret import API_KEY_VARIABLE, secret_variables, split_secret_flags

_ADAPTER = "recipe.atropos.utils.env_adapter"
_CHECK = "check-"  # name prefix of the processes that check flags
# By the adapter, beside what these install.
_NEEDED = ("atroposlib", "msgspec>=0.19", "omegaconf>=2.3", "orjson", "psutil", "wandb>=0.31")
_PROBE = """
import importlib.metadata, importlib.util, re, sys
def numbers(version):
    return [*map(int, re.findall("[0-9]+", version)[:2])]
def lacks(name, least):
    found = next(importlib.metadata.Distribution.discover(name=name), None)  # a folder on PYTHONPATH has none
    return importlib.util.find_spec(name) is None or found is not None and numbers(found.version) < numbers(least)
print(*sys.version_info[:2], *[need for need in sys.argv[1:] if lacks(*need.partition(">=")[::2])])
"""


def check_target(spec: EnvironmentSpec) -> None:
    """Raise ConfigurationError if ``target`` names neither a file nor a module that can be found.

    Which modules another interpreter finds, ``check_environments`` sees.
    """
    is_file = spec.place.endswith(".py")
    if spec.python is not None and not is_file:
        return
    try:
        found = Path(spec.place).is_file() if is_file else importlib.util.find_spec(spec.place) is not None
    except ModuleNotFoundError:  # a parent package is missing
        found = False
    if not found:
        raise ConfigurationError(
            f"{spec.key}.target={spec.target}: no such {'file' if is_file else 'module'}; give a module that can be "
            "imported (put its folder on PYTHONPATH), or the path of its .py file, with :Class where it has several"
        )


def check_environments(run: Run) -> None:
    """Check, in a separate process per environment, that its target can be imported and accepts its flags.

    Raises:
        ConfigurationError: naming the target or the flag as a key of the configuration.
    """
    specs = [*run.plan.specs.values()]
    try:
        # Its threads are daemons, so a launcher that is interrupted meanwhile does not wait for them.
        with progress(f"checking the flags of {', '.join(run.plan.specs)}"), ThreadPool(len(specs) or 1) as pool:
            problems = [problem for problem in pool.map(partial(_flag_problem, run), specs) if problem]
    finally:  # a terminal's Ctrl-C does not reach the processes
        for service in [service for service in unstopped if service.name.startswith(_CHECK)]:
            with contextlib.suppress(ServiceFailed):  # its guardian ends it with the launcher
                service.stop(grace=0)
    if problems:
        raise ConfigurationError("\n".join(problems))


def _interpreter_problem(spec: EnvironmentSpec) -> str | None:
    """Return why ``spec.python`` cannot run the adapter; None if it can, or is the launcher's."""
    if spec.python is None:
        return None
    named, python, path = f"{spec.key}.python={spec.python}", spec.interpreter, os.environ.get("PYTHONPATH", "")
    if shutil.which(python) is None:
        return f"{named}: no such program; give the path of an interpreter, such as VENV/bin/python"
    try:
        printed = run_program(python, "-c", _PROBE, *_NEEDED, timeout=spec.start_timeout, PYTHONPATH=path)
    except LaunchError as error:
        return f"{named}: {error}; give a Python interpreter"
    major, minor, *missing = printed.split()
    if (int(major), int(minor)) < (3, 11):
        return f"{named}: Python {major}.{minor}; the adapter needs 3.11 or newer"
    names = [need.partition(">=")[0] for need in missing]
    exact = " ".join(f"{name}=={importlib.metadata.version(name)}" for name in names)
    return f"{named}: the adapter needs {', '.join(missing)}; run {python} -m pip install {exact}" if missing else None


def _flag_problem(run: Run, spec: EnvironmentSpec) -> str | None:
    if problem := _interpreter_problem(spec):
        return problem
    anywhere = "http://127.0.0.1:1"
    command = [
        *environment_command(run, spec, "serve", anywhere, anywhere),
        *AdapterSettings(replica=0, replicas=spec.replicas).flags(),
        "--check",
    ]
    try:
        status, printed = run_command(
            f"{_CHECK}{spec.name}", command, env=environment_variables(run, spec), timeout=spec.start_timeout
        )
    except TimeoutError:
        return f"{spec.key}.target={spec.target}: not imported within {spec.key}.start_timeout={spec.start_timeout:g} s"
    if status == 0:
        for line in printed.splitlines():
            if line.startswith(WARNING):
                say(line.removeprefix(WARNING), spec.key, "bold yellow", width=0)
        return None
    lines = [line for line in printed.splitlines() if line.strip()] or [f"exit status {status}"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith(("error: ", "--env "))] or lines[-1:]
    return "\n".join(_as_key(line, spec.key) for line in errors)


def _as_key(line: str, key: str) -> str:
    """Rewrite ``--env.size`` as ``environment.args.size``, ``--env TARGET`` as ``environment.target=TARGET``."""
    line = re.sub(r"^Cli\w+: (?=--)", "", line).replace("--env ", f"{key}.target=")
    line = re.sub(r"--env\.(command|agent|items|score)\b", rf"{key}.\1", line)
    return re.sub(r"--(?:env\.|(?=openai\.))(?=\w)", f"{key}.args.", line)


def environment_command(
    run: Run, spec: EnvironmentSpec, subcommand: str, api_url: str, server_url: str, **flags: Any
) -> list[str]:
    """Return the environment's command line through the adapter. ``spec.args`` override everything except ``flags``.

    ``args.KEY`` becomes ``--env.KEY``, and ``args.openai.KEY`` becomes ``--openai.KEY``; null omits a flag.
    Flags that hold secrets are left out: see ``environment_variables``.
    """
    known = adapter_flags(*policy_settings(run.config, api_url, server_url)) | {
        "env.wandb_name": spec.name,  # also the name that it registers with
        "env.group_size": spec.group_size,
        "env.inference_weight": spec.weight,
        "env.min_batch_allocation": spec.min_batch_allocation,
        "env.worker_timeout": worker_timeout(run.config),
        **spec.program,
    }
    if spec.several and spec.min_batch_allocation is None:
        known["env.min_batch_allocation"] = 0.0  # else the API would apply the environment's own default
    if subcommand == "serve":
        known["slurm"] = False
    given = split_secret_flags({**known, **_own_flags(spec), **flags})[0]
    target = spec.target
    if spec.place.endswith(".py"):
        target = str(Path(spec.place).resolve()) + spec.target.removeprefix(spec.place)
    bridge = []
    if spec.reward_bridge is not None and subcommand == "serve":  # evaluation scores are never shaped
        block = yaml.safe_dump(dict(spec.reward_bridge), default_flow_style=True, sort_keys=False, width=10**6)
        bridge = ["--reward-bridge", block.strip()]
    return [spec.interpreter, "-m", _ADAPTER, subcommand, "--env", target, *bridge, *options(given)]


def serve_command(run: Run, spec: EnvironmentSpec, api_url: str, server_url: str, replica: int = 0) -> list[str]:
    """Return the command of an environment's replica that serves the run, with the adapter's settings."""
    settings = AdapterSettings(
        groups_in_flight=groups_in_flight(run.config, spec),
        report=str(run.files.environment_report(spec.name, replica)),
        replica=replica,
        replicas=spec.replicas,
        credit=None if spec.credit is None else json.dumps(dict(spec.credit)),
    )
    return environment_command(run, spec, "serve", api_url, server_url) + settings.flags()


def environment_variables(run: Run, spec: EnvironmentSpec) -> dict[str, str]:
    """Return the environment variables of an environment's process: the environments' key, the flags that are secret,
    for the adapter, the address of the session server, if there is one, the hosts that no proxy is asked for, and the
    same hash seed for all, on which generated problems may depend.

    An interpreter of its own also gets a folder with the recipe alone on PYTHONPATH, before the launcher's.
    """
    key = run.environments_key
    flags = split_secret_flags({"openai.api_key": key, **_own_flags(spec)})[1]
    variables = {API_KEY_VARIABLE: key, "PYTHONHASHSEED": "0"} | secret_variables(options(flags))
    if not is_loopback(run.config.inference.host):  # else its clients ask the machine's proxy, with the key
        variables |= without_proxy(os.environ, reachable(run.config.inference.host))
    if run.sessions_url is not None:
        variables[SESSIONS_VARIABLE] = run.sessions_url
    if spec.python is not None:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [_recipe_alone(), os.environ.get("PYTHONPATH")]))
    return variables


def _recipe_alone() -> str:
    """Return a folder that holds the recipe and nothing else that is installed beside it."""
    folder = current().folder / "recipe-alone"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "recipe").symlink_to(Path(recipe.__file__).resolve().parent)
    return str(folder)


def _own_flags(spec: EnvironmentSpec) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for key, value in spec.args.items():
        flags |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {f"env.{key}": value}
    return flags


@dataclass
class _State:
    """One replica: its current process, and the registrations of all. One of an earlier start of the run, which had
    more, has no process.
    """

    spec: EnvironmentSpec
    replica: int
    reader: LineReader
    service: Service | None = None
    started: float = 0.0
    is_registered: bool = False  # the current process
    was_registered: bool = False  # one of this start's processes
    registrations: list[tuple[int, int]] = field(default_factory=list)  # (pid, number at the API), not yet removed

    @property
    def name(self) -> str:
        return self.spec.service_of(self.replica)

    @property
    def pid(self) -> int | None:
        """Of the current process, if it runs."""
        return None if self.service is None or self.service.poll() is not None else self.service.pid

    def read(self) -> None:
        """Process the report's new lines."""
        for line in self.reader.new_lines():
            if "registered" in line:
                self.registrations.append((line["pid"], line["registered"]))
                self.is_registered |= self.service is not None and line["pid"] == self.service.pid
                self.was_registered |= self.is_registered

    def recovers(self, status: int) -> bool:
        """Whether a restart can help after this exit status: before the first registration, an error would repeat."""
        return self.was_registered or (self.spec.placement == "ray" and status == -signal.SIGKILL)


class EnvironmentProcesses:
    """Starts and monitors the environments; see the module. Call ``poll`` before every ``Run.check``."""

    def __init__(self, run: Run, api_url: str, server_url: str):
        self._run, self._api_url, self._server_url = run, api_url, server_url
        self._states = []
        for name, spec in run.plan.specs.items():
            replicas = max(spec.replicas, 1 + len([*run.files.environments.glob(f"{name}.[0-9]*.jsonl")]))
            readers = [LineReader(run.files.environment_report(name, replica)) for replica in range(replicas)]
            self._states += [_State(spec, replica, reader) for replica, reader in enumerate(readers)]
        for state in self._states:
            state.read()  # also what an interrupted run left, whose registrations the API keeps

    def start(self) -> None:
        for state in self._states:
            if state.replica < state.spec.replicas:
                policy = RestartPolicy(
                    partial(self._start, state),
                    state.spec.max_restarts,
                    "environment",
                    recovers=state.recovers,
                    key=f"{state.spec.key}.max_restarts",
                    optional=True,
                )
                if state.spec.placement == "ray":
                    policy.awaited = partial(self._run.cluster.awaited, state.name)
                self._run.restart_policies[state.name] = policy
                policy.start()

    def _start(self, state: _State) -> Service:
        spec, config = state.spec, self._run.config
        report = self._run.files.environment_report(spec.name, state.replica)
        report.parent.mkdir(parents=True, exist_ok=True)
        line = {"time": time.time(), "env": spec.name, "started": True, "restarted": state.service is not None}
        append_line(report, line | ({"replica": state.replica} if state.replica else {}))
        command = serve_command(self._run, spec, self._api_url, self._server_url, state.replica)
        variables = {
            TEMPERATURE_VARIABLE: str(config.actor_rollout_ref.rollout.temperature),
            **environment_variables(self._run, spec),
        }
        if spec.placement == "ray":
            log = self._run.files.log(state.name)
            variables["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
            state.service = self._run.cluster.start_program(state.name, command, log, **variables)
            self._run.add(state.service)
        else:
            state.service = self._run.start(state.name, command, **variables)
        state.started, state.is_registered = time.monotonic(), False
        return state.service

    async def poll(self, _: Any = None) -> None:
        """Read the reports, and remove the registrations of dead processes from the API.

        Raises:
            ServiceFailed: an environment has not registered within ``start_timeout`` at its first start.
        """
        for state in self._states:
            state.read()
            await self._deregister_dead(state)
            if state.service is not None:
                self._check_start(state)

    async def _deregister_dead(self, state: _State) -> None:
        for pid, number in tuple(state.registrations):
            if pid == state.pid:
                continue
            try:
                # A process that lives may have the number again, from an API with another store.
                if (state.pid, number) not in state.registrations:
                    await self._run.ask_api(self._api_url, lambda api, number=number: api.disconnect_env(number))
            except TrajectoryApiError as error:
                if error.status != 404:
                    say(f"not taken off the Trajectory API yet: {error}", state.name, width=0)
                    return  # the next call tries again
            state.registrations.remove((pid, number))

    def _check_start(self, state: _State) -> None:
        service, limit = state.service, state.spec.start_timeout
        if state.is_registered or service.poll() is not None or time.monotonic() - state.started < limit:
            return
        if not state.was_registered:
            raise service.failure(
                f"has not registered with the Trajectory API within {state.spec.key}.start_timeout={limit:g} s"
            )
        service.stop()  # Run.check restarts or abandons it

    def stop(self) -> None:
        """Stop all running environments.

        Raises:
            ServiceFailed, DiskFull: the first failure, once the others are stopped too.
        """
        running = [state.service for state in self._states if state.service in self._run.services.values()]
        attempt_all([partial(stop_all, running), *(partial(self._run.end, service) for service in running)])

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return, by name, the counts of all processes, ``restarts``, and whether the environment was ``abandoned``.

        ``items`` counts all that were begun, and ``in_flight`` those that did not end.
        """
        found, counts = {}, {name: ItemCounts() for name in self._run.plan.specs}
        for state in self._states:
            for line in read_lines(self._run.files.environment_report(state.spec.name, state.replica)):
                counts[state.spec.name].add(line)
        for name, spec in self._run.plan.specs.items():
            unfinished = counts[name].lost + counts[name].in_flight.total()
            totals = counts[name].totals + Counter({"items": unfinished, "in_flight": unfinished})
            found[name] = {
                **dict(sorted(totals.items())),
                "restarts": counts[name].restarts,
                "abandoned": self._run.abandoned.issuperset(spec.services),
            }
        return found
