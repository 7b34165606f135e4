"""Write a page about a run, or two runs side by side: ``verl-atropos report runs/NAME [runs/OTHER]``

The page is one HTML file that needs no network. It can be written while the run goes on.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from recipe.atropos.errors import one_line_errors
from recipe.atropos.report.page import write_report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="verl-atropos report", description="Write a page about a run, or two runs side by side."
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("other", type=Path, nargs="?", help="folder of a run to compare it with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the folder of the run")
    given = parser.parse_args(argv)
    with one_line_errors(OSError):
        print(os.path.relpath(write_report(given.run, given.other, given.output)))
    return 0
