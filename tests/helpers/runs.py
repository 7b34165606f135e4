"""Run folders as a run leaves them, without a run."""

import os
import socket
import time
from dataclasses import dataclass
from types import SimpleNamespace

import orjson
import psutil

from recipe.atropos.launcher.run_plan import RunPlan
from recipe.atropos.launcher.services import Run
from recipe.atropos.launcher.startup import start_trainer
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import PHASES
from recipe.atropos.utils.files import rewrite_lines as write_lines
from recipe.atropos.utils.process import Service, start_time

CONFIG = "trainer: {total_training_steps: %d, device: cpu, atropos: {max_staleness: 2, api_url: null}}\n"


def run_of(config, folder, composed=None):
    """A run of a configuration, whatever its command line was."""
    return Run(RunPlan(config, config if composed is None else composed, RunDir(folder)))


@dataclass
class Placed(Service):
    """A service on another node, the first of which has ended with a status."""

    status: int = 0

    def poll(self):
        return self.status if self.pid == 1 else None

    def stop(self, grace=0.0): ...


def prepare_trainer(run, monkeypatch):
    """Do what comes before a run's trainer starts; return the process that would: name, command and variables."""

    def start(name, command, **variables):
        return SimpleNamespace(name=name, command=command, variables=variables)

    monkeypatch.setattr(run, "start", start)
    inference = SimpleNamespace(urls=["http://127.0.0.1:1"], gateway="http://127.0.0.1:2")
    return start_trainer(run, SimpleNamespace(url="http://127.0.0.1:3"), inference)


def metrics_line(step, score=0.5, seconds=2.0, **more):
    """A line of ``metrics.jsonl``, as far as a run's state is read from it."""
    phases = {f"phase_s/{phase}": 0.0 for phase in PHASES} | {"phase_s/log_prob": 0.5, "phase_s/update": 1.5}
    line = {"step": step, "time": 1e9 + step * seconds, "atropos/mean_score": score, "timing_s/step": seconds}
    line |= {"perf/total_num_tokens": 4000, "atropos/trained_tokens": 1000.0, "phase_s/other": 0.0, **phases}
    return line | {"atropos/staleness/mean": 1.0, "atropos/staleness/max": 2.0, **more}


def make_run(folder, steps=10, total=20, pid=None, host=None, started=None, **services):
    """A run's folder. ``pid``: of the process that holds it, this one if None; ``services``: in ``services.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    files, pid = RunDir(folder), os.getpid() if pid is None else pid
    started = started if started is not None else start_time(pid) or time.time()
    files.lock_file.touch()
    holder = {"pid": pid, "host": host or socket.gethostname(), "command": "launch_services", "started": started}
    holder |= {"booted": psutil.boot_time(), "inode": files.lock_file.stat().st_ino}
    files.holder_file.write_bytes(orjson.dumps(holder))
    files.config.write_text(CONFIG % total)
    write_lines(files.metrics, [metrics_line(step, step / 10) for step in range(1, steps + 1)])
    entries = {name: {"url": None, "log": None, **entry} for name, entry in services.items()}
    files.services.write_bytes(orjson.dumps(entries))
    return files
