"""A run's state as text for a terminal: the live view and ``verl-atropos status`` show the same.

Everything fits the width that rich gives, from 40 columns on. A view that is redrawn fits the height too: alarms are
shortened, and with fewer lines than it needs the last ones are left out. Bars and sparklines can be read without color,
and a terminal without Unicode gets ASCII.
"""

import math
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from recipe.atropos.run.status import ELSEWHERE, ENDING, KILLED, RUNNING, STARTING, RunStatus
from recipe.atropos.utils.files import printable

_GIB = 1 << 30
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_PHASES = {  # of a step: color, and a fill that can be told from its neighbors without color
    "wait": ("yellow", "░."),
    "convert": ("blue", "▒c"),
    "evaluate": ("yellow", "░e"),
    "log_prob": ("cyan", "▓l"),
    "advantage": ("blue", "▒a"),
    "update": ("green", "█u"),
    "push": ("magenta", "▚p"),
    "record": ("blue", "▒r"),
    "other": ("white", "░o"),
}
_TAIL_BYTES = 4096
_SHOWN_SHARE = 0.05  # of a step, from which on a phase is named
_HEALTH = {
    "ok": ("green", "●", "+"),
    "waits": ("yellow", "◐", "~"),
    "down": ("red", "✗", "x"),
    "ended": ("dim", "○", "-"),
    "unknown": ("dim", "?", "?"),
}
_ALARMS, _ALARM_LINES = 3, 9  # shown at once in a view that is redrawn, and their lines in all
Rows = Iterator[tuple[str, Text]]


@dataclass(frozen=True)
class Activity:
    """What is being done, since when (``time.monotonic``), and where its output goes."""

    text: str
    since: float
    log: Path | None = None


@dataclass(frozen=True)
class Dashboard:
    """What is shown of a run. ``hint``: a few words about how to go on; ``whole``: it may be longer than the screen."""

    status: RunStatus
    activities: Sequence[Activity] = ()
    hint: str = ""
    whole: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = options.ascii_only or options.legacy_windows
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        rows = list(self._rows(max(20, options.max_width - 17), ascii_only))
        for label, content in rows if self.whole else rows[: max(3, options.size.height - 3)]:
            grid.add_row(label, content)
        yield Panel(
            grid,
            title=Text.assemble((self.status.directory.name, "bold not dim"), "  ", *_state(self.status)),
            title_align="left",
            subtitle=Text(self.hint) if self.hint else None,
            subtitle_align="left",
            border_style="dim",
        )

    def _rows(self, width: int, ascii_only: bool) -> Rows:
        """Yield (label, content); ``width``: columns of the content."""
        status, series = self.status, self.status.series
        for activity in self.activities:
            yield from _activity(activity, width, ascii_only)
        if status.step:
            yield "step", _steps(status, width, ascii_only)
            yield "score", _curve(series["score"], width, "+.3f", ascii_only)
        if status.heldout:
            form = ".1%" if status.heldout_share else ".4g"
            yield "held-out", _curve(list(status.heldout.values()), width, form, ascii_only)
        yield from _alarms(status, width, self.whole)
        if status.step:
            bar, legend = phases(status.last, width, ascii_only)
            yield "phases", bar
            yield "", legend
            yield "speed", _speed(status)
            yield "staleness", _staleness(status)
        if status.diagnosis is not None and status.diagnosis["batch_size"]:
            yield "queue", _queue(status)
        if status.memory is not None:
            yield "memory", _memory(status)
        yield from _services(status, width, ascii_only)
        if status.step and not status.alarms:
            yield "alarms", Text("none", "dim")


def _state(status: RunStatus) -> tuple[tuple[str, str], str]:
    """Return the run's state with its style, and what follows it."""
    styles = {KILLED: "red", ELSEWHERE: "yellow", STARTING: "cyan", RUNNING: "green", ENDING: "green"}
    text = f"on {status.holder.host}" if status.state == ELSEWHERE else status.state
    style = f"not dim {styles.get(status.state, 'cyan')}"
    return (text, style), ", the trainer waits" if status.waiting and status.is_alive else ""


def _activity(activity: Activity, width: int, ascii_only: bool) -> Rows:
    """Yield what is being done for how long, and the last line of its log."""
    elapsed = time.monotonic() - activity.since
    spinner = "|/-\\" if ascii_only else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    turn, took = spinner[int(elapsed * 2) % len(spinner)], f"  {clock(elapsed)}"
    text = textwrap.shorten(activity.text, max(10, width - 2 - len(took)), placeholder="...")
    yield "doing", Text.assemble((f"{turn} ", "cyan"), text, took)
    if activity.log is not None:
        yield "", Text(f"  {activity.log.name}: {last_line(activity.log)}", "dim")


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, without control characters; "" if none can be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = printable(file.read().decode(errors="replace")).split("\n")
    except (FileNotFoundError, PermissionError):
        return ""
    return next((shown for line in reversed(lines) if (shown := line.strip())), "")


def _steps(status: RunStatus, width: int, ascii_only: bool) -> Text:
    if status.total is None:
        return Text(f"{status.step}")
    left = status.seconds_left
    note = f"  {status.step / status.total:.0%}" + (f"  {clock(left)} left" if left else "")
    head = f"{status.step} of {status.total}  "
    full, rest = ("#", ".") if ascii_only else ("━", "─")
    room = max(5, width - len(head) - len(note))
    done = round(room * min(1.0, status.step / status.total))
    return Text.assemble(head, (full * done, "green"), (rest * (room - done), "dim"), note)


def _curve(values: Sequence[float], width: int, form: str, ascii_only: bool) -> Text:
    """Show the newest value, a sparkline, and the first and the best value."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Text("")
    note = f"first {known[0]:{form}}, best {max(known):{form}}"
    line = sparkline(known, max(5, min(len(known), width - 9 - len(note) - 2)), ascii_only)
    return Text.assemble((f"{known[-1]:{form}}".ljust(9), "bold"), (line, "green"), (f"  {note}", "dim"))


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Return at most ``width`` characters, from the lowest to the highest value; more values are averaged."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    count = min(width, len(values))
    parts = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = high - low or 1.0
    return "".join(blocks[round((mean - low) / span * (len(blocks) - 1))] for mean in means)


def phases(line: dict[str, float], width: int, ascii_only: bool = False) -> tuple[Text, Text]:
    """Return a bar of the phases of a step, and its legend in seconds."""
    seconds = {name: line.get(f"phase_s/{name}") or 0.0 for name in _PHASES}
    total = sum(seconds.values()) or 1.0
    bar, legend = Text.assemble((f"{total:.1f} s".ljust(9), "bold")), Text(" " * 9)
    room, at, reached = max(5, width - 9), 0, 0.0
    for name, value in seconds.items():
        color, fills = _PHASES[name]
        fill = fills[1] if ascii_only else fills[0]
        reached += value
        end = round(room * reached / total)
        bar.append(fill * (end - at), color)
        at = end
        if value >= _SHOWN_SHARE * total:
            legend.append(f"{fill} ", color)
            legend.append(f"{name} {value:.1f}  ")
    return bar, legend


def _speed(status: RunStatus) -> Text:
    series, count = status.series, min(10, len(status.series["seconds"]))
    seconds = sum(series["seconds"][-count:]) or math.nan
    whole, trained = (sum(series[name][-count:]) / seconds for name in ("tokens", "trained_tokens"))
    pace = status.seconds_per_step
    return Text.assemble(
        "" if math.isnan(whole) else f"{whole:,.0f} tokens/s",
        ("" if math.isnan(trained) else f", {trained:,.0f} of them trained on", "dim"),
        ("" if pace is None else f"  {pace:.1f} s from step to step", "dim"),
    )


def _staleness(status: RunStatus) -> Text:
    mean, most = (status.last.get(f"atropos/staleness/{name}") for name in ("mean", "max"))
    if mean is None:
        return Text("unknown: the samples have no weight versions", "dim")
    bound = "no bound" if status.max_staleness is None else f"bound {status.max_staleness}"
    return Text.assemble(f"mean {mean:.1f}, most {most:.0f} updates", (f"  {bound}", "dim"))


def _queue(status: RunStatus) -> Text:
    queue, size = status.diagnosis["queue"], status.diagnosis["batch_size"]
    why = f"  {status.diagnosis['why']}" if status.waiting else ""
    text = f"{queue['groups']} groups, {queue['sequences']} of {size} sequences"
    return Text.assemble(text, (f"  {queue['open_tickets']} in flight{why}", "dim"))


def _memory(status: RunStatus) -> Text:
    memory = status.memory
    gpus = (
        f"  GPU {number}: {used / _GIB:.0f} of {total / _GIB:.0f}" for number, (used, total) in enumerate(memory.gpus)
    )
    free = (f"  {memory.free / _GIB:.0f} of {memory.total / _GIB:.0f} free", "dim")
    return Text.assemble(f"{memory.run / _GIB:.1f} GiB in this run's processes", free, *gpus)


def _services(status: RunStatus, width: int, ascii_only: bool) -> Rows:
    """Yield lines of services, as many beside each other as fit."""
    label, line = "services", Text()
    for service in status.services:
        color, mark, plain = _HEALTH[service.health]
        detail = f" ({service.detail})" if service.detail else ""
        shown = Text.assemble((f"{plain if ascii_only else mark} ", color), service.name, (f"{detail}  ", "dim"))
        if line and len(line) + len(shown) > width:
            yield label, line
            label, line = "", Text()
        line.append_text(shown)
    if line:
        yield label, line


def _alarms(status: RunStatus, width: int, whole: bool) -> Rows:
    label, shown = "alarms", status.alarms if whole else status.alarms[:_ALARMS]
    for alarm in shown:
        where = f" ({alarm['environment']})" if alarm.get("environment") else ""
        since = f" since step {alarm['since_step']}" if alarm.get("since_step") is not None else ""
        advice = f"; try: {alarm['advice']}" if alarm.get("advice") else ""
        text = f"{alarm['alarm']}{where}{since}: {alarm.get('seen', '')}{advice}"
        most = None if whole else _ALARM_LINES // len(shown)
        for line in textwrap.wrap(text, width, max_lines=most, placeholder=" ..."):
            yield label, Text(line, "yellow")
            label = ""
    if (more := len(status.alarms) - len(shown)) > 0:
        yield "", Text(f"and {more} more", "dim")


def clock(seconds: float) -> str:
    """Return a duration as M:SS, or H:MM:SS."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown_path(path: object) -> str:
    """Return a path relative to the working directory if it is below, else absolute."""
    relative = os.path.relpath(str(path))
    return str(path) if relative.startswith("..") else relative


def shell_command(command: str, directory: Path) -> str:
    """Return what to type to run ``verl-atropos COMMAND`` on a run."""
    program = "verl-atropos" if shutil.which("verl-atropos") else f"{shown_path(sys.executable)} -m recipe.atropos"
    return f"{program} {command} {shlex.quote(shown_path(directory))}"
