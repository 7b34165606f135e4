"""Run a policy's programs safely against tests: ``Sandbox(...).check(job)``.

Guarantees, even for a hostile answer:

- the tests alone decide the verdict (``answer.py``): printing, ``os._exit`` or a patched checker cannot pass;
- it can open no file and no socket, and neither start nor signal a process; it has no environment variable or
  descriptor of this process, and imports only the modules that ``worker.py`` lists;
- CPU time, elapsed time and memory are limited; its output is discarded;
- when its verdict is returned, nothing of it is left.

This holds on x86_64 Linux, as root and without any privilege, in containers too: a filter leaves some forty system
calls, none of which takes a path, an address or a process. Isolation "none" keeps only the limits, the empty
environment and the verdict: use it only for answers that you trust.
"""

import contextlib
import json
import os
import platform
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from recipe.atropos.errors import EnvironmentFailure

Isolation = Literal["seccomp", "none"]

_WORKER = Path(__file__).with_name("worker.py")
_MARGIN_SECONDS = 30.0  # beyond the time limit of a job, before its worker is killed


class SandboxError(EnvironmentFailure):
    """Error when answers cannot be run here; the message says why."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one answer, and of its tests: seconds, MiB."""

    cpu_seconds: int = 3
    wall_seconds: float = 15.0
    memory_mb: int = 512


class ProblemCode(TypedDict):
    """A problem's own code: ``tests``, which use ``names`` of an answer, and ``setup``, executed before them."""

    names: list[str]
    setup: str
    tests: str


class Job(ProblemCode):
    """Job: ``program`` is the answer."""

    program: str


class ProgramVerdict(NamedTuple):
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

    def __init__(
        self, limits: SandboxLimits = SandboxLimits(), isolation: Isolation = "seccomp", workers: int | None = None
    ):  # noqa: B008
        self.limits, self.isolation = limits, isolation
        self.workers = workers or len(os.sched_getaffinity(0))
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(self.workers):
            self._idle.put(None)  # started on demand
        self.executor = ThreadPoolExecutor(self.workers, "sandbox")

    def start(self) -> None:
        """Probe the isolation.

        Raises:
            SandboxError: it does not work here; the message gives the reason.
        """
        if self.isolation == "none":
            return
        verdict = self.check(Job(program=_PROBE, names=["can"], setup="", tests="assert can() == [], can()"))
        if not verdict.passed:
            self.close()
            raise SandboxError(
                f"answers cannot be isolated here ({platform.machine()}: {verdict.why} {verdict.detail}); use x86_64 "
                "Linux with seccomp, or give --env.isolation=none where you trust what the policy writes: it could "
                "then read this user's files and use the network"
            )

    def check(self, job: Job) -> ProgramVerdict:
        """Run a job and return its verdict; blocking, callable from any thread.

        Raises:
            SandboxError: a worker ended.
        """
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self.isolation, self.limits)
            return worker.check(job)
        except SandboxError:
            worker.close()
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers, once the answers that run have their verdicts."""
        self.executor.shutdown(cancel_futures=True)
        for worker in [self._idle.get() for _ in range(self.workers)]:
            if worker is not None:
                worker.close()
            self._idle.put(None)


class _Worker:
    """One process of ``worker.py``."""

    def __init__(self, isolation: str, limits: SandboxLimits):
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

    def check(self, job: Job) -> ProgramVerdict:
        data = json.dumps(job).encode()
        try:
            self._process.stdin.write(b"%10d%s" % (len(data), data))
            self._process.stdin.flush()
        except OSError as error:
            raise SandboxError(f"a worker of the sandbox ended: {error}") from error
        watch = threading.Timer(self._seconds, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            raise SandboxError(f"a worker of the sandbox ended with status {self._process.wait()}")
        return ProgramVerdict(**json.loads(line))

    def close(self) -> None:
        with contextlib.suppress(OSError), self._process:  # which waits for it, and closes its pipes
            self._process.kill()
