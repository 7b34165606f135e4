"""Counts and means of what became of an environment's groups and samples: its ``self.report``.

- Whatever is not sent, or is sent other than as the environment made it, is counted by name, never only logged.
- If items end for a minute but no group is sent, the event ``nothing_sent`` is counted, and logged with the reasons so
  far; again every minute. ``pause``, which is then taken before each new item, is a second, doubles with each further
  such minute, up to 30, and ends with the first group: the event ``slowed_down``.
- ``items`` counts those that ended, with the outcomes ``groups_sent`` (or ``groups_written``), ``not_sent/REASON`` and
  ``failed/EXCEPTION``; ``in_flight`` counts those that have started and not ended when the line is written (for the
  last line: at the end); ``score`` is the mean over everything scored, sent or not, before any shaping.
- Counts are totals since the process started. A mean is over what was observed since the previous line or wandb log.
- Both go to wandb with the environment's own metrics, as ``env/NAME``, and to the file of ``--adapter.report``, one
  JSON object per line: ``{"time", "env", "step", "in_flight", "counts": {NAME: int}, "means": {NAME: float}}``, and
  ``replica``, if that is not 0.
"""

import logging
import time
from collections import Counter, defaultdict
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.atropos.utils.files import append_line

logger = logging.getLogger(__name__)

_SECONDS = 5.0  # between two lines, if there is something new
_SILENCE = 60.0  # s in which items end but nothing is sent, until it is logged
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # s before each item of an environment that sends nothing
_REASONS = ("not_sent/", "failed/", "retried/", "sessions/failed/")


@dataclass
class Place:
    """An item's place in the API's order, by its ticket: taken by a post, or released for ``reason``, the last one,
    of which ``detail`` says more."""

    env_id: int
    ticket: int
    taken: bool = False
    reason: str = ""
    detail: str = ""


PLACE: ContextVar[Place | None] = ContextVar("place", default=None)  # of the current worker's item


class EnvReport:
    """Counts and means of one environment; lines are appended to the file ``path``, if one is given."""

    def __init__(self, name: str, path: str | Path | None = None, replica: int | str = 0):
        self.name = name
        self._who = {"env": name, "replica": replica} if replica else {"env": name}
        self.counts: Counter[str] = Counter()
        self.in_flight = 0
        self.pause = 0.0  # s
        self._path = Path(path) if path else None
        self._observed: dict[str, list[float]] = defaultdict(list)
        self._means: dict[str, float] = {}  # the latest of each
        self._written: tuple[Counter[str], int] = Counter(), 0
        self._time = float("-inf")
        self._last = (0, 0)  # items ended and groups sent, when something was last sent or the silence logged
        self._silent_since: float | None = None  # when the first item ended since then
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] += n

    def __str__(self) -> str:
        """Return why groups are missing: the counts of refusals, failures and retries."""
        found = [f"{name} {n}" for name, n in self.counts.most_common() if name.startswith(_REASONS)]
        return ", ".join(found) or "no reason known"

    def observe(self, name: str, *values: float) -> None:
        self._observed[name] += map(float, values)

    def fail(self, error: BaseException) -> None:
        """Count a failed item as ``failed/EXCEPTION``."""
        self._count_as(f"failed/{type(error).__name__}", repr(error))

    def refuse(self, reason: str, detail: str) -> None:
        """Count a group that is not sent as ``not_sent/REASON``; warn about the first one of each reason."""
        first = not self.counts[f"not_sent/{reason}"]
        self._count_as(f"not_sent/{reason}", f"{reason}: {detail}")
        logger.log(logging.WARNING if first else logging.DEBUG, "%s: group not sent, %s: %s", self.name, reason, detail)

    def _count_as(self, name: str, detail: str) -> None:
        self.count(name)
        if (place := PLACE.get()) is not None:
            place.reason, place.detail = name.removeprefix("not_sent/"), detail

    def poll(self, step: int) -> None:
        """Write a line if one is due, and log when nothing is sent; to be called about once per second."""
        counts, now = self.counts, time.monotonic()
        ended, sent = counts["items"], counts["groups_sent"] + counts["groups_written"]
        if sent != self._last[1]:
            self._last, self._silent_since, self.pause = (ended, sent), None, 0.0
        elif ended != self._last[0] and self._silent_since is None:
            self._silent_since = now
        elif self._silent_since is not None and now - self._silent_since >= _SILENCE:
            what = "%s: nothing sent for %.0f s, in which %d items ended; since the start: %s"
            items, seconds = ended - self._last[0], now - self._silent_since
            logger.error(what, self.name, seconds, items, self)
            self.count("nothing_sent")
            if not self.pause:
                logger.warning("%s: slowed down until a group is sent", self.name)
                self.count("slowed_down")
            self.pause = min(_LONGEST_PAUSE, 2 * self.pause or _FIRST_PAUSE)
            self._last, self._silent_since = (ended, sent), None
        self.write(step)

    def metrics(self) -> dict[str, float]:
        """Return all counts and the latest means, as ``env/NAME``."""
        self._settle()
        return {f"env/{name}": float(value) for name, value in {**self.counts, **self._means}.items()}

    def write(self, step: int, at_once: bool = False) -> None:
        """Write a line if there is something new and the last one is some seconds old (or ``at_once``)."""
        now = time.monotonic()
        state = self.counts.copy(), self.in_flight
        news = self._observed or state != self._written
        if self._path is None or not news or (now - self._time < _SECONDS and not at_once):
            return
        self._settle()
        self.add_line({"step": step, "in_flight": self.in_flight, "counts": dict(self.counts), "means": self._means})
        self._time, self._written = now, state

    def add_line(self, values: dict[str, Any]) -> None:
        if self._path is not None:
            append_line(self._path, {"time": time.time(), **self._who, **values})

    def _settle(self) -> None:
        self._means |= {name: sum(values) / len(values) for name, values in self._observed.items()}
        self._observed.clear()
