"""The lines of ``alarms.jsonl``: one for each alarm that was raised or cleared, over all starts of a run."""

from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]


def by_alarm(lines: Iterable[Line]) -> dict[tuple[str, str | None], list[Line]]:
    """Return the lines of each alarm of each environment, in order; what changed last comes last."""
    found: dict[tuple[str, str | None], list[Line]] = {}
    for line in lines:
        key = line["alarm"], line.get("environment")
        found[key] = [*found.pop(key, ()), line]
    return found


def left_open(lines: Iterable[Line]) -> list[Line]:
    """Return the lines that raised an alarm which no line clears, the newest last."""
    newest = [each[-1] for each in by_alarm(lines).values()]
    return [line for line in newest if line.get("state") == "raised"]
