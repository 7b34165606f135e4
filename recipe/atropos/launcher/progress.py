"""Progress display for slow operations: what is running, for how long, and where its log is."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from recipe.atropos.launcher.services import console

_EVERY_SECONDS = 15.0


@contextlib.contextmanager
def progress(what: str, log: Path | None = None) -> Iterator[None]:
    """While the block runs, show a spinner with elapsed time on a terminal; elsewhere, print a line every 15 s."""
    text = what if log is None else f"{what}; log: {os.path.relpath(log)}"
    if console.is_terminal:
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
        ) as shown:
            shown.add_task(escape(text), total=None)
            yield
        return
    done, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_EVERY_SECONDS):
            console.print(f"[dim]...[/]     {time.monotonic() - begin:.0f} s: {escape(text)}", soft_wrap=True)

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
