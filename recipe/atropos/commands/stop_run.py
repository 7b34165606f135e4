"""End a run as Ctrl-C does, and wait until it has ended: ``verl-atropos stop [RUN]``

Guarantees:

- only the process that holds the run's folder is signaled, known by pid and start time; nothing is, if that process has
  ended or belongs to another machine;
- one signal is sent: the launcher itself ends its services, in their order, and accounts for the groups.
"""

import argparse
import os
import signal
import sys
import time

from rich.console import Console
from rich.text import Text

from recipe.atropos.errors import LaunchError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.status import ELSEWHERE, RunReader, find_run
from recipe.atropos.terminal.dashboard import shown_path
from recipe.atropos.terminal.progress import shows_live
from recipe.atropos.terminal.status import RESUMES, RUN_HELP, how_to_go_on

_WAIT_SECONDS, _POLL_SECONDS = 120.0, 0.2


def stop_run(files: RunDir, console: Console, limit: float) -> int:
    """Stop the run, and return the exit status: 0 if it does not go on.

    Raises:
        LaunchError: it runs on another machine, or it did not end within ``limit`` seconds.
    """
    status, name = RunReader(files.path).read(), shown_path(files.path)
    if status.state == ELSEWHERE:
        raise LaunchError(f"{name}: nothing was stopped: {how_to_go_on(status)}")
    if not status.is_alive:
        console.print(Text(f"{name} does not run ({status.state}); nothing was stopped"), soft_wrap=True)
        return 0
    holder, begun = status.holder, time.monotonic()
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has ended since
    except PermissionError as error:
        raise LaunchError(f"process {holder.pid} is another user's: ask them, or use their account") from error
    what = f"stopping {name} at step {status.step}, process {holder.pid}"
    with console.status(Text(what)) if shows_live(console) else console:
        while holder.lives():
            if time.monotonic() - begun > limit:
                raise LaunchError(
                    f"{name}: process {holder.pid} has not ended {limit:g} s after SIGTERM; "
                    f"its services may still be saving; kill -9 {holder.pid} ends them all"
                )
            time.sleep(_POLL_SECONDS)
    after = RunReader(files.path).read()
    how = "had finished" if after.state == "finished" else RESUMES
    seconds = time.monotonic() - begun
    console.print(Text(f"stopped {name} after step {after.step}, in {seconds:.0f} s; {how}"), soft_wrap=True)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--timeout", type=float, default=_WAIT_SECONDS, metavar="S", help="seconds to wait; default: %(default)g"
    )


def main(given: argparse.Namespace) -> int:
    try:
        return stop_run(find_run(given.run), Console(highlight=False), given.timeout)
    except KeyboardInterrupt:
        print("no longer waited for; a run that was signaled still ends", file=sys.stderr)
        return 130
