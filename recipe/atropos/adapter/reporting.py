"""What became of an environment's groups and samples, in numbers: ``self.report`` of an adapted environment.

- What is not sent, or is sent otherwise than the environment made it, is counted under a name: never only a warning.
- An environment whose items end for a minute without one group being sent is an event, ``nothing_sent``: counted, and
  logged with the reasons so far; again each minute.
- ``items`` ended, of which came ``groups_sent`` (or ``groups_written``), ``not_sent/REASON`` and ``failed/EXCEPTION``;
  ``in_flight`` are those that have begun and not ended: at the time of the line, in the last line those of the end;
  ``score`` is the mean of all that was scored, sent or not, before anything shapes it.
- Counts are totals since the process began; means are of what was observed since the line before.
- They go to wandb with the environment's own metrics, as ``env/NAME``, and into the file of ``--adapter.report``, one
  JSON object a line: ``{"time", "env", "step", "in_flight", "counts": {NAME: int}, "means": {NAME: float}}``.
"""

import logging
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from recipe.atropos.utils.files import append_line

logger = logging.getLogger(__name__)

_SECONDS = 5.0  # between two lines, where something was counted
_SILENCE = 60.0  # of items that end and nothing that is sent, until it is said
_REASONS = ("not_sent/", "failed/", "tried_again/")


class EnvReport:
    """Counts and means of one environment; ``path`` is the file that lines are added to, None for no file."""

    def __init__(self, name: str, path: str | Path | None = None):
        self.name = name
        self.counts: Counter[str] = Counter()
        self.in_flight = 0
        self._path = Path(path) if path else None
        self._observed: dict[str, list[float]] = defaultdict(list)
        self._means: dict[str, float] = {}  # the latest of each
        self._written: tuple[Counter[str], int] = Counter(), 0
        self._time = float("-inf")
        self._last = (0, 0)  # items ended, groups sent, when something was sent or the silence was said
        self._silent_since: float | None = None  # the first item that ended since
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] += n

    def __str__(self) -> str:
        """Why what is missing is missing."""
        found = [f"{name} {n}" for name, n in self.counts.most_common() if name.startswith(_REASONS)]
        return ", ".join(found) or "no reason known"

    def observe(self, name: str, value: float) -> None:
        self._observed[name].append(float(value))

    def refuse(self, reason: str, detail: str) -> None:
        """A group that is not sent: counted as ``not_sent/REASON``; the first of each reason is logged."""
        first = not self.counts[f"not_sent/{reason}"]
        self.count(f"not_sent/{reason}")
        logger.log(logging.WARNING if first else logging.DEBUG, "%s: group not sent, %s: %s", self.name, reason, detail)

    def look(self, step: int) -> None:
        """To be called every second or so: writes a line where one is due, and says when nothing is sent."""
        counts, now = self.counts, time.monotonic()
        ended, sent = counts["items"], counts["groups_sent"] + counts["groups_written"]
        if sent != self._last[1]:
            self._last, self._silent_since = (ended, sent), None
        elif ended != self._last[0] and self._silent_since is None:
            self._silent_since = now
        elif self._silent_since is not None and now - self._silent_since >= _SILENCE:
            what = "%s: nothing sent for %.0f s, in which %d items ended; since the start: %s"
            items, seconds = ended - self._last[0], now - self._silent_since
            logger.error(what, self.name, seconds, items, self)
            self.count("nothing_sent")
            self._last, self._silent_since = (ended, sent), None
        self.write(step)

    def metrics(self) -> dict[str, float]:
        """All counts and the latest means, as ``env/NAME``."""
        self._settle()
        return {f"env/{name}": float(value) for name, value in {**self.counts, **self._means}.items()}

    def write(self, step: int, at_once: bool = False) -> None:
        """A line, if there is something new and the last one is some seconds old (or ``at_once``)."""
        now = time.monotonic()
        state = self.counts.copy(), self.in_flight
        news = self._observed or state != self._written
        if self._path is None or not news or (now - self._time < _SECONDS and not at_once):
            return
        self._settle()
        state_now = {"step": step, "in_flight": self.in_flight}
        self.add_line({**state_now, "counts": dict(self.counts), "means": self._means})
        self._time, self._written = now, state

    def add_line(self, values: dict[str, Any]) -> None:
        if self._path is not None:
            append_line(self._path, {"time": time.time(), "env": self.name, **values})

    def _settle(self) -> None:
        self._means |= {name: sum(values) / len(values) for name, values in self._observed.items()}
        self._observed.clear()
