"""The pictures of a run that the launcher leaves at its end: ``reward.png`` and ``report.html``."""

from rich.markup import escape

from recipe.atropos.launcher.services import console
from recipe.atropos.run_dir import RunDir


def write_pictures(files: RunDir) -> None:
    """Write both; the page without tokens, which take seconds more (torch and verl would have to be imported).

    A page that cannot be written is told: the run is trained all the same.

    Raises:
        DiskFull: there is no space for ``reward.png``.
    """
    from recipe.atropos.launcher.plots import plot_reward  # imported here: matplotlib takes a second
    from recipe.atropos.report.page import write_report

    plot_reward(files.path)
    try:
        write_report(files.path, tokens=False)
    except Exception as error:
        text = f"{error}; python -m recipe.atropos report {files.path} writes it"
        console.print(f"[bold yellow]report[/]  {escape(text)}", soft_wrap=True)
