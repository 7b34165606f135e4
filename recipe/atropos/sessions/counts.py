"""What is counted of sessions, in the report of their environment.

An environment counts those that it runs; those of programs that nobody here starts are counted by the session server.
"""

import re
from collections.abc import Mapping
from typing import Any

from recipe.atropos.run.folder import ELSEWHERE, RunDir
from recipe.atropos.run.reporting import EnvReport

_REPEATS = 2  # of calls at least, and in half of the turns: a session that makes the same call again and again
_NAME_BYTES = 100  # of an environment's name in that of its report's file
_CAUSE = re.compile(r"\w[\w .-]{0,39}")  # a few words: a program may say anything, and a report names each cause


def count_session(report: EnvReport, state: Mapping[str, Any]) -> bool:
    """Count a session that ended, and what happened in it, by its ``state`` as the server answers it; return whether
    it is to be trained on: it has a reward and a turn.
    """
    report.observe("turns", state["turns"])
    kept = state["reward"] is not None and state["turns"] > 0
    cause = state["end"] if state["reward"] is None else "no_turn"
    happened = {name: state[name] for name in ("turns", "sampled", "tool_calls", "retries")} | {
        "ended": 1,
        "with_tools": state["tools"],
        "with_calls": state["tools"] and state["tool_calls"] > 0,
        "with_repeats": state["repeats"] >= max(_REPEATS, state["turns"] / 2),
        f"failed/{cause if _CAUSE.fullmatch(cause) else 'other'}": not kept,
        **{f"forks/{cause}": n for cause, n in state["forks"].items()},
    }
    report.counts.update({f"sessions/{name}": int(n) for name, n in happened.items() if n})
    for name in filter(_CAUSE.fullmatch, state["metrics"]):
        report.observe(f"sessions/metrics/{name}", state["metrics"][name])
    return kept


class Reports:
    """Reports of the environments of such programs, in a run's folder, if one is given."""

    def __init__(self, files: RunDir | None = None):
        self._files, self._reports = files, dict[str, EnvReport]()

    def of(self, env: str) -> EnvReport:
        name = re.sub(r"[^\w-]", "_", env).encode()[:_NAME_BYTES].decode(errors="ignore") or "sessions"
        if name not in self._reports:
            path = self._files and self._files.environment_report(name, ELSEWHERE)
            self._reports[name] = EnvReport(name, path, ELSEWHERE)
            self._reports[name].add_line({"started": True})  # counts begin at 0
        return self._reports[name]

    def write(self, at_once: bool = False) -> None:
        for report in self._reports.values():
            report.write(0, at_once)
