"""State of a run, read from its folder and, if it runs on this machine, from its services' status endpoints.

Guarantees:

- reading changes nothing in the run: no file is written, no lock is taken, no process is signaled;
- a process is the run's only if pid and start time are those that the run recorded, so neither a stale
  ``services.json`` nor a reused pid is mistaken for it;
- a run of another machine is shown as such: its files can be read, its processes cannot be seen.
"""

import contextlib
import difflib
import functools
import http.client
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import psutil
from cachetools import TTLCache, cached

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.evaluations import held_out, heldout_scores, is_accuracy, read_evaluations
from recipe.atropos.run.folder import LAUNCHER, Holder, RunDir
from recipe.atropos.run.record import SCORES, left_open
from recipe.atropos.utils.files import LineReader, read_json, read_lines, read_yaml
from recipe.atropos.utils.machine import nvidia_smi
from recipe.atropos.utils.process import process_lives
from recipe.atropos.utils.secret import API_KEY_VARIABLE, environments_key
from recipe.atropos.utils.sockets import OtherUsersServer, check_server

RUNS = Path("runs")  # where runs are by default: ``run.dir`` in trainer.yaml

STARTING, RUNNING, ENDING = "starting", "running", "ending"
FINISHED, STOPPED, KILLED, ELSEWHERE = "finished", "stopped", "killed", "on another machine"
ALIVE = (STARTING, RUNNING, ENDING)
"""States in which the run's launcher (or trainer, if it was started alone) is a process of this machine."""

_ENDPOINT_SECONDS = 2.0  # for a status endpoint to answer
_MEMORY_SECONDS = 5.0  # between two measurements of memory
_PACE_STEPS = 20  # the latest steps, from which seconds per step are taken
_OVERDUE_STEPS, _OVERDUE_SECONDS = 5, 30.0  # since the last step, after which that pace says nothing
_FINE, _SILENT = ("ok", ""), ("unknown", "does not answer")  # health and detail


def find_run(given: str | None, runs: Path = RUNS) -> RunDir:
    """Return the run that ``given`` names: a folder, or a name below ``runs``; None: the run that started last.

    Raises:
        ConfigurationError: there is none; the message names those that there are.
        PermissionError: the run that is named is another user's, and cannot be read.
    """
    found = {path.name: path for path in _folders(runs)}
    if given is None:
        if not found:
            raise ConfigurationError(f"{runs.resolve()} holds no run: name the folder of one")
        return RunDir(max(found.values(), key=_started))
    for path in (Path(given).expanduser(), runs / given):
        if _is_run(path):
            return RunDir(path)
    near = difflib.get_close_matches(given, found, n=1, cutoff=0.5)
    known = f"did you mean {near[0]}?" if near else f"{runs}/ holds {', '.join(sorted(found)) or 'no run'}"
    raise ConfigurationError(f"{given}: no run there (a folder, or a name below {runs}/); {known}")


def _folders(runs: Path) -> list[Path]:
    found = []
    for path in runs.iterdir() if runs.is_dir() else ():
        with contextlib.suppress(PermissionError):  # another user's
            found += [path] * _is_run(path)
    return found


def _is_run(path: Path) -> bool:
    files = RunDir(path)
    return any(file.is_file() for file in (files.holder_file, files.config, files.metrics))


def _started(path: Path) -> float:
    holder = RunDir(path).holder()
    return holder.started if holder else path.stat().st_mtime


def is_finished(files: RunDir, steps: int, total: int | None) -> bool:
    """Return whether a run that has trained ``steps`` has ended as planned: with a launcher, evaluated last as well."""
    planned = total is not None and steps >= total
    return planned and (not files.services.exists() or read_json(files.summary, {}).get("finished_steps", 0) >= total)


@dataclass(frozen=True)
class ServiceStatus:
    """One service. ``health``: "ok", "waits", "down", "ended" (with the run) or "unknown"; ``detail``: a few words, or
    ""."""

    name: str
    health: str
    detail: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes: ``run``, private to the run's processes, without what they share; ``free`` and ``total`` of the machine;
    (used, total) of each GPU."""

    run: int
    free: int
    total: int
    gpus: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RunStatus:
    """State of a run at one moment. ``series``: values of each step, by name, see ``RunReader``, NaN where it has none;
    ``heldout``: mean held-out score by step, ``heldout_share``: of correct answers; ``last``: the newest line of
    ``metrics.jsonl``; ``alarms``: lines of ``alarms.jsonl`` that are raised now, newest first; ``diagnosis``: the
    Trajectory API's /diagnose.
    """

    directory: Path
    state: str
    holder: Holder | None
    step: int = 0
    total: int | None = None
    max_staleness: int | None = None
    series: dict[str, list[float]] = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    heldout_share: bool = False
    last: dict[str, Any] = field(default_factory=dict)
    seconds_per_step: float | None = None
    services: tuple[ServiceStatus, ...] = ()
    diagnosis: dict[str, Any] | None = None
    waiting: bool = False  # the trainer, for a batch or an evaluation
    alarms: tuple[dict[str, Any], ...] = ()
    memory: Memory | None = None

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the pace of the latest ones; None if that is not known, or none comes now."""
        if self.total is None or self.seconds_per_step is None or not self.is_alive:
            return None
        if time.time() - self.last["time"] > max(_OVERDUE_SECONDS, _OVERDUE_STEPS * self.seconds_per_step):
            return None
        return max(0, self.total - self.step) * self.seconds_per_step


_SERIES = {  # name: keys of a line of metrics.jsonl, of which the first that is there counts
    "step": ("step",),
    "time": ("time",),
    "score": SCORES,
    "seconds": ("timing_s/step",),
    "tokens": ("perf/total_num_tokens",),
    "trained_tokens": ("atropos/trained_tokens",),
}


class RunReader:
    """Reader of one run, to be called again while it goes on: only what is new is read from ``metrics.jsonl``."""

    def __init__(self, directory: str | Path):
        self.files = RunDir(directory)
        self._lines = LineReader(self.files.metrics)
        self._rows: list[dict[str, float]] = []  # of each step, by the names of the series
        self._last: dict[str, Any] = {}

    def read(self) -> RunStatus:
        """Return the state now, within a few seconds even if no service answers.

        Raises:
            RunDirError: a file of the run holds what nothing here writes; names it.
        """
        self._read_metrics()
        config, holder, listing = self._read_config(), self.files.holder(), read_json(self.files.services)
        trainer = config.get("trainer", {})
        total = trainer.get("total_training_steps")
        state = self._state(holder, listing, total)
        services, diagnosis = self._read_services(listing or {}, config, state) if state in ALIVE else ((), None)
        evaluations = held_out(read_evaluations(self.files.path)).values()
        return RunStatus(
            directory=self.files.path,
            state=state,
            holder=holder,
            step=int(self._last.get("step", 0)),
            total=total,
            max_staleness=trainer.get("atropos", {}).get("max_staleness"),
            series={name: [row[name] for row in self._rows] for name in _SERIES},
            heldout=heldout_scores(self.files.path),
            heldout_share=all(is_accuracy(each[0].metric) for each in evaluations),
            last=self._last,
            seconds_per_step=self._pace(),
            services=services,
            diagnosis=diagnosis,
            waiting=self.files.waiting.exists(),
            alarms=tuple(reversed(left_open(read_lines(self.files.alarms)))),
            memory=measure_memory(holder.pid, trainer.get("device") == "cuda") if state in ALIVE else None,
        )

    def _read_metrics(self) -> None:
        for line in self._lines.new_lines():
            while self._rows and self._rows[-1]["step"] >= line["step"]:  # trained again, from a checkpoint
                self._rows.pop()
            known = {name: [line[key] for key in keys if line.get(key) is not None] for name, keys in _SERIES.items()}
            self._rows.append({name: next(iter(values), math.nan) for name, values in known.items()})
            self._last = line

    def _read_config(self) -> dict[str, Any]:
        """Return the run's configuration, unresolved; {} until the run has written it."""
        try:
            return _configuration(self.files.config, self.files.config.stat().st_mtime_ns)
        except FileNotFoundError:
            return {}

    def _state(self, holder: Holder | None, listing: dict[str, Any] | None, total: int | None) -> str:
        """``listing``: {} once a launcher has ended its services, with ``ending`` while it does; None before it starts
        any, or without a launcher."""
        step = self._last.get("step", 0)
        if holder is not None and holder.is_here and holder.lives():
            stopping = (listing or {}).get(LAUNCHER, {}).get("ending", False)
            if stopping or (total is not None and step >= total):
                return ENDING
            return RUNNING if self._last.get("time", 0) > holder.started else STARTING
        if is_finished(self.files, step, total):
            return FINISHED
        if holder is not None and not holder.is_here and listing != {}:
            return ELSEWHERE
        return KILLED if listing else STOPPED

    def _pace(self) -> float | None:
        """Return the median seconds between the latest steps, pauses (a restart, an evaluation) left out."""
        times = [row["time"] for row in self._rows[-_PACE_STEPS - 1 :]]
        gaps = sorted(after - before for before, after in zip(times, times[1:], strict=False))
        return gaps[len(gaps) // 2] if gaps else None

    # ---------------------------------------------------------------- services

    def _read_services(
        self, listing: dict[str, Any], config: dict[str, Any], state: str
    ) -> tuple[tuple[ServiceStatus, ...], dict[str, Any] | None]:
        living = {
            name: entry
            for name, entry in listing.items()
            if process_lives(entry["pid"], entry.get("started") or 0.0, entry.get("booted") or 0.0)
        }
        key = _api_key(living[name]["pid"] for name in ("api", "gateway") if name in living)
        api = living.get("api", {}).get("url") or config.get("trainer", {}).get("atropos", {}).get("api_url")
        gateway = living.get("gateway", {}).get("url") or config.get("inference", {}).get("gateway")
        owner = self.files.path.stat().st_uid
        diagnosis = _fetch(api, "/diagnose", key, owner)
        pool = _fetch(gateway, "/gateway/status", key, owner)
        known = {
            "api": _health_of_api(diagnosis),
            "gateway": _FINE if pool else _SILENT,
            "trainer": ("waits", "waits") if self.files.waiting.exists() else _FINE,
        }
        servers = {server["url"]: _health_of_server(server) for server in (pool or {}).get("servers", ())}
        ended = "ended" if state == ENDING else "down", "ended"
        states = {  # (health, detail)
            name: (known.get(name) or servers.get(entry["url"], _FINE)) if name in living else ended
            for name, entry in listing.items()
            if name != LAUNCHER
        }
        return tuple(ServiceStatus(name, *state) for name, state in states.items()), diagnosis


@functools.lru_cache(maxsize=1)
def _configuration(path: Path, changed: int) -> dict[str, Any]:
    """Return a file's content, which is parsed again once it was ``changed`` at another time (ns)."""
    return read_yaml(path)


def _health_of_api(diagnosis: dict[str, Any] | None) -> tuple[str, str]:
    if diagnosis is None:
        return _SILENT
    warnings = diagnosis.get("warnings") or {}
    return ("waits", str(next(iter(warnings.values())))) if warnings else _FINE


def _health_of_server(server: dict[str, Any]) -> tuple[str, str]:
    known = {"admitted": ("ok", f"{server['inflight']} requests"), "waiting": ("waits", "waits for weights")}
    return known.get(server["state"], ("down", "removed from rotation"))


def _api_key(pids: Iterable[int]) -> str | None:
    """Return the environments' key, which suffices here: the trainer's is in no file, but the user who started the run
    may read its services' environment."""
    found = [os.environ.get(API_KEY_VARIABLE)]
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            found.insert(0, psutil.Process(pid).environ().get(API_KEY_VARIABLE))
    return next(map(environments_key, filter(None, found)), None)


def _fetch(base: str | None, path: str, key: str | None, owner: int) -> dict[str, Any] | None:
    """Return the JSON object that an endpoint answers with, or None; the key is for servers of the run's ``owner``."""
    if not base:
        return None
    parts, headers = urlsplit(base), {"Authorization": f"Bearer {key}"} if key else {}
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(kind(parts.netloc, timeout=_ENDPOINT_SECONDS)) as connection:  # without a proxy
            connection.connect()
            if key:
                check_server(connection.sock.getpeername(), connection.sock.getsockname(), owner)
            connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
            reply = connection.getresponse()
            return orjson.loads(reply.read()) if reply.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException, OtherUsersServer):
        return None


@cached(TTLCache(maxsize=1, ttl=_MEMORY_SECONDS))
def measure_memory(pid: int, on_gpu: bool) -> Memory:
    """Measure the memory of a process with all its descendants, of this machine and, if ``on_gpu``, of its GPUs."""
    run = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                info = process.memory_info()
                run += max(0, info.rss - info.shared)
    gpus = nvidia_smi("gpu", "memory.used,memory.total") if on_gpu else []
    sizes = [(int(used) << 20, int(total) << 20) for used, total in gpus if used.isdigit() and total.isdigit()]
    machine = psutil.virtual_memory()
    return Memory(run, machine.available, machine.total, tuple(sizes))
