"""Print a service's log, and follow it: ``verl-atropos logs [RUN] [SERVICE] [-f]``

Without a service it lists the logs. Colors and control characters are left out. A log that is cut or replaced while it
is followed is read on from its new content.
"""

import argparse
import codecs
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipe.atropos.config.keys import nearest
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.status import find_run
from recipe.atropos.terminal.dashboard import last_line
from recipe.atropos.terminal.status import RUN_HELP
from recipe.atropos.utils.files import printable

_LINES, _POLL_SECONDS = 50, 0.2
_BLOCK = 1 << 16


def resolve(first: str | None, second: str | None) -> tuple[RunDir, str | None]:
    """Return the run and the service that one or two words name; a single word may be either.

    Raises:
        ConfigurationError: there is no such run, or no such log in it.
    """
    try:
        files, service = find_run(first), second
    except ConfigurationError:
        if first is None or second is not None:
            raise
        with contextlib.suppress(ConfigurationError):
            newest = find_run(None)
            if first in services(newest):
                return newest, first
        raise
    if service is not None and service not in services(files):
        known = nearest(service, services(files)) or f"; there are {', '.join(services(files)) or 'none yet'}"
        raise ConfigurationError(f"{files.logs} has no log of {service}{known}")
    return files, service


def services(files: RunDir) -> list[str]:
    """Return the names of the services that have a log."""
    return sorted(path.stem for path in files.logs.glob("*.log"))


def show_list(files: RunDir, console: Console) -> None:
    """Print the logs with size, age and last line, the newest last."""
    table = Table(box=None, header_style="bold", expand=True)
    table.add_column("service", no_wrap=True)
    for column in ("KiB", "s ago"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("last line", ratio=1, no_wrap=True, overflow="ellipsis")
    for path in sorted((files.log(name) for name in services(files)), key=lambda path: path.stat().st_mtime):
        found = path.stat()
        age, size = f"{time.time() - found.st_mtime:.0f}", f"{found.st_size / 1024:.0f}"
        table.add_row(Text(path.stem), size, age, Text(last_line(path)))
    console.print(table)


def read_end(files: RunDir, path: Path, lines: int, follow: bool = False) -> Iterator[bytes]:
    """Yield the last ``lines`` lines; to ``follow``: then what is added, until the run has ended and all is read.

    A run that has ended, or runs on another machine, is not followed.
    """
    path.open("rb").close()  # raises what tail would only print
    command, holder = ["tail", f"--lines={lines}", str(path)], files.holder()
    if follow and holder is not None and holder.is_here and holder.lives():
        command += ["-F", f"--pid={holder.pid}", f"--sleep-interval={_POLL_SECONDS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield from iter(lambda: process.stdout.read1(_BLOCK), b"")
        finally:
            process.terminate()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("service", nargs="?", metavar="SERVICE", help="api, sglang, gateway, trainer, launcher, ...")
    parser.add_argument("-f", "--follow", action="store_true", help="print what is added, until the run ends")
    parser.add_argument("-n", "--lines", type=int, default=_LINES, help="from the end; default: %(default)s")


def main(given: argparse.Namespace) -> int:
    files, service = resolve(given.run, given.service)
    if service is None:
        show_list(files, Console(highlight=False))
        return 0
    path = files.log(service)
    with contextlib.suppress(KeyboardInterrupt):
        for text in codecs.iterdecode(read_end(files, path, given.lines, given.follow), "utf-8", "replace"):
            print(printable(text), end="", flush=True)
    return 0
