"""One HTML page about a run, or two side by side, that needs no network: ``runs/NAME/report.html``.

Style, program and data are in the file. Its size is bounded for any run: curves are shortened to ``curves.POINTS``,
samples are chosen. It holds no secret: the run's files have none, and settings with a secret's name are hidden.
"""

import html
import re
import time
from pathlib import Path
from typing import Any

import orjson

from recipe.atropos.report import curves, facts, samples
from recipe.atropos.report.alarm_list import all_alarms
from recipe.atropos.report.run_history import RunHistory, read_history
from recipe.atropos.report.verdict import verdict
from recipe.atropos.utils.files import usable, write_atomic

FOLDER = Path(__file__).parent
_SCRIPTS = ("elements.js", "charts.js", "samples.js", "page.js")


def write_report(
    run: str | Path,
    other: str | Path | None = None,
    output: str | Path | None = None,
    tokens: bool = True,
    ended: bool = False,
) -> Path:
    """Write the page of ``run``, beside ``other`` if given, to ``output`` or the run's folder; return its path.

    ``tokens``: samples have tokens with mask, logprob and advantage, for which torch and verl are imported.
    ``ended``: the run has ended, though its launcher, which writes the page, still holds the folder.

    Raises:
        ConfigurationError: a folder has no run, or the page cannot be written there.
        DiskFull: an earlier page is unchanged.
    """
    histories = [read_history(folder) for folder in (run, other) if folder is not None]
    if ended:
        histories[0].running = False
    path = Path(output) if output is not None else histories[0].run.report
    text = page(histories, tokens)
    with usable(str(path), "another file (--output)"):  # a run may be on a disk that is mounted read-only
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    return path


def page(histories: list[RunHistory], tokens: bool = True) -> str:
    """Return the page as text."""
    runs = [describe(history, tokens) for history in histories]
    if len({run["name"] for run in runs}) < len(runs):
        for run, history, number in zip(runs, histories, (1, 2), strict=False):
            run["name"] = f"{history.run.path.parent.name}/{history.name} ({number})"
    data = {"written": time.strftime("%Y-%m-%d %H:%M:%S"), "runs": runs}
    names = " and ".join(run["name"] for run in runs)
    values = {
        "title": html.escape(f"{names}: report"),
        "style": (FOLDER / "page.css").read_text(),
        "script": "\n".join((FOLDER / name).read_text() for name in _SCRIPTS),
        "data": orjson.dumps(data).decode().replace("<", "\\u003c"),  # no text of a sample ends the element
        "verdict": html.escape(" ".join(run["verdict"]["text"] for run in data["runs"])),
    }
    return re.sub(r"{{(\w+)}}", lambda found: values[found[1]], (FOLDER / "page.html").read_text())


def describe(history: RunHistory, tokens: bool = True) -> dict[str, Any]:
    """Return all that the page says of one run, as JSON."""
    alarms = all_alarms(history)
    rollouts = samples.rollouts_of(history)
    versions, recorded = facts.versions(history)
    newest, note = samples.sessions(history)
    return {
        "name": history.name,
        "state": facts.state(history),
        "steps": history.steps,
        "verdict": verdict(history, alarms)._asdict(),
        "alarms": alarms,
        "figures": facts.figures(history),
        "curves": curves.curves(history, alarms),
        "timeline": curves.timeline(history),
        "outcomes": curves.outcomes(history),
        "staleness": curves.staleness_histogram(history),
        "lengths": curves.length_histogram(rollouts),
        "dropped": facts.dropped(history),
        "sessions": {"rows": facts.sessions(history), "newest": newest, "note": note},
        "samples": samples.samples(history, rollouts, tokens),
        "items": samples.items(history, rollouts),
        "configuration": facts.configuration(history),
        "versions": versions,
        "recorded": recorded,
    }
