"""The pictures of a run that the launcher leaves at its end: ``reward.png`` and ``report.html``."""

import subprocess
import sys

from rich.markup import escape

from recipe.atropos.launcher.services import console
from recipe.atropos.run_dir import RunDir

_SECONDS = 120.0  # it takes 7 s of processor time for a run of the demo, of which 5 are imports


def write_pictures(files: RunDir) -> None:
    """Write both; the page in a process of its own, since that imports torch and verl.

    A page that cannot be written is told: the run is trained all the same.

    Raises:
        DiskFull: there is no space for ``reward.png``.
    """
    from recipe.atropos.launcher.plots import plot_reward  # imported here: matplotlib takes a second

    plot_reward(files.path)
    command = [sys.executable, "-m", "recipe.atropos", "report", str(files.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        why = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"not written after {_SECONDS:.0f} s"
    if why:
        text = f"{why}; python -m recipe.atropos report {files.path} writes it"
        console.print(f"[bold yellow]report[/]  {escape(text)}", soft_wrap=True)
