"""The demonstration as the launcher's watchdog saw it, with a fault put in: recorded runs of the seeds 0, 1 and 2.

``demos.json`` has the metrics that rules read and the environment's reports; the Trajectory API and the gateway, which
leave no record, are healthy ones that fit them. Times are seconds from the first step on.
"""

import copy
import json
from pathlib import Path
from typing import Any

from recipe.atropos.watchdog.alarms import Watchdog
from recipe.atropos.watchdog.history import AlarmLimits, History

PATH = Path(__file__).with_name("demos.json")
ENV = "gsm8k"
LIMITS = AlarmLimits(max_staleness=2, silent_after=60.0, first_answer=120.0)
LOOK_SECONDS = 5.0


class Demo:
    """``steps`` and ``reports`` are lines of the run's files, ``api`` and ``gateway`` what its services answer; all of
    them can be changed. ``end``: when the launcher stops looking.
    """

    def __init__(self, seed: int):
        record = json.loads(PATH.read_text())[seed]
        columns, times = record["steps"], record["time"]
        values = {key: value if isinstance(value, list) else [value] * len(times) for key, value in columns.items()}
        lines = [{key: value[i] for key, value in values.items()} for i in range(len(times))]
        self.steps = [
            {"time": time, **{key: value for key, value in line.items() if value is not None}}
            for time, line in zip(times, lines, strict=True)
        ]
        self.reports: list[dict[str, Any]] = record["reports"]
        self.end = times[-1] + 5.0

    def step_at(self, now: float) -> int:
        return max((line["step"] for line in self.steps if line["time"] <= now), default=0)

    def api(self, now: float) -> dict[str, Any]:
        seen = [line["time"] for line in self.reports if line["time"] <= now]
        environment = {"env_id": 0, "name": f"{ENV}_0", "alive": True, "seen_seconds_ago": 0.5}
        queue = {"groups": 32, "tokens": 5000, "tokens_limit": 64_000_000}
        return {"queue": queue, "environments": [environment] if seen else []}

    def gateway(self, now: float) -> dict[str, Any] | None:
        step = self.step_at(now)
        return {"version": step, "held": 0, "servers": [sglang(requests=20 * int(now + 60), inflight=8)]}

    def lengthen(self, steps: int) -> None:
        """Let it go on: its second half again and again."""
        half, reports = self.steps[30:], [line for line in self.reports if line["time"] > self.steps[30]["time"]]
        span = half[-1]["time"] - half[0]["time"] + 3.0
        sums = {key: n - reports[0]["counts"].get(key, 0) for key, n in reports[-1]["counts"].items()}
        for times in range(1, 1 + steps // len(half)):
            for line in half:
                step = self.steps[-1]["step"] + 1
                self.steps.append({**line, "step": step, "time": line["time"] + times * span})
                self.steps[-1]["atropos/policy_version"] = step
            for line in reports:
                counts = {key: n + times * sums[key] for key, n in line["counts"].items()}
                self.reports.append({**line, "time": line["time"] + times * span, "counts": counts})
        self.end += span * (steps // len(half))

    def cut(self, time: float, more: float) -> None:
        """No step and no report after ``time``; the launcher looks for ``more`` seconds."""
        self.steps = [line for line in self.steps if line["time"] <= time]
        self.reports = [line for line in self.reports if line["time"] <= time]
        self.end = time + more

    def report(self, time: float, in_flight: int = 16, **counts: int) -> None:
        """Add a report in which ``counts``, with / for __, are added to those of the last one."""
        last = copy.deepcopy(self.reports[-1])
        for name, n in counts.items():
            name = name.replace("__", "/")
            last["counts"][name] = last["counts"].get(name, 0) + n
        self.reports.append({**last, "time": time, "in_flight": in_flight})


def sglang(state: str = "admitted", requests: int = 0, inflight: int = 0, error: str | None = None, number: int = 0):
    url = f"http://127.0.0.1:{30000 + number}"
    return {
        **{"url": url, "state": state, "inflight": inflight},
        **{"requests": requests, "failures": 0, "last_error": error},
    }


def play(demo: Demo, limits: AlarmLimits = LIMITS, joined: bool = False) -> list[dict[str, Any]]:
    """Return the lines of ``alarms.jsonl`` that the watchdog writes of a run."""
    watchdog = Watchdog(History(limits, joined=joined))
    events = [(line["time"], 0, line) for line in demo.steps]
    events += [(line["time"], 1, line) for line in demo.reports] if not joined else []
    looks = int((demo.end + 20.0) / LOOK_SECONDS)
    events += [(-20.0 + LOOK_SECONDS * look, 2, {}) for look in range(looks + 1)]
    changes = []
    for now, kind, line in sorted(events, key=lambda event: event[:2]):
        if kind == 0:
            watchdog.history.add_step(line)
        elif kind == 1:
            watchdog.history.add_report(ENV, line)
        else:
            watchdog.history.add_api(demo.api(now), now)
            watchdog.history.add_gateway(demo.gateway(now), now)
        changes += watchdog.changes(now)
    return changes
