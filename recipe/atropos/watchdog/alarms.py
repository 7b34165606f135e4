"""Alarms: problems that a run reveals while it goes on. All that are declared in ``rules/``.

The trainer adds ``atropos/alarms/NAME``, with the value that raised it, to the metrics of a step that shows one with
``in_step``. The launcher's watchdog (``watchdog.py``) raises and clears all alarms: it prints both, appends them to
``alarms.jsonl``, and records them in ``summary.json``. ``docs/alarms.md`` has the table, which ``table`` makes.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import recipe.atropos.watchdog.rules as rules
from recipe.atropos.watchdog.registry import ALARMS, Alarm, seen_in_step

for _module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
    importlib.import_module(_module.name)

UNKNOWN = Alarm("")  # of another version


def causes_first() -> list[str]:
    """Return the names of all alarms, causes before their symptoms."""
    return sorted(ALARMS, key=lambda name: ALARMS[name].cause)


if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[tuple(causes_first())]


def raised_by(metrics: Mapping[str, float], tolerance: float, mode: str) -> dict[str, float]:
    """Return the alarms of a step as {name: value}; ``mode`` is ``trainer.atropos.sampling_mismatch``."""
    shown = {name: alarm.in_step for name, alarm in ALARMS.items() if alarm.in_step is not None}
    return {
        name: metrics[each.metric]
        for name, each in shown.items()
        if not metrics.get(each.metric, 0) <= each.limit(tolerance, mode)
    }


def describe(name: str, value: float, tolerance: float) -> str:
    """Return a line of text for an alarm of a step: what it means, what was seen, and what to try."""
    return f"{ALARMS[name].means} ({seen_in_step(name, value, tolerance)}); {ALARMS[name].advice}"


def table() -> str:
    """Return the table of ``docs/alarms.md``."""
    rows = [f"| `{name}` | {ALARMS[name].means} | {ALARMS[name].advice} |\n" for name in causes_first()]
    return "| alarm | meaning | what to try |\n|---|---|---|\n" + "".join(rows)
