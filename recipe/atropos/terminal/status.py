"""Show the state of a run once: ``verl-atropos status [RUN]``"""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from recipe.atropos.errors import one_line_errors
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.status import ELSEWHERE, FINISHED, KILLED, STOPPED, RunReader, RunStatus, find_run
from recipe.atropos.terminal.dashboard import Dashboard, shell_command
from recipe.atropos.terminal.run_summary import show_summary

RUN_HELP = "folder of a run, or its name below runs/; default: the run that started last"
_TOLD = {
    STOPPED: "ended before its last step; the command that started it resumes it",
    KILLED: "its launcher was killed or the machine was restarted; the command that started it resumes it",
}


def how_to_go_on(status: RunStatus) -> str:
    """Return a line that says what the state means, or how to look closer."""
    if status.state == ELSEWHERE:
        holder = status.holder
        return f"process {holder.pid} of {holder.host} runs it, as far as its files say: ask there"
    if status.is_alive:
        return f"process {status.holder.pid}; look on: {shell_command('attach', status.directory)}"
    return _TOLD.get(status.state, "")


def print_state(files: RunDir, console: Console) -> RunStatus:
    """Print the state of a run and, if it has finished, its summary; return it."""
    status = RunReader(files.path).read()
    console.print(Dashboard(status, whole=True))
    if status.state == FINISHED:
        show_summary(files, console)
    elif told := how_to_go_on(status):
        console.print(escape(told), soft_wrap=True)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit status 0 if the run goes on or has finished, else 1."""
    parser = argparse.ArgumentParser(
        prog="verl-atropos status",
        description="Show the state of a run.",
        epilog="Exit status: 0 if the run goes on or has finished, 1 if it ended early or there is none.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    given = parser.parse_args(argv)
    with one_line_errors(PermissionError):  # another user's run
        status = print_state(find_run(given.run), Console(highlight=False))
    return 1 if status.state in (STOPPED, KILLED) else 0
