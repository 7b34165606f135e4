"""Draw the live view of a run, for the docs: ``python scripts/terminal_screenshot.py RUN``

Writes ``docs/live-view.svg``, best of a run that trains (``make demo ARGS="evaluation.every=10"``).
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from recipe.atropos.run.status import RunReader, find_run
from recipe.atropos.terminal.dashboard import Dashboard

TARGET = Path(__file__).resolve().parents[1] / "docs" / "live-view.svg"
_COLUMNS = 100


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    run = find_run(sys.argv[1])
    console = Console(record=True, width=_COLUMNS, height=30, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Dashboard(RunReader(run.path).read(), hint="Ctrl-C stops the run"))
    TARGET.write_text(console.export_svg(title="make demo"))
    print(TARGET)


if __name__ == "__main__":
    main()
