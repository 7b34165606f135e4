"""Work of an environment whose failure ends nothing else."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Escaped(RuntimeError):
    """What is no Exception, its cause, was raised where it must end nothing else."""


async def guarded(work: Awaitable[Any]) -> Any:
    """Await ``work``; raise Escaped for what is no Exception, such as SystemExit, which would end the event loop. So is
    the cancellation of a task that ``work`` awaits; that of the current task stays what it is.
    """
    try:
        return await work
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if asyncio.current_task().cancelling():
            raise asyncio.CancelledError from error
        raise Escaped(f"it raised {error!r}") from error


async def awaited(result: Any) -> Any:
    """Return what a function gave, a plain one or an async one."""
    return await result if inspect.isawaitable(result) else result


async def together(pieces: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return the results of pieces of work that run at once, each ``guarded``; where one fails, the others end."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(guarded(piece)) for piece in pieces]
    return [task.result() for task in tasks]


async def in_own_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, called in a thread of its own: those that never return would use up the threads
    of others, and have them wait.
    """
    return await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), function, *args)
