"""The pictures that the launcher leaves of a run: ``report.html`` however it ends, ``reward.png`` of a finished one."""

from rich.markup import escape

from recipe.atropos.run.folder import RunDir
from recipe.atropos.terminal.dashboard import shown_path
from recipe.atropos.terminal.progress import console


def write_pictures(files: RunDir) -> None:
    """Write both for a run that has trained every step.

    Raises:
        DiskFull: there is no space for ``reward.png``.
    """
    from recipe.atropos.launcher.plots import plot_reward  # imported here: matplotlib takes a second

    plot_reward(files.path)
    _write_page(files)


def write_page_of_failure(files: RunDir) -> None:
    """Write the page of a run that ends with an error, and print where it is; nothing if it was never watched."""
    if (files.metrics.exists() or files.alarms.exists()) and _write_page(files):
        console.print(f"[bold]report[/]  {escape(shown_path(files.report))}: the run up to its error", soft_wrap=True)


def _write_page(files: RunDir) -> bool:
    """Write the page without tokens, for which torch and verl would have to be imported; tell if it cannot be."""
    from recipe.atropos.report.page import write_report

    try:
        write_report(files.path, tokens=False, ended=True)
    except Exception as error:  # whatever it is: the run ends as it would without
        text = f"{error}; python -m recipe.atropos report {files.path} writes it"
        console.print(f"[bold yellow]report[/]  {escape(text)}", soft_wrap=True)
        return False
    return True
