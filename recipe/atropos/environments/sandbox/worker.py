"""Worker process that runs answers, one at a time, for ``runner.Sandbox``, which starts it:

    python -I -S -B worker.py ISOLATION LIMITS        # LIMITS: runner.Limits as JSON

It reads jobs from standard input: a ten-digit length, then that many bytes of JSON. The reply to each is a line,
``{"passed", "why", "detail"}``.

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
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kernel  # noqa: E402
from answer import run_answer, run_tests  # noqa: E402

_HEADER = 10
_MOST_DESCRIPTORS = 1 << 12
# The modules that answers and tests can import: no file can be opened later.
_LIBRARY = (
    "__future__ _strptime abc array ast base64 binascii bisect bz2 calendar cmath collections collections.abc "
    "concurrent.futures contextlib copy csv dataclasses datetime decimal difflib encodings.ascii encodings.cp1252 "
    "encodings.hex_codec encodings.idna encodings.latin_1 encodings.rot_13 encodings.utf_16 encodings.utf_32 enum "
    "fractions functools gc graphlib hashlib heapq hmac html inspect io itertools json keyword locale logging lzma "
    "math numbers operator os pathlib pickle pprint queue random re secrets statistics string struct subprocess sys "
    "tempfile textwrap threading time timeit traceback types typing unicodedata unittest urllib.parse uuid warnings "
    "weakref zlib"
).split()
_READ = b"."  # sent by the tests' process when it has read the job


def answer_process(tests: int, limits: dict[str, Any], isolation: str) -> NoReturn:
    confine((tests,), limits, isolation)
    run_answer(3)


def tests_process(answer: int, verdict: int, length: int, limits: dict[str, Any], isolation: str) -> NoReturn:
    job = json.loads(_read(length))
    os.write(verdict, _READ)
    confine((answer, verdict), limits, isolation)
    run_tests(job, 3, 4)


def confine(keep: tuple[int, ...], limits: dict[str, Any], isolation: str) -> None:
    """Confine a process of a job: ``keep``, in ascending order, become descriptors 3 and up, without any others and
    with null standard streams; limits and the system-call filter hold from now on."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor, kept in enumerate(keep, 3):
        os.dup2(kept, descriptor)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(3 + len(keep), _MOST_DESCRIPTORS)
    kernel.set_limits(limits["cpu_seconds"], limits["memory_mb"] << 20)
    if isolation != "none":
        kernel.filter_system_calls()


def _fork(work: Callable[..., NoReturn], *arguments: Any) -> int:
    """Return the pid of a process that does ``work``, and ends with this one."""
    if child := os.fork():
        return child
    try:
        kernel.die_with_parent()
        work(*arguments)
    finally:
        os._exit(1)


def _read(size: int) -> bytes:
    """Return ``size`` bytes of standard input, or fewer at its end; read nothing beyond them."""
    data = b""
    while len(data) < size and (chunk := os.read(0, size - len(data))):
        data += chunk
    return data


def run_job(length: int, limits: dict[str, Any], isolation: str) -> dict[str, Any] | None:
    """Return the verdict of the job that standard input holds, when no process of it is left; None if the sandbox has
    closed standard input."""
    (answer, tests), (receive, send) = (end.detach() for end in socket.socketpair()), os.pipe()
    deadline = time.monotonic() + limits["wall_seconds"]
    processes = [
        _fork(answer_process, tests, limits, isolation),
        _fork(tests_process, answer, send, length, limits, isolation),
    ]
    for descriptor in (answer, tests, send):
        os.close(descriptor)
    output, ended = _output(receive, deadline)
    os.close(receive)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    status, _ = [os.waitpid(process, 0)[1] for process in processes]
    if output is None:
        return None
    if not output.startswith(_READ):
        sys.exit("a job was not read")  # the position in standard input is unknown
    lost = {"passed": False, "why": "ended" if ended else "timeout", "detail": ""}
    verdict = json.loads(output[len(_READ) :]) if output != _READ else lost
    if verdict["why"] == "ended" and os.WTERMSIG(status) == signal.SIGXCPU:
        verdict["why"] = "timeout"
    return verdict


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


def main() -> None:
    isolation, limits = sys.argv[1], json.loads(sys.argv[2])
    for name in _LIBRARY:
        with contextlib.suppress(ImportError):  # Python was built without it
            importlib.import_module(name)
    sys.path.clear()
    gc.freeze()  # so that job processes keep sharing this one's memory
    while (header := _read(_HEADER)) and (verdict := run_job(int(header), limits, isolation)):
        os.write(1, json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    main()
