"""Draw what the terminal shows of a run, for the docs:

    python scripts/terminal_screenshot.py RUN [--inspect STEP GROUP SEQUENCE]

Writes ``docs/live-view.svg``, best of a run that trains (``make demo ARGS="evaluation.every=10"``); with ``--inspect``
``docs/inspect.svg``, a trajectory whose tokens are colored by advantage.
"""

import argparse
import io
from pathlib import Path

from rich.console import Console

from recipe.atropos.commands.inspect import show
from recipe.atropos.run.status import RunReader, find_run
from recipe.atropos.terminal.dashboard import Dashboard

DOCS = Path(__file__).resolve().parents[1] / "docs"
_COLUMNS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run, or its name below runs/")
    parser.add_argument("--inspect", type=int, nargs=3, metavar=("STEP", "GROUP", "SEQUENCE"), help="of a trajectory")
    given = parser.parse_args()
    run = find_run(given.run)
    console = Console(record=True, width=_COLUMNS, height=30, file=io.StringIO(), force_terminal=True, highlight=False)
    if given.inspect:
        show(run, *given.inspect, table=False, console=console)
        step, group, sequence = given.inspect
        title = f"verl-atropos inspect {given.run} --step {step} --group {group} --sequence {sequence}"
    else:
        console.print(Dashboard(RunReader(run.path).read(), hint="Ctrl-C stops the run"))
        title = "make demo"
    target = DOCS / ("inspect.svg" if given.inspect else "live-view.svg")
    target.write_text(console.export_svg(title=title))
    print(target)


if __name__ == "__main__":
    main()
