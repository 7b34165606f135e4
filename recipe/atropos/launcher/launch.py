"""The lifecycle of a run: what is started, in which order, and how everything is stopped."""

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rich.text import Text

from recipe.atropos.checkpoint.model_card import EXPORTED, write_card
from recipe.atropos.checkpoint.store import Checkpoints, step_of
from recipe.atropos.errors import AtroposError
from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.environment_processes import EnvironmentProcesses
from recipe.atropos.launcher.evaluation import Evaluations
from recipe.atropos.launcher.joining import Joining
from recipe.atropos.launcher.services import WATCH_SECONDS, Run
from recipe.atropos.launcher.sglang import start_inference
from recipe.atropos.launcher.startup import (
    first_version,
    servers_healthy,
    sessions_healthy,
    start_api,
    start_sessions,
    start_trainer,
)
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import WaitingMark, account_of_groups, add_start, update_summary
from recipe.atropos.sources.numbered import DataSourceConfig
from recipe.atropos.terminal.dashboard import shell_command, shown_path
from recipe.atropos.terminal.progress import LiveView, progress, say
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.utils.files import DiskFull, FolderRemoved, LineReader, disk_is_full, read_json
from recipe.atropos.watchdog.history import PREFIX

_END_SECONDS = 6 * 3600.0  # after the last step, beyond those of a step: for its checkpoint and the export


async def launch(run: Run) -> None:
    """Run all services until the last step.

    Raises:
        ConfigurationError, ServiceFailed, DiskFull: the first failure, raised once nothing is left running; failures
            during shutdown are added as notes.
    """
    # SIGTERM stops the services as Ctrl-C does, even if a shell started the launcher with SIGINT ignored.
    # So does SIGHUP, when the terminal closes, unless it is ignored (nohup).
    for number in _ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, asyncio.current_task().cancel)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, run.preempt)
    started = time.monotonic()
    environments = evaluations = failure = None
    try:
        api = start_api(run)
        inference = await start_inference(run)
        start_sessions(run, inference, api)
        evaluations = Evaluations(run, inference)
        served = run.config.actor_rollout_ref.model.path
        say(f"starting {served} at {', '.join(inference.urls)}, behind {inference.gateway}", "sglang")
        # The trainer waits for the servers before it pushes. Colocated servers must measure the free GPU memory first.
        beside = not any(launch.releases_memory for launch in inference.servers.values())
        trainer = start_trainer(run, api, inference) if beside else None
        also = ", and beside them the trainer" if beside else ""
        with progress(f"the SGLang servers start{also}", run.files.log(next(iter(inference.servers)))):
            await servers_healthy(run, api, inference)
        trainer = trainer or start_trainer(run, api, inference)
        with progress("the trainer loads the model and pushes its weights", trainer.log_path):
            version = await first_version(run, inference)
            await sessions_healthy(run)
        environments = (EnvironmentProcesses if run.plan.specs else Joining)(run, api.url, inference.gateway)
        environments.start()  # beside the evaluation, which takes as long as their own start
        with progress(f"evaluating version {version}, and starting the environments"):
            await evaluations.begin(version, environments.poll)
        with contextlib.ExitStack() as first:
            if run.plan.specs:
                what = "the first step: the environments sample, the trainer compiles and trains"
                first.enter_context(progress(what, trainer.log_path))
            async with contextlib.aclosing(AlarmWatch(run, version, api.url, inference)) as alarm_watch:
                await watch(run, version, environments, evaluations, alarm_watch, on_step=first.close)
        environments.stop()
        await evaluations.evaluate_alone(run.config.trainer.total_training_steps)  # no environment runs
        report_model(run)
    except BaseException as error:
        failure = error
        # A service's log is on the same disk and may lack the error.
        if disk_is_full(run.files.path) and not isinstance(error, DiskFull):
            _note(error, f"no space left on device: {run.files.path}")
    later = await _end(run, environments, evaluations, started)
    if failure := failure or next(iter(later), None):
        again = type(failure) if isinstance(failure, DiskFull | FolderRemoved) else ()  # of each file that is written
        for error in later:
            if error is not failure and not isinstance(error, again):
                _note(failure, f"then, at the end: {error}")
        write_page_of_failure(run.files)
        raise failure
    update_summary(run.files.path, {"finished_steps": run.config.trainer.total_training_steps})
    write_pictures(run.files)


def _note(failure: BaseException, text: str) -> None:
    """Add to a failure's text what else went wrong, or print it at an interrupt, which shows none."""
    if isinstance(failure, Exception):
        failure.add_note(text)
    else:
        say(text, "error", "bold red")


async def watch(
    run: Run,
    version: int,
    environments: EnvironmentProcesses | Joining,
    evaluations: Evaluations,
    alarm_watch: AlarmWatch,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Supervise the run until the trainer exits successfully; call ``on_step`` for every trained step, and print a line
    if no live view shows it.

    Raises:
        ServiceFailed: a service that the run needs ended for good, the trainer ended before the last step, or it hangs:
            apart from announced waits, no step was trained for ``trainer.atropos.step_timeout`` seconds.
        AtroposError: an alarm of ``watchdog.stop_on``.
    """
    total, limit = run.config.trainer.total_training_steps, run.config.trainer.atropos.step_timeout
    _, wait = DataSourceConfig.from_config(run.config).longest_wait
    longest = limit + run.config.trainer.atropos.max_empty_batches * wait + run.config.evaluation.timeout
    last_step = trained = time.monotonic()
    seen, reader = version, LineReader(run.files.metrics)
    waiting = WaitingMark(run.files)
    while True:
        trainer = run.services["trainer"]
        ended = trainer.poll() == 0
        lines = list(reader.new_lines())
        for line in lines:
            last_step = trained = time.monotonic()
            if line["step"] > seen:
                seen = line["step"]
                on_step()
                if LiveView.shown is None:
                    say(_step(line), f"step {seen:>4}/{total}")
        await environments.poll(alarm_watch.watchdog.history.api)
        await alarm_watch.poll(lines)
        if waiting.is_fresh():  # a wait bounded by max_wait_time, join_timeout or evaluation.timeout
            last_step = time.monotonic()
        run.check()
        if run.services["trainer"] is not trainer:  # it was started again
            last_step = trained = time.monotonic()
            resumed = Checkpoints(run.complete.trainer.default_local_dir).to_resume(run.complete.trainer)
            await evaluations.begin_again(0 if resumed is None else step_of(resumed))
        await evaluations.poll()
        now, more = time.monotonic(), 0.0 if seen < total else _END_SECONDS
        if not ended and (now - last_step > limit + more or now - trained > longest + more):
            waited = f"{now - trained:.0f} s"
            if seen >= total:
                raise trainer.failure(f"its last checkpoint or its export hangs, {waited} after the last step")
            raise trainer.failure(f"no step after step {seen} for {waited}; trainer.atropos.step_timeout={limit:g} s")
        if ended:
            if seen < total:
                raise trainer.failure(f"ended after step {seen} of {total}")
            return
        await asyncio.sleep(WATCH_SECONDS)


def _step(line: dict[str, float]) -> Text:
    names = ", ".join(key.removeprefix(PREFIX) for key in line if key.startswith(PREFIX))
    return Text.assemble(
        f"score {scores_of(line)}  rows {line['atropos/rows']:.0f}  {line['timing_s/step']:.1f} s "
        f"(wait {line['phase_s/wait']:.1f} s)  version {line['atropos/policy_version']}",
        (f"  {names}" if names else "", "bold yellow"),
    )


def scores_of(line: dict[str, float]) -> str:
    """Return a step's mean score and, if it has several environments, the mean score of each."""
    named = [(key.split("/"), score) for key, score in line.items() if key.endswith("/mean_score")]
    each = [f"{parts[1]} {score:+.3f}" for parts, score in named if len(parts) == 3]
    return f"{line['atropos/mean_score']:+.3f}" + (f" ({', '.join(each)})" if len(each) > 1 else "")


def report_model(run: Run) -> None:
    """Print which model was exported, and add the last evaluation, which ran after the export, to its model card."""
    for folder in (run.files.model, run.files.adapter):
        exported = read_json(folder / EXPORTED, {})
        if exported.get("step") == run.config.trainer.total_training_steps:
            write_card(folder, run.files)
            say(f"{os.path.relpath(folder)}: step {exported['step']}, {exported['dtype']}", "model")
            return
    saves = run.config.trainer.save_freq > 0
    why = f"see {run.files.log('trainer')}" if saves else "trainer.save_freq saves no checkpoint"
    say(f"none is exported: {why}", "model")


def write_pictures(files: RunDir) -> None:
    """Write both for a run that has trained every step.

    Raises:
        DiskFull: there is no space for ``reward.png``.
    """
    from recipe.atropos.launcher.plots import plot_reward  # imported here: matplotlib takes a second

    plot_reward(files.path)
    _write_page(files)


def write_page_of_failure(files: RunDir) -> None:
    """Write the page of a run that ends early, and print where it is; nothing if it was never watched."""
    if (files.metrics.exists() or files.alarms.exists()) and _write_page(files):
        say(f"{shown_path(files.report)}: the run up to its end", "report")


def _write_page(files: RunDir) -> bool:
    """Write the page without tokens, for which torch and verl would have to be imported; tell if it cannot be."""
    from recipe.atropos.report.page import write_report

    try:
        write_report(files.path, tokens=False, ended=True)
    except Exception as error:  # whatever it is: the run ends as it would without
        say(f"{error}; {shell_command('report', files.path)} writes it", "report", "bold yellow")
        return False
    return True


async def _end(
    run: Run, environments: EnvironmentProcesses | Joining | None, evaluations: Evaluations | None, started: float
) -> list[Exception]:
    """Stop everything despite failures, account for the groups and for the time since ``started`` (monotonic), and
    return the failures.
    """
    failures: list[Exception] = []
    steps: list[Callable[[], Any]] = []

    async def account() -> None:
        # No group is sent any more, and the trainer has recorded those that it trained on.
        update_summary(run.files.path, {"environments": environments.summary()}, remove=["groups"])
        try:
            received = (await run.ask_api(run.services["api"].url, TrajectoryApiClient.diagnose))["received"]
        except TrajectoryApiError as error:
            say(f"does not account for the groups: {error}", "api")
        else:
            groups = account_of_groups(read_json(run.files.summary, {}), received)
            update_summary(run.files.path, {"groups": groups})

    if evaluations is not None:
        steps.append(evaluations.stop)
    if environments is not None:
        steps += [environments.stop, partial(run.end, run.services["trainer"]), account]
    with _ignore_interrupts(), progress("stopping the services"):
        for step in (*steps, run.stop):
            try:
                if inspect.isawaitable(result := step()):
                    await result
            except Exception as error:
                failures.append(error)
    with contextlib.suppress(OSError, AtroposError):  # a run that has not failed fails as it is recorded as finished
        add_start(run.files.path, time.monotonic() - started)
    return failures


def _ignore_interrupts() -> contextlib.AbstractContextManager[None]:
    """Ignore interrupts while the block runs: another one would leave processes behind."""
    ending = _ending_signals()
    for number in ending:
        asyncio.get_running_loop().remove_signal_handler(number)
    return signals_handled(dict.fromkeys((signal.SIGINT, *ending), signal.SIG_IGN))


@contextlib.contextmanager
def signals_handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handle these signals so while the block runs."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending_signals() -> list[signal.Signals]:
    return [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
