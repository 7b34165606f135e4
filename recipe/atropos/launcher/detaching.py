"""A launcher that goes on without its terminal: ``launch_services --detach``.

Guarantees:

- until the checks have passed, what the launcher prints appears on the terminal, Ctrl-C ends it, and its exit status is
  the command's;
- from then on it is in a session of its own and writes to ``logs/launcher.log``, so neither the end of the terminal nor
  a Ctrl-C there reaches it.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from recipe.atropos.utils.process import open_log

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_detached(program: Callable[[Callable[[Path], None]], int]) -> int:
    """Run ``program`` in a child process; return its exit status, or 0 as soon as it has left the terminal.

    ``program`` gets a function that it calls to leave, with the log file to write to from then on. Call it before any
    thread is started. In the child it returns too, with the program's status.
    """
    left, leave = os.pipe()
    sys.stdout.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    if (child := os.fork()) == 0:
        os.close(left)
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return program(lambda log: _leave(leave, log))
    os.close(leave)
    for number in _PASSED_ON:
        signal.signal(number, lambda *_: os.kill(child, signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with os.fdopen(left, "rb") as pipe:
        if pipe.read(1):
            return 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _leave(leave: int, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with open_log(log) as output, open(os.devnull) as nothing:
        for given, wanted in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(given.fileno(), wanted)
    os.write(leave, b"1")
    os.close(leave)
