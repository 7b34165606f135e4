"""Write a page about a run, or two runs side by side: ``verl-atropos report RUN [OTHER]``

The page is one HTML file that needs no network. It can be written while the run goes on.
"""

import argparse
import os
from pathlib import Path

from recipe.atropos.report.page import write_report
from recipe.atropos.run.status import find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name below runs/")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="a run to compare it with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the folder of the run")


def main(given: argparse.Namespace) -> int:
    other = None if given.other is None else find_run(given.other).path
    print(os.path.relpath(write_report(find_run(given.run).path, other, given.output)))
    return 0
