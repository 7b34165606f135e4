"""What a terminal shows while something goes on: lines, the progress of slow operations, and the live view of a run,
its state, redrawn several times a second below what is printed.

Guarantees:

- lines that are printed meanwhile appear above the view, in order, and stay;
- the terminal is left as it was, however the block ends, with the printed lines on it and without the view;
- a run that a shell has in the background prints its lines there, and no view;
- a run is never disturbed: what cannot be read is shown as such.
"""

import contextlib
import errno
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from rich.console import Console, ConsoleRenderable
from rich.control import Control
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import ControlType, Segments
from rich.text import Text

from recipe.atropos.run.status import RunReader, RunStatus
from recipe.atropos.terminal.dashboard import Activity, Dashboard, shown_path
from recipe.atropos.utils.files import FULL

_READ_SECONDS, _DRAWN_PER_SECOND = 1.0, 2
_KEPT_LINES = 100  # that are printed again when the terminal's size changes
_EVERY_SECONDS = 15.0  # between two lines of progress


class _LastingConsole(Console):
    """Goes on, without output, once its terminal is gone, as it is for a job that a shell has disowned, or whoever
    reads its pipe, as ``tee`` is with a terminal. What its file's disk has no room for is left out.
    """

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError as error:
            if error.errno not in (*FULL, errno.EIO, errno.EPIPE):  # at the last, rich would end the program
                raise
            with open(os.devnull, "w") as nothing:
                if error.errno in FULL:
                    self._drop_output(nothing.fileno())
                else:
                    for number in (1, 2):
                        os.dup2(nothing.fileno(), number)

    def _drop_output(self, nothing: int) -> None:
        """Write what is buffered to ``nothing``, a file descriptor; there may be room for what comes later."""
        number = self.file.fileno()
        kept = os.dup(number)
        os.dup2(nothing, number)
        self.file.flush()
        del self._buffer[:]
        os.dup2(kept, number)
        os.close(kept)


console = _LastingConsole(highlight=False)


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


# ---------------------------------------------------------------- the live view


def shows_live(console: Console) -> bool:
    """Return whether a view may be redrawn there: ``is_interactive`` was not set to False, and it is a terminal that
    can move the cursor, and is not a shell's by now."""
    able = console.file.isatty() and console.is_terminal and not console.is_dumb_terminal
    return able and console.is_interactive and _in_foreground()


def _in_foreground() -> bool:
    """Return whether this process may write over its terminal: no shell runs it in the background."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # standard input is no terminal
        return True


class LiveView(Live):
    """Context manager that shows the run in ``directory`` on ``console``; see the module.

    ``status`` is the newest state; ``hint`` a few words below it. ``shown`` is this process's view, if there is one.
    """

    shown: ClassVar["LiveView | None"] = None

    def __init__(self, console: Console, directory: Path, hint: str = ""):
        self.status: RunStatus | None = None
        self._reader, self._hint = RunReader(directory), hint
        self._activities: list[Activity] = []
        self._problem = ""
        self._printed: deque[ConsoleRenderable] = deque(maxlen=_KEPT_LINES)
        self._size = console.size
        self._done = threading.Event()
        super().__init__(
            console=console, get_renderable=self._draw, refresh_per_second=_DRAWN_PER_SECOND, transient=True
        )

    def __enter__(self) -> "LiveView":
        self._read()
        super().__enter__()
        threading.Thread(target=self._keep_reading, name="live-view", daemon=True).start()
        LiveView.shown = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        LiveView.shown = None
        self._done.set()
        try:
            super().__exit__(kind, error, at)
        finally:
            self.console.show_cursor()

    @contextlib.contextmanager
    def doing(self, text: str, log: Path | None) -> Iterator[None]:
        """Show what is being done while the block runs."""
        activity = Activity(text, time.monotonic(), log)
        self._activities = [*self._activities, activity]
        try:
            yield
        finally:
            self._activities = [other for other in self._activities if other is not activity]

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Keep what is printed; when the terminal's size has changed, print it again on a cleared screen.

        The view is redrawn over itself, by its number of lines, which a terminal changes that wraps them anew.
        """
        printed = [each for each in renderables if not isinstance(each, Control)]
        before, size = list(self._printed), self.console.size
        self._printed.extend(printed)
        if not _in_foreground():
            self._live_render._shape = None  # the shell writes now where the view was
            return printed
        if size != self._size:
            self._size = size
            self._live_render._shape = None  # nothing of the view is left to draw over
            shown_again = before[-max(1, size.height - 20) :]
            renderables = [Control(ControlType.CLEAR, ControlType.HOME), *shown_again, *renderables]
        return super().process_renderables(renderables)

    def _keep_reading(self) -> None:
        while not self._done.wait(_READ_SECONDS):
            self._read()

    def _read(self) -> None:
        try:
            self.status, self._problem = self._reader.read(), ""
        except Exception as error:  # whatever it is: the run goes on
            self._problem = f"the run's state cannot be read: {error}"

    def _draw(self) -> ConsoleRenderable:
        if self.status is None:
            return Text(self._problem)
        view = Dashboard(self.status, self._activities, self._problem or self._hint)
        try:  # drawn here, since an error would leave the launcher's own console.print
            return Segments(list(self.console.render(view)))
        except Exception as error:
            return Text(f"the run's state cannot be shown: {error}")
