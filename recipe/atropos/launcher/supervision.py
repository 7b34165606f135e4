"""Supervision of a training run: print each step, look for alarms, and detect a hang."""

import asyncio
import time
from collections.abc import Callable

from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.environment_processes import Environments
from recipe.atropos.launcher.evaluation import Evaluations
from recipe.atropos.launcher.joining import Joining
from recipe.atropos.launcher.services import Run
from recipe.atropos.run.record import WaitingMark
from recipe.atropos.sources.numbered import DataSourceConfig
from recipe.atropos.terminal.progress import console, view_is_live
from recipe.atropos.utils.files import LineReader
from recipe.atropos.watchdog import alarms

WATCH_SECONDS = 0.5


async def watch(
    run: Run,
    version: int,
    environments: Environments | Joining,
    evaluations: Evaluations,
    alarm_watch: AlarmWatch,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Supervise the run until the trainer exits successfully; call ``on_step`` for every trained step, and print a line
    if no live view shows it.

    Raises:
        ServiceFailed: a service that the run needs ended for good, the trainer ended before the last step, or it hangs:
            apart from announced waits, no step was trained for ``trainer.atropos.step_timeout`` seconds.
        AlarmRaised: an alarm of ``watchdog.stop_on``.
    """
    total, limit = run.config.trainer.total_training_steps, run.config.trainer.atropos.step_timeout
    _, wait = DataSourceConfig.from_config(run.config).longest_wait
    longest = limit + wait + run.config.evaluation.timeout
    last_step = trained = time.monotonic()
    seen, reader = version, LineReader(run.files.metrics)
    waiting = WaitingMark(run.files)
    while True:
        trainer = run.services["trainer"]
        ended = trainer.poll() == 0
        lines = reader.new_lines()
        for line in lines:
            last_step = trained = time.monotonic()
            if line["step"] > seen:
                seen = line["step"]
                on_step()
                if not view_is_live():
                    console.print(f"[bold]step {seen:>4}/{total}[/] {_step(line)}", soft_wrap=True)
        await environments.poll()
        await alarm_watch.poll(lines)
        if waiting.is_fresh():  # a wait bounded by max_wait_time, join_timeout or evaluation.timeout
            last_step = time.monotonic()
        run.check()
        if run.services["trainer"] is not trainer:  # it was started again
            last_step = trained = time.monotonic()
            await evaluations.trainer_restarted()
        await evaluations.poll()
        now = time.monotonic()
        if not ended and (now - last_step > limit or now - trained > longest):
            waited = f"{now - trained:.0f} s; trainer.atropos.step_timeout={limit:g} s"
            raise trainer.failure(f"no step after step {seen} for {waited}")
        if ended:
            if seen < total:
                raise trainer.failure(f"ended after step {seen} of {total}")
            return
        await asyncio.sleep(WATCH_SECONDS)


def _step(line: dict[str, float]) -> str:
    return (
        f"score {scores_of(line)}  rows {line['atropos/rows']:.0f}  {line['timing_s/step']:.1f} s "
        f"(wait {line['phase_s/wait']:.1f} s)  version {line['atropos/policy_version']}{_alarms(line)}"
    )


def scores_of(line: dict[str, float]) -> str:
    """Return a step's mean score and, if it has several environments, the mean score of each."""
    named = [(key.split("/"), score) for key, score in line.items() if key.endswith("/mean_score")]
    each = [f"{parts[1]} {score:+.3f}" for parts, score in named if len(parts) == 3]
    return f"{line['atropos/mean_score']:+.3f}" + (f" ({', '.join(each)})" if len(each) > 1 else "")


def _alarms(line: dict[str, float]) -> str:
    names = ", ".join(alarms.of_line(line))
    return f"  [bold yellow]{names}[/]" if names else ""
