"""Show the state of a run once: ``verl-atropos status [RUN]``; and the table at a run's end: what was learned, from
what, in what time, and where the outputs are.
"""

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipe.atropos.run.evaluations import is_accuracy
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics, score_of
from recipe.atropos.run.status import ELSEWHERE, FINISHED, KILLED, STOPPED, RunReader, RunStatus, find_run
from recipe.atropos.terminal.dashboard import Dashboard, clock, shell_command, shown_path
from recipe.atropos.utils.files import read_json

RUN_HELP = "folder of a run, or its name below runs/; default: the run that started last"
RESUMES = "the command that started it resumes it (leave out trainer.resume_mode)"
_TOLD = {
    STOPPED: f"ended before it was finished; {RESUMES}",
    KILLED: f"its launcher was killed or the machine was restarted; {RESUMES}",
}


def how_to_go_on(status: RunStatus) -> str:
    """Return a line that says what the state means, or how to look closer."""
    if status.state == ELSEWHERE:
        holder = status.holder
        return f"process {holder.pid} of {holder.host} runs it, as far as its files say: ask there"
    if status.is_alive:
        return f"process {status.holder.pid}; look on: {shell_command('attach', status.directory)}"
    return _TOLD.get(status.state, "")


def show_summary(files: RunDir, console: Console) -> None:
    """Print the table of a run that has ended; ``summary.json`` has all of it and more."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(files, read_json(files.summary, {})).items():
        table.add_row(Text(label), Text(text))
    console.print(table)


def _rows(files: RunDir, summary: dict) -> dict[str, str]:
    """Return the text of each row that has one."""
    scores = [score for line in read_metrics(files.path) if (score := score_of(line)) is not None]
    held, groups, dropped = (summary.get(key) or {} for key in ("heldout", "groups", "dropped"))
    restarts = sum(env.get("restarts", 0) for env in summary.get("environments", {}).values())
    seconds = summary.get("seconds_in_all", summary.get("seconds", 0.0))
    tokens, sequences = summary.get("tokens_trained", 0), summary.get("sequences_trained", 0)
    model = next((folder for folder in (files.model, files.adapter) if folder.exists()), files.model)
    outputs = {
        "model": model,
        "report": files.report,
        "plot": files.reward_picture,
        "metrics": files.metrics,
        "summary": files.summary,
    }
    rows = {
        "score": f"{scores[0]:+.3f} -> {scores[-1]:+.3f} (mean of a step's samples)" if scores else "",
        **{"held-out" + (f" {name}" if len(held) > 1 else ""): _heldout(found) for name, found in held.items()},
        "steps": f"{summary.get('steps', 0)} in {clock(seconds)}"
        + (f", {restarts} restarts of environments" if restarts else ""),
        "tokens": f"{tokens:,} trained on, in {sequences:,} sequences",
        "groups": _counts(groups and {key: groups[key] for key in ("received", "trained", "dropped", "left")}),
        "dropped": _counts(dropped),
        "alarms": ", ".join(summary.get("alarms") or {}) or "none",
        **{label: shown_path(path) for label, path in outputs.items() if path.exists()},
    }
    return {label: text for label, text in rows.items() if text}


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in found.items())


def _heldout(found: dict) -> str:
    """Return the first and the latest value, in percent if it is a share."""
    form = ".1%" if is_accuracy(found.get("metric") or "") else ".4g"
    values = [found[key] for key in ("before", "after") if found.get(key) is not None]
    items = f" ({found['items']} items)" if found.get("items") else ""
    return " -> ".join(f"{value:{form}}" for value in values) + items


def print_state(files: RunDir, console: Console) -> RunStatus:
    """Print the state of a run and, if it has finished, its summary; return it."""
    status = RunReader(files.path).read()
    console.print(Dashboard(status, whole=True))
    if status.state == FINISHED:
        show_summary(files, console)
    elif told := how_to_go_on(status):
        console.print(Text(told), soft_wrap=True)
    return status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 if the run goes on or has finished, 1 if it ended early or there is none."
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)


def main(given: argparse.Namespace) -> int:
    """Return exit status 0 if the run goes on or has finished, else 1."""
    status = print_state(find_run(given.run), Console(highlight=False))
    return 1 if status.state in (STOPPED, KILLED) else 0
