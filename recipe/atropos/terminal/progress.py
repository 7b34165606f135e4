"""Progress display for slow operations: what is running, for how long, and where its log is."""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from recipe.atropos.terminal.dashboard import shown_path
from recipe.atropos.terminal.live_view import LiveView, shows_live


class _LastingConsole(Console):
    """Goes on, without output, once its terminal is gone, as it is for a job that a shell has disowned, or whoever
    reads its pipe, as ``tee`` is with a terminal.
    """

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):  # at the second, rich would end the program
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            for number in (1, 2):
                os.dup2(nothing, number)
            os.close(nothing)


console = _LastingConsole(highlight=False)

_EVERY_SECONDS = 15.0


def say(text: str | Text, label: str = "run", style: str = "bold", width: int = 7) -> None:
    """Print a label, in a field of ``width`` columns, and a text as it is: what it quotes may look like markup."""
    console.print(Text.assemble((label.ljust(width), style), " ", text), soft_wrap=True)


@contextlib.contextmanager
def progress(what: str, log: Path | None = None) -> Iterator[None]:
    """While the block runs, show what is done for how long: in the live view, else as a spinner on a terminal, else in
    a line every 15 s."""
    text = what if log is None else f"{what}; log: {shown_path(log)}"
    if LiveView.shown is not None:
        with LiveView.shown.doing(what, log):
            yield
        return
    if shows_live(console):
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as shown:
            shown.add_task(text, total=None)
            yield
        return
    done, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_EVERY_SECONDS):
            say(f"{time.monotonic() - begin:.0f} s: {text}", "...", "dim")

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
