"""math_verify's time limits outside the main thread.

``math_verify.parse`` and ``verify`` (0.9.0) limit their time by SIGALRM, which Python lets only the main thread handle;
in any other they raise ValueError (https://github.com/huggingface/Math-Verify/issues/55). Environments call both and
cannot choose another limit, so for environments in a thread ``limit_math_verify_in_threads()`` replaces it by one of
the same power: an exception that is raised in the thread between two bytecodes. In the main thread nothing changes.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import math_verify.grader
import math_verify.parser
from math_verify.errors import TimeoutException
from math_verify.utils import timeout as _by_signal


def time_limit(timeout_seconds: float | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator like ``math_verify.utils.timeout``: the function raises TimeoutException after the limit."""
    if not timeout_seconds or timeout_seconds < 0 or threading.current_thread() is threading.main_thread():
        return _by_signal(timeout_seconds)
    return lambda function: lambda *args, **kwargs: _in_thread(timeout_seconds, function, *args, **kwargs)


def _in_thread(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    thread = ctypes.c_ulong(threading.get_ident())
    lock, over = threading.Lock(), False

    def expire() -> None:
        with lock:  # not after the function has returned: it would hit later code
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeoutException))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        return function(*args, **kwargs)
    finally:
        timer.cancel()
        with lock:
            over = True


def limit_math_verify_in_threads() -> None:
    math_verify.parser.timeout = math_verify.grader.timeout = time_limit
