"""Kill or stop each process of a run in each phase of it: ``python benchmarks/faults.py [--quick] [--only TEXT]``

One run of the demonstration goes through all faults: each start resumes what the previous fault left. The table says
of each fault whether the run recovered (it trained on) or ended with a named
error, and after how many seconds. Beside it is printed what must not be: a process or shared memory that was left, and
steps that are not in ``metrics.jsonl`` once after the next start. At the end the run must reach its last step. A
stopped process (SIGSTOP) is noticed by configured time limits, of which ``LIMIT`` is the longest here.

A fault that is noticed by a time limit takes at least two minutes; all take about 50 minutes, ``--quick`` about 8.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.process import RUN_ID_VARIABLE

LIMIT = 90  # seconds, configured for a step, a batch and a request of a push
TARGETS = {"seconds": 120, "seconds_stopped": LIMIT + 60, "processes_left": 0, "steps_not_once": 0}
GONE_SECONDS = 20  # from the end of the launcher to the end of the last process
READY_SECONDS = 900  # for a moment of the table to come
MORE_STEPS = 4  # trained after a fault to count as recovered: more than were sampled before it
SUSPENDED_SECONDS = 15  # until a stopped launcher is continued: stopping it counts as intended

QUICK = """
launcher    KILL start
environment KILL generation
sglang      KILL push
launcher    HUP  training
rank        STOP training
trainer     KILL checkpoint
"""
WHOLE = f"""{QUICK}
launcher    HUP  start
launcher    TERM start
trainer     KILL start
sglang      KILL start
gateway     KILL start
api         KILL start
launcher    KILL generation
launcher    STOP generation
sglang      KILL generation
sglang      STOP generation
gateway     KILL generation
gateway     STOP generation
api         KILL generation
api         STOP generation
environment TERM generation
environment HUP  generation
environment STOP generation
raylet      KILL generation
gcs         KILL generation
trainer     KILL training
trainer     TERM training
trainer     STOP training
rank        KILL training
raylet      STOP training
rank        KILL push
sglang      STOP push
gateway     KILL push
launcher    TERM push
launcher    KILL checkpoint
rank        KILL checkpoint
"""
# What Ray shows as a rank's title while it runs the method.
METHODS = {"training": "update_actor", "push": "update_weights", "checkpoint": "save_checkpoint"}
OPTIONS = [
    "--preset=demo",
    "environment.evaluate=false",
    "environment.max_restarts=20",
    "inference.max_restarts=20",
    "api.max_restarts=20",
    "trainer.atropos.max_restarts=20",
    "trainer.save_freq=2",
    "trainer.logger=[console]",
    f"trainer.atropos.step_timeout={LIMIT}",
    f"trainer.atropos.max_wait_time={LIMIT}",
    f"trainer.atropos.weight_sync.timeout={LIMIT // 2}",
]


@dataclass
class Result:
    """Result of a fault. ``left``: processes 20 s after the end. ``shm``: files in /dev/shm that nobody has open."""

    fault: tuple[str, str, str]
    outcome: str
    seconds: float
    message: str = ""
    left: list[str] = field(default_factory=list)
    shm: set[str] = field(default_factory=set)
    once: bool | None = None  # whether every step is recorded once, after the next start

    @property
    def ok(self) -> bool:
        limit = {"STOP": TARGETS["seconds_stopped"], "-": READY_SECONDS}.get(self.fault[1], TARGETS["seconds"])
        known = self.outcome in ("recovered", "ended")
        return bool(known and self.seconds <= limit and not self.left and not self.shm and self.once)

    def row(self) -> str:
        cells = [*self.fault, self.outcome, f"{self.seconds:.0f}", self.message.replace("|", "/")]
        return "| " + " | ".join(cells) + " |"


HEADER = "| process | signal | moment | outcome | seconds | error |\n|---|---|---|---|---|---|"


class Launched:
    """The launcher and all processes that were ever seen below it."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.run = folder, folder / "run"
        self.log = folder / f"launcher-{uuid.uuid4().hex[:8]}.log"
        self.mark = uuid.uuid4().hex
        self.seen: dict[int, psutil.Process] = {}
        listing = self.run / "services.json"
        listing.unlink(missing_ok=True)  # of the previous start
        self.trained_before = last_step(self.run)
        command = [sys.executable, "-m", "recipe.atropos.launch_services", *OPTIONS]
        command += [f"--steps={steps}", f"--run-dir={self.run}"]
        environment = {**os.environ, RUN_ID_VARIABLE: self.mark, "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def look(self) -> list[psutil.Process]:
        """Return the living processes below the launcher."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self.seen |= {p.pid: p for p in found}
        return found

    def left(self) -> list[psutil.Process]:
        """Return the living processes of the run, known by their mark or seen before."""
        found = {}
        for process in psutil.process_iter():
            try:
                if self.mark in process.environ().get(RUN_ID_VARIABLE, "").split(":"):
                    found[process.pid] = process
            except (psutil.Error, OSError):
                continue
        found |= {p.pid: p for p in self.seen.values() if p.is_running()}
        return [p for p in found.values() if alive(p) and p.pid != self.process.pid]

    def find(self, name: str) -> psutil.Process | None:
        """Return the process of that name in the table; None if it does not run."""
        if name == "launcher":
            return psutil.Process(self.process.pid)
        below = self.look()
        if name in ("rank", "raylet", "gcs"):
            return next((p for p in below if title(p).startswith(PROGRAMS[name])), None)
        try:
            pid = json.loads((self.run / "services.json").read_bytes())[name]["pid"]
        except (OSError, ValueError, KeyError):
            return None
        return next((p for p in below if p.pid == pid), None)

    def wait_for(self, name: str, moment: str) -> psutil.Process:
        """Return the process as soon as the moment has come.

        Raises:
            RuntimeError: the run ended first, or the moment does not come.
        """
        deadline = time.monotonic() + READY_SECONDS
        rank = None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended before the fault: {self.last_message()}")
            if moment == "start":
                if (found := self.find(name)) and (name != "launcher" or self.find("gcs")):
                    return found
                time.sleep(0.05)
                continue
            trained = last_step(self.run) > self.trained_before
            rank = rank if rank is not None and alive(rank) else self.find("rank")
            if not trained or rank is None:
                time.sleep(0.1)
                continue
            target = self.find(name)
            begun = time.monotonic()
            while target is not None and time.monotonic() - begun < 5:
                method = title(rank)
                if METHODS[moment] in method if moment in METHODS else not any(m in method for m in METHODS.values()):
                    return target
                time.sleep(0.001)
        raise RuntimeError(f"no {name} at the moment {moment} within {READY_SECONDS} s: {self.last_message()}")

    def last_message(self) -> str:
        """Return the launcher's last message."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        marked = [line for line in lines if line.startswith(("error", "stopped", "Traceback"))]
        return " ".join((marked or lines or ["nothing"])[-1].split())

    def end(self) -> None:
        """End the run, first gracefully, then by force."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            wait_until(lambda: self.process.poll() is not None, 90)
        for process in [*self.left(), self.process]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)


PROGRAMS = {"rank": "ray::AtroposActorWorker", "raylet": "raylet", "gcs": "gcs_server"}


def title(process: psutil.Process) -> str:
    """Return the first word of its command line, without the folder; Ray's workers rewrite theirs."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    return command[0].rpartition("/")[2] if command else ""


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_step(run: Path) -> int:
    return max((line["step"] for line in read_metrics(run)), default=0)


def steps_once(run: Path) -> bool:
    steps = [line["step"] for line in read_metrics(run)]
    return steps == list(range(1, len(steps) + 1))


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def unused_shm() -> set[str]:
    """Return the files of /dev/shm that no process has mapped or open."""
    names = {entry.name for entry in os.scandir("/dev/shm")}
    used = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/maps") as maps:
                used |= {line.rpartition("/dev/shm/")[2].split()[0] for line in maps if "/dev/shm/" in line}
            links = [os.readlink(f.path) for f in os.scandir(f"/proc/{entry}/fd")]
            used |= {link.removeprefix("/dev/shm/").split()[0] for link in links if link.startswith("/dev/shm/")}
        except OSError:
            continue
    return names - used


def inflict(launched: Launched, fault: tuple[str, str, str], shm_before: set[str]) -> Result:
    """Inject one fault, and return what becomes of the run."""
    name, signal_name, moment = fault
    target = launched.wait_for(name, moment)
    launched.look()
    begun, reached = time.monotonic(), last_step(launched.run)
    target.send_signal(getattr(signal, f"SIG{signal_name}"))
    if fault[:2] == ("launcher", "STOP"):
        time.sleep(SUSPENDED_SECONDS)
        target.send_signal(signal.SIGCONT)
    limit = TARGETS["seconds_stopped" if signal_name == "STOP" else "seconds"]
    outcome = "neither"
    while time.monotonic() - begun < limit + 30:
        launched.look()
        if launched.process.poll() is not None:
            outcome = "ended"
            break
        if last_step(launched.run) >= max(reached, launched.trained_before) + MORE_STEPS:
            outcome = "recovered"
            break
        time.sleep(0.25)
    result = Result(fault, outcome, time.monotonic() - begun)
    if outcome == "recovered":
        result.message = "-"
        return result
    if outcome == "neither":
        launched.end()
        return result
    killed = fault[:2] == ("launcher", "KILL")
    result.message = "-" if killed else launched.last_message()
    if not killed and (launched.process.returncode == 0 or not result.message.startswith(("error", "stopped"))):
        result.outcome = "unnamed"
    wait_until(lambda: not launched.left(), GONE_SECONDS)
    result.left = [f"{p.pid} {title(p)}" for p in launched.left()]
    for process in launched.left():
        process.kill()
    result.shm = unused_shm() - shm_before
    return result


def campaign(folder: Path, faults: list[tuple[str, str, str]]) -> Iterator[Result]:
    """Yield the results in order; the last one is without a fault: the run must reach its last step."""
    launched, before = None, None
    try:
        for fault in faults:
            if launched is not None and (fault[2] == "start" or launched.process.poll() is not None):
                launched.end()
                launched = None
            shm_before = unused_shm()
            launched = launched or Launched(folder, steps=100_000)
            try:
                result = inflict(launched, fault, shm_before)
            except RuntimeError as error:
                result = Result(fault, "not tried", 0.0, str(error))
                launched.end()
            if before is not None:
                before.once = steps_once(launched.run)
                before.shm &= unused_shm()  # the next start removes what a killed process left
                yield before
            before = result
        reached = 0
        if launched is not None:
            launched.end()
            reached = last_step(launched.run)
        begun = time.monotonic()
        launched = Launched(folder, steps=reached + 3)
        wait_until(lambda: launched.look() is None or launched.process.poll() is not None, READY_SECONDS)
        whole = launched.process.poll() == 0 and last_step(launched.run) == reached + 3
        summary = launched.run / "summary.json"
        whole = whole and json.loads(summary.read_bytes()).get("finished_steps") == reached + 3
        once = steps_once(launched.run)
        if before is not None:
            before.once = once
            before.shm &= unused_shm()
            yield before
        end = Result(("none", "-", "last step"), "recovered" if whole else "unnamed", time.monotonic() - begun)
        end.message, end.once, end.left = (
            "-" if whole else launched.last_message(),
            once,
            [str(p.pid) for p in launched.left()],
        )
        yield end
    finally:
        if launched is not None:
            launched.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six faults")
    parser.add_argument("--only", default="", metavar="TEXT", help='the faults that contain it, as "rank KILL"')
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the run and all logs stay")
    arguments = parser.parse_args()
    table = QUICK if arguments.quick else WHOLE
    faults = [tuple(line.split()) for line in table.splitlines() if line]
    faults = [fault for fault in faults if arguments.only in " ".join(fault)]
    if not faults:
        parser.error(f"--only={arguments.only!r}: no such fault; give a part of one, as 'rank KILL push'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the run that it started
    results, begun = [], time.monotonic()
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for result in campaign(folder, faults):
            print(result.row(), flush=True)
            for what in [*result.left, *sorted(result.shm)]:
                print(f"left: {what}", file=sys.stderr, flush=True)
            if not result.once:
                print("steps are not once in metrics.jsonl after the next start", file=sys.stderr, flush=True)
            results.append(result)
    of_faults = results[: len(faults)]
    figures = {
        "faults": len(of_faults),
        "recovered": sum(r.outcome == "recovered" for r in of_faults),
        "ended": sum(r.outcome == "ended" for r in of_faults),
        "seconds": round(max((r.seconds for r in of_faults if r.fault[1] != "STOP"), default=0.0), 1),
        "seconds_stopped": round(max((r.seconds for r in of_faults if r.fault[1] == "STOP"), default=0.0), 1),
        "processes_left": sum(len(r.left) for r in results),
        "steps_not_once": sum(not r.once for r in results),
        "failed": [" ".join(r.fault) for r in results if not r.ok],
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }
    ok = len(results) == len(faults) + 1 and not figures["failed"]
    print(json.dumps({"name": "faults", "figures": figures, "targets": TARGETS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
