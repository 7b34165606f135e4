"""Draw what the terminal shows of a run, for the docs: ``python scripts/terminal_screenshot.py RUN [STEP GROUP ROW]``

Writes ``docs/live-view.svg``: the view of the run, best one that trains (``make demo ARGS="evaluation.every=10"``); or,
of a step, ``docs/tokens.svg``: the tokens of one row, as ``inspect`` shows them.
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from recipe.atropos.commands.inspect import show
from recipe.atropos.run.status import RunReader, find_run
from recipe.atropos.terminal.dashboard import Dashboard

DOCS = Path(__file__).resolve().parents[1] / "docs"
_COLUMNS = 100


def main() -> None:
    if len(sys.argv) not in (2, 5):
        raise SystemExit(__doc__)
    run, place = find_run(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    console = Console(record=True, width=_COLUMNS, height=30, file=io.StringIO(), force_terminal=True, highlight=False)
    if place:
        show(run, *place, table=False, console=console)
        name, title = "tokens", "inspect --step {} --group {} --sequence {}".format(*place)
    else:
        console.print(Dashboard(RunReader(run.path).read(), hint="Ctrl-C stops the run"))
        name, title = "live-view", "make demo"
    target = DOCS / f"{name}.svg"
    target.write_text(console.export_svg(title=title))
    print(target)


if __name__ == "__main__":
    main()
