"""The watchdog in the launcher: it reads the run's files and asks its services, prints alarms and records them.

Guarantees:

- asking a service never delays the launcher: it happens in a task of its own, one at a time;
- an alarm is printed when it is raised and when it is cleared, appended to ``alarms.jsonl`` before, and counted in
  ``summary.json`` over all starts of the run;
- an alarm in ``watchdog.stop_on`` ends the run, with that alarm as the error;
- alarms that an earlier start left raised are cleared: what still shows is found again;
- while the machine is suspended, nothing counts as silent;
- while the Trajectory API waits for room on its disk, the console says so, and for how long at most.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipe.atropos.config.compose import leaves
from recipe.atropos.errors import AtroposError
from recipe.atropos.launcher.services import Run
from recipe.atropos.launcher.sglang import InferenceServices
from recipe.atropos.run.folder import ELSEWHERE
from recipe.atropos.run.record import left_open, update_summary
from recipe.atropos.sources.numbered import DataSourceConfig
from recipe.atropos.terminal.progress import say
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.utils.files import LineReader, append_line, read_lines
from recipe.atropos.watchdog.alarms import ALARMS, Watchdog, account
from recipe.atropos.watchdog.history import AlarmLimits, History

_ASK_SECONDS = 5.0  # between two requests to the services
_SUSPENDED_SECONDS = 5.0  # by which the time of day runs ahead, and clocks that are set now and then do not


class AlarmWatch:
    """See the module; made in a running event loop. Call ``poll`` often, and ``aclose`` at the end."""

    def __init__(self, run: Run, version: int, api_url: str, inference: InferenceServices):
        specs = self._specs = run.plan.specs
        self._run, self._api_url, self._inference = run, api_url, inference
        limits = AlarmLimits.from_config(dict(leaves(OmegaConf.to_container(run.config))))
        history = History(limits, begin=version, joined=not specs)
        self.watchdog = Watchdog(history)
        self._readers: dict[Path, LineReader] = {}
        for name, spec in specs.items():
            logs = spec.service if spec.replicas == 1 else f"{spec.service}*"
            history.environment(name).log = str(run.files.log(logs))
        self._lines = read_lines(run.files.alarms)
        for line in left_open(self._lines):
            self._record({**line, "state": "cleared", "time": time.time(), "step": version})
        self._account()
        self._trouble = ""
        self._ahead = time.time() - time.monotonic()
        self._asking = asyncio.create_task(self._keep_asking())

    async def poll(self, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        """Take in the new ``lines`` of ``metrics.jsonl`` and what else is new; print and record what changed.

        Raises:
            AtroposError: an alarm of ``watchdog.stop_on``; has what was seen, and what to try.
        """
        history, now = self.watchdog.history, self._now()
        for line in lines:
            history.add_step(line)
        reports = [
            *(
                self._run.files.environment_report(name, k)
                for name, spec in self._specs.items()
                for k in range(spec.replicas)
            ),
            *self._run.files.environments.glob(f"*.{ELSEWHERE}.jsonl"),
        ]
        for path in reports:
            name = path.name.partition(".")[0]
            for line in self._readers.setdefault(path, LineReader(path)).new_lines():
                if line["time"] >= self._run.started or "registered" in line:  # counts of an earlier start say nothing
                    history.add_report(name, line)
        if self._asking.done():
            self._asking.result()
        if bool(trouble := history.api.get("warnings", {}).get("store", "")) != bool(self._trouble):
            option, limit = DataSourceConfig.from_config(self._run.config).longest_wait
            until = f"; the run waits for it, at most {limit:g} s (trainer.atropos.{option})"
            say(trouble + until if trouble else "stores again", "api", "bold yellow")
        self._trouble = trouble
        for name, spec in self._specs.items():
            if lost := [service for service in spec.services if service in self._run.abandoned]:
                which = "it" if spec.replicas == 1 else f"of its {spec.replicas} replicas, {', '.join(lost)}"
                history.environment(name).goes_on = len(lost) < spec.replicas
                history.environment(name).abandoned = f"{which} was abandoned after {spec.max_restarts} restarts"
        changed = self.watchdog.changes(now)
        for change in changed:
            self._record(change)
            _print(change)
        if changed or (lines and self._lines):
            self._account()
        for change in changed:
            if change["state"] == "raised" and change["alarm"] in self._run.config.watchdog.stop_on:
                raise AtroposError(f"watchdog.stop_on: {described(change)}")

    def _now(self) -> float:
        """Return the time of day; if the machine was suspended since the last call, tell the history before."""
        now, before = time.time(), self._ahead
        self._ahead = now - time.monotonic()  # which stands still meanwhile
        if self._ahead - before > _SUSPENDED_SECONDS:
            self.watchdog.history.suspended(now)
        return now

    async def _keep_asking(self) -> None:
        history = self.watchdog.history
        while True:
            with contextlib.suppress(TrajectoryApiError):  # the launcher restarts an API that has ended
                history.add_api(await self._run.ask_api(self._api_url, TrajectoryApiClient.diagnose), self._now())
            status = await self._inference.status()
            if self._run.files.servers_offloaded.exists():
                history.servers_rest(self._now())
            else:
                history.add_gateway(status, self._now())
            await asyncio.sleep(_ASK_SECONDS)

    def _record(self, line: dict[str, Any]) -> None:
        append_line(self._run.files.alarms, line)
        self._lines.append(line)

    def _account(self) -> None:
        found = account(self._lines, self.watchdog.history.step)
        for (name, _), raised in self.watchdog.raised.items():
            found[name]["seen"] = raised.finding.seen
        update_summary(self._run.files.path, {"alarms": found})

    async def aclose(self) -> None:
        """End what is being asked."""
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)


def described(line: Mapping[str, Any]) -> str:
    """Return an alarm as a sentence: whose, since when, what was seen, and what to try."""
    return f"{_seen(line)}. It means: {ALARMS[line['alarm']].means}. To try: {line['advice']}"


def _seen(line: Mapping[str, Any]) -> str:
    since = f"since step {line['since_step']}" if line["since_step"] else "since the start"
    return f"{_name(line)}, {since}: {line['seen']}"


def _name(line: Mapping[str, Any]) -> str:
    return f"{line['alarm']} ({line['environment']})" if line["environment"] else line["alarm"]


def _print(line: Mapping[str, Any]) -> None:
    if line["state"] == "raised":
        say(_seen(line), "alarm", "bold yellow")
        say(f"meaning: {ALARMS[line['alarm']].means}", "")
        say(f"to try:  {line['advice']}", "")
    else:
        say(f"{_name(line)} is over, after {(line['time'] - line['since']) / 60:.1f} min", "alarm")
