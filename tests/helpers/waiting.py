"""Waiting for what happens beside a test."""

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], within: float = 60, service: Any = None, told: Callable[[], Any] = str) -> Any:
    """Return what ``condition`` gives once that is true.

    Fails after so many seconds, with what ``told`` says, and as soon as ``service`` has ended, with the end of its log.
    """
    deadline = time.monotonic() + within
    while not (found := condition()):
        running = service is None or service.poll() is None
        assert running and time.monotonic() < deadline, told() if service is None else service.tail(60)
        time.sleep(0.05)
    return found
