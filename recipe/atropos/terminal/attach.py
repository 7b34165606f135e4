"""Show the live view of a run that another process runs: ``verl-atropos attach [RUN]``

Guarantees: the run is only read. Ctrl-C ends this view and leaves the run alone.
"""

import argparse
import signal
import sys
import time

from rich.console import Console
from rich.text import Text

from recipe.atropos.run.folder import LAUNCHER, RunDir
from recipe.atropos.run.status import FINISHED, KILLED, STOPPED, RunReader, RunStatus, find_run
from recipe.atropos.terminal.dashboard import shell_command, shown_path
from recipe.atropos.terminal.progress import LiveView, shows_live
from recipe.atropos.terminal.status import RUN_HELP, how_to_go_on, print_state, show_summary

_POLL_SECONDS = 0.5


def watch_run(files: RunDir, console: Console) -> RunStatus:
    """Show the run until it ends, and return its last state. KeyboardInterrupt passes through."""
    if not shows_live(console):
        return _print_steps(files, console)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the terminal is left as it was
    with LiveView(console, files.path, hint="Ctrl-C leaves the run alone") as view:
        while view.status is None or view.status.is_alive:
            time.sleep(_POLL_SECONDS)
        return view.status


def _print_steps(files: RunDir, console: Console) -> RunStatus:
    """Print a line per step: the output is no terminal."""
    reader, step = RunReader(files.path), -1
    while (status := reader.read()).is_alive:
        if status.step != step:
            step, scores = status.step, status.series["score"]
            score = f"score {scores[-1]:+.3f}" if scores else status.state
            console.print(f"step {step}/{status.total or '?'} {score}", soft_wrap=True)
        time.sleep(_POLL_SECONDS)
    return status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)


def main(given: argparse.Namespace) -> int:
    """Return exit status 0 if the run goes on or has finished, else 1."""
    console = Console(highlight=False)
    files = find_run(given.run)
    if not RunReader(files.path).read().is_alive:
        return 1 if print_state(files, console).state in (STOPPED, KILLED) else 0
    try:
        status = watch_run(files, console)
    except KeyboardInterrupt:
        told = f"{shown_path(files.path)} goes on; to end it: {shell_command('stop', files.path)}"
        console.print(Text(told), soft_wrap=True)
        return 0
    if status.state == FINISHED:
        show_summary(files, console)
        return 0
    where = f"; see {shown_path(files.log(LAUNCHER))}" if files.log(LAUNCHER).exists() else ""
    told = f"{shown_path(files.path)} {status.state}: {how_to_go_on(status)}{where}"
    console.print(Text(told), soft_wrap=True)
    return 1
