"""Worker process that runs answers, one at a time, for ``sandbox.Sandbox``, which starts it:

    python -I -S -B worker.py ISOLATION LIMITS        # LIMITS: runner.Limits as JSON

It isolates itself, reports that in a line of JSON, ``{"isolation": ...}`` or ``{"error": ...}``, and then reads jobs
from standard input: a ten-digit length, then that many bytes of JSON. The reply to each is a line, ``{"passed",
"why", "detail"}``.

Each job has two processes, both forked before any of the job is read: the tests' process, which reads it, and the
answer's process, which gets only the program. Uses only the standard library; its memory, environment and
descriptors hold no secret.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import sysconfig
import time
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kernel  # noqa: E402
from answer import run_answer, run_tests  # noqa: E402

del sys.path[0]

_HEADER = 10
_MOST_DESCRIPTORS = 1 << 12
# Imported before isolation, since no shared library can be loaded afterwards; answers then import them at no cost.
_LIBRARY = (
    *("array", "bisect", "bz2", "calendar", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions"),
    *("functools", "hashlib", "heapq", "itertools", "lzma", "math", "operator", "random", "re", "statistics", "string"),
    *("struct", "typing", "unicodedata", "zlib"),
)
_READ = b"."  # sent by the tests' process when it has read the job


def isolate(isolation: str) -> None:
    """Isolate this process permanently; for "namespaces", return in a child process.

    Raises:
        OSError: the kernel refuses.
    """
    library = sysconfig.get_path("stdlib")
    sys.path[:] = [library, os.path.join(library, "lib-dynload")]
    if isolation == "namespaces":
        kernel.enter_namespaces()
        if child := os.fork():  # PID 1 of the namespace: all others in it end with it
            for descriptor in (0, 1):
                os.close(descriptor)
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        kernel.die_with_parent()
        kernel.new_root([library, "/dev/null"])
    elif isolation == "landlock":
        kernel.adopt_orphans()  # the answer's process, when the tests' process is killed
        kernel.only_read([library], "/dev/null")


def enter_job(limits: dict[str, Any], null: int, keep: tuple[int, ...], isolation: str) -> None:
    """Confine a process of a job: drop the worker's privileges, descriptors and standard streams; set limits."""
    os.setsid()
    kernel.die_with_parent()
    kernel.hide_memory()
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    low = 3
    for descriptor in sorted({*keep, _MOST_DESCRIPTORS}):
        os.closerange(low, max(low, descriptor))
        low = max(low, descriptor + 1)
    kernel.drop_capabilities()
    temporary = isolation == "namespaces"
    kernel.set_limits(
        limits["cpu_seconds"],
        limits["memory_mb"] << 20,
        (limits["disk_mb"] << 20) if temporary else 0,
        limits["open_files"],
    )
    if temporary:
        os.chdir("/tmp")
    if isolation != "none":
        kernel.filter_system_calls()


def job_process(length: int, limits: dict[str, Any], null: int, verdict: int, isolation: str) -> NoReturn:
    """Run the tests' process, which starts the answer's process before it reads the job."""
    requests, request = os.pipe()
    replies, reply = os.pipe()
    if (answer := os.fork()) == 0:
        try:
            enter_job(limits, null, (requests, reply), isolation)
            run_answer(requests, reply)
        finally:
            os._exit(1)
    os.close(requests)
    os.close(reply)
    job = json.loads(_read(length))
    os.write(verdict, _READ)
    enter_job(limits, null, (request, replies, verdict), isolation)
    found = run_tests(job, request, replies, answer)
    os.write(verdict, json.dumps(found).encode())
    os._exit(0)


def _read(size: int) -> bytes:
    """Return ``size`` bytes of standard input, or fewer at its end; read nothing beyond them."""
    data = b""
    while len(data) < size and (chunk := os.read(0, size - len(data))):
        data += chunk
    return data


def work(limits: dict[str, Any], null: int, isolation: str) -> None:
    """Run jobs until standard input ends. No process or file of a job is left when its verdict is written."""
    if isolation == "namespaces":
        kernel.mount_temporary("/tmp", limits["disk_mb"] << 20)
    while header := _read(_HEADER):
        receive, send = os.pipe()
        deadline = time.monotonic() + limits["wall_seconds"]
        if (child := os.fork()) == 0:
            try:
                os.close(receive)
                job_process(int(header), limits, null, send, isolation)
            finally:
                os._exit(1)
        os.close(send)
        output, ended = _output(receive, deadline)
        os.close(receive)
        end_job(child, limits, isolation)
        if output is None:
            return
        if not output.startswith(_READ):
            sys.exit("a job was not read")  # the position in standard input is unknown
        lost = {"passed": False, "why": "ended" if ended else "timeout", "detail": ""}
        found = output[len(_READ) :] or json.dumps(lost).encode()
        os.write(1, found + b"\n")


def _output(receive: int, deadline: float) -> tuple[bytes | None, bool]:
    """Return what the tests' process writes until it ends, and whether it ends before ``deadline``; None if the
    sandbox has closed standard input."""
    poll = select.poll()
    poll.register(receive, select.POLLIN)
    poll.register(0, 0)  # no events: a hang-up is always reported
    output = b""
    while found := dict(poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))):
        if 0 in found:
            return None, False
        if not (chunk := os.read(receive, 1 << 12)):
            return output, True
        output += chunk
    return output, False


def end_job(child: int, limits: dict[str, Any], isolation: str) -> None:
    """Kill the processes left of a job (the answer's dies with the tests' process) and remove its files."""
    if isolation == "namespaces":
        os.kill(-1, signal.SIGKILL)  # every process in the namespace but this one
    else:
        os.kill(child, signal.SIGKILL)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    if isolation == "namespaces" and os.listdir("/tmp"):  # most answers write no files, and a mount takes 20 ms
        kernel.unmount("/tmp")
        kernel.mount_temporary("/tmp", limits["disk_mb"] << 20)


def main() -> None:
    isolation, limits = sys.argv[1], json.loads(sys.argv[2])
    os.environ.clear()
    os.environ.update(HOME="/tmp", TMPDIR="/tmp")
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDWR)
    for name in _LIBRARY:
        with contextlib.suppress(ImportError):  # Python was built without it
            importlib.import_module(name)
    try:
        isolate(isolation)
        output = {"isolation": isolation}
    except OSError as error:
        output = {"error": str(error)}
    os.write(1, json.dumps(output).encode() + b"\n")
    gc.freeze()  # so that job processes keep sharing this one's memory
    if "error" not in output:
        work(limits, null, isolation)


if __name__ == "__main__":
    main()
