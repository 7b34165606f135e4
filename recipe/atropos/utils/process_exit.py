"""How a process ends that runs code of others, such as an environment: in a limited time, and without child processes.

SIGTERM cancels the running work; a thread that hangs, or work that ignores its cancellation, delays the exit by seconds
only.
"""

import asyncio
import os
import signal
import sys
import threading
from typing import Any, NoReturn

import psutil

from recipe.atropos.utils.process import signal_all

TERMINATED = 128 + signal.SIGTERM  # exit status

_CHILDREN_SECONDS = 1.5
_AFTER_SIGTERM, _AFTER_WORK = 9.0, 40.0  # s until the process is gone, whatever hangs

_work: asyncio.Task | None = None


def end_on_sigterm() -> None:
    """From now on, let SIGTERM end the running work or, if none is running yet, the process."""
    signal.signal(signal.SIGTERM, _terminated)


def set_work(task: asyncio.Task) -> None:
    """Name the task that SIGTERM cancels."""
    global _work
    _work = task


def exit_anyway(code: int, seconds: float | None = None) -> threading.Timer:
    """Let the process exit with ``code`` in some seconds, unless it has ended by itself; the timer can be canceled."""

    def leave() -> None:
        _end_children()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(seconds or (_AFTER_SIGTERM if code == TERMINATED else _AFTER_WORK), leave)
    timer.daemon = True
    timer.start()
    return timer


def end_process(code: int) -> NoReturn:
    """Exit with ``code``, leaving no children, even if a thread does not end."""
    exit_anyway(code)
    _end_children()
    sys.exit(code)


def _terminated(*_: Any) -> None:
    exit_anyway(TERMINATED)
    if _work is None:
        sys.exit(TERMINATED)
    _work.get_loop().call_soon_threadsafe(_work.cancel)


def _end_children() -> None:
    """Send SIGTERM to all descendants of this process, and SIGKILL to those that do not exit."""
    children = psutil.Process().children(recursive=True)
    signal_all(children, signal.SIGTERM)
    signal_all(psutil.wait_procs(children, _CHILDREN_SECONDS)[1], signal.SIGKILL)
