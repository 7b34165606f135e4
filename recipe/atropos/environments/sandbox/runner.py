"""Run a policy's programs safely against tests: ``Sandbox(...).check(job)``.

Guarantees, even for a hostile answer:

- the tests alone decide the verdict (``answer.py``): printing, ``os._exit`` or a patched checker cannot pass;
- it has no network access, and can neither start, signal, trace nor see another process;
- it can read only Python's standard library in the file system, and no environment variable or descriptor of this
  process; it can write only to a private in-memory folder that is removed with it (with "landlock": to none, but it
  can ask whether a path exists);
- CPU time, elapsed time, memory, files and open files are limited; its output is discarded;
- when its verdict is returned, nothing of it is left.

This holds on x86_64 Linux, as root and without any privilege, with either isolation: "namespaces" (user, mount,
network, process, IPC) or, where the kernel or a container forbids these, "landlock" (Linux 5.13); both with a filter
that leaves about a hundred system calls. "auto" takes the first that works; if none does, it is an error. "none"
keeps only the limits, the empty environment and the verdict: use it only for answers that you trust.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from recipe.atropos.errors import EnvironmentFailure

Isolation = Literal["auto", "namespaces", "landlock", "none"]

_WORKER = Path(__file__).with_name("worker.py")
_START_SECONDS = 60.0
_MARGIN_SECONDS = 30.0  # beyond the time limit of a job, before its worker is killed


class SandboxError(EnvironmentFailure):
    """Error when answers cannot be run here; the message says why."""


@dataclass(frozen=True)
class Limits:
    """Limits of one answer, and of its tests: seconds, MiB, counts."""

    cpu_seconds: int = 3
    wall_seconds: float = 15.0
    memory_mb: int = 512
    disk_mb: int = 16
    open_files: int = 64


class Job(TypedDict):
    """Job: ``program`` is the answer; ``setup`` and ``tests``, the problem's own code, use the answer's ``names``."""

    program: str
    names: list[str]
    setup: str
    tests: str


class Verdict(NamedTuple):
    """Verdict: ``why`` as in ``answer.run_tests``; ``detail``: the exception's text, or the missing names."""

    passed: bool
    why: str
    detail: str


# Probes the isolation at every start: the answer lists what it can do, and the list must be empty.
_PROBE = """
def can():
    import os, socket
    found = []
    for name, act in {
        "open a socket": lambda: socket.socket(),
        "start a process": lambda: os.fork() or os._exit(0),
        "signal its parent": lambda: os.kill(os.getppid(), 0),
        "read /proc": lambda: open("/proc/self/environ").read(),
        "read /etc": lambda: open("/etc/passwd").read(),
    }.items():
        try:
            act()
        except OSError:
            continue
        found.append(name)
    return found
"""


class Sandbox:
    """Pool of ``workers`` reusable processes (by default one per core), each of which runs one answer at a time.

    Nothing runs before ``start``; ``close`` ends all workers, as does the end of this process.
    """

    def __init__(self, limits: Limits = Limits(), isolation: Isolation = "auto", workers: int | None = None):  # noqa: B008
        self.limits, self.isolation = limits, isolation
        self.workers = workers or len(os.sched_getaffinity(0))
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self.executor = ThreadPoolExecutor(self.workers, "sandbox")

    def start(self) -> str:
        """Return the first isolation that works, probed with one worker; all workers use it.

        Raises:
            SandboxError: none works here; the message gives the reasons.
        """
        reasons = []
        for isolation in ("namespaces", "landlock") if self.isolation == "auto" else (self.isolation,):
            try:
                worker = _Worker(isolation, self.limits)
                if isolation != "none":
                    worker.prove()
            except SandboxError as error:
                reasons.append(f"{isolation}: {error}")
                continue
            self.isolation = isolation
            self._all.append(worker)
            self._idle.put(worker)
            for _ in range(self.workers - 1):
                self._idle.put(None)  # started on demand
            return isolation
        raise SandboxError(
            f"answers cannot be isolated here ({'; '.join(reasons)}); allow user namespaces, or give "
            "--env.isolation=none where you trust what the policy writes: it could "
            "then read this user's files and use the network"
        )

    def check(self, job: Job) -> Verdict:
        """Run a job and return its verdict; blocking, callable from any thread.

        Raises:
            SandboxError: a worker ended.
        """
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self.isolation, self.limits)
                with self._lock:
                    self._all.append(worker)
            return worker.check(job)
        except SandboxError:
            if worker is not None:
                worker.close()
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        self.executor.shutdown(cancel_futures=True)
        with self._lock:
            for worker in self._all:
                worker.close()

    def __enter__(self) -> "Sandbox":
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Worker:
    """One process of ``worker.py``. Raises SandboxError if it cannot isolate itself."""

    def __init__(self, isolation: str, limits: Limits):
        self._seconds = limits.wall_seconds + _MARGIN_SECONDS
        # An empty environment, no descriptors but its pipes, no signals from the terminal.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_WORKER), isolation, json.dumps(asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        if error := self._line(_START_SECONDS).get("error"):
            self.close()
            raise SandboxError(error)

    def prove(self) -> None:
        verdict = self.check(Job(program=_PROBE, names=["can"], setup="", tests="assert can() == [], can()"))
        if not verdict.passed:
            self.close()
            raise SandboxError(f"the isolation does not hold: {verdict.why} {verdict.detail}")

    def check(self, job: Job) -> Verdict:
        data = json.dumps(job).encode()
        try:
            self._process.stdin.write(b"%10d%s" % (len(data), data))
            self._process.stdin.flush()
        except OSError as error:
            raise SandboxError(f"a worker of the sandbox ended: {error}") from error
        return Verdict(**self._line(self._seconds))

    def _line(self, seconds: float) -> dict[str, Any]:
        watch = threading.Timer(seconds, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            raise SandboxError(f"a worker of the sandbox ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
