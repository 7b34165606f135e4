"""The live view of a run on a terminal: its state, redrawn several times a second below what the launcher prints.

Guarantees:

- lines that are printed meanwhile appear above the view, in order, and stay;
- the terminal is left as it was, however the block ends, with the printed lines on it and without the view;
- a run that a shell has in the background prints its lines there, and no view;
- a run is never disturbed: what cannot be read is shown as such.
"""

import contextlib
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
from rich.segment import ControlType, Segments
from rich.text import Text

from recipe.atropos.run.status import RunReader, RunStatus
from recipe.atropos.terminal.dashboard import Activity, Dashboard

_READ_SECONDS, _DRAWN_PER_SECOND = 1.0, 2
_KEPT_LINES = 100  # that are printed again when the terminal's size changes


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
