"""The lifecycle of a run: what is started, in which order, and how everything is stopped."""

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rich.markup import escape

from recipe.atropos.checkpoint.model_card import EXPORTED, write_card
from recipe.atropos.errors import AtroposError
from recipe.atropos.launcher.alarm_watch import AlarmWatch
from recipe.atropos.launcher.environment_processes import Environments
from recipe.atropos.launcher.evaluation import Evaluations
from recipe.atropos.launcher.joining import Joining
from recipe.atropos.launcher.report_page import write_page_of_failure, write_pictures
from recipe.atropos.launcher.services import Run
from recipe.atropos.launcher.sglang import start_inference
from recipe.atropos.launcher.startup import first_version, servers_healthy, start_api, start_trainer
from recipe.atropos.launcher.supervision import watch
from recipe.atropos.run.record import account_of_groups, add_start, update_summary
from recipe.atropos.terminal.progress import console, progress
from recipe.atropos.trajectory_api.client import TrajectoryApiError
from recipe.atropos.utils.files import DiskFull, disk_is_full, read_json


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
    started = time.monotonic()
    environments = evaluations = failure = None
    try:
        api = start_api(run)
        inference = start_inference(run)
        evaluations = Evaluations(run, inference)
        console.print(
            f"[bold]sglang[/]  starting {run.config.actor_rollout_ref.model.path} at {', '.join(inference.urls)}, "
            f"behind {inference.gateway}",
            soft_wrap=True,
        )
        # The trainer waits for the servers as it starts. Colocated servers must measure the free GPU memory first.
        beside = not any(launch.releases_memory for launch in inference.servers.values())
        trainer = start_trainer(run, api, inference, evaluations.marker) if beside else None
        what = "the SGLang servers start" + (", and beside them the trainer" if beside else "")
        with progress(what, run.log(next(iter(inference.servers)))):
            await servers_healthy(run, api, inference)
        trainer = trainer or start_trainer(run, api, inference, evaluations.marker)
        with progress("the trainer loads the model and pushes its weights", trainer.log_path):
            version = await first_version(run, inference)
        if run.plan.specs:
            environments = Environments(run, api.url, inference.gateway)
        else:
            environments = Joining(run, api.url, inference.gateway)
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
        await evaluations.end()
        report_model(run)
    except BaseException as error:
        failure = error
        # A service's log is on the same disk and may lack the error.
        if disk_is_full(run.files.path) and not isinstance(error, DiskFull):
            error.add_note(f"no space left on device: {run.files.path}")
    later = await _end(run, environments, evaluations, started)
    if failure := failure or next(iter(later), None):
        for error in later:
            if error is not failure:
                failure.add_note(f"then, at the end: {error}")
        if isinstance(failure, Exception):  # no interrupt
            write_page_of_failure(run.files)
        raise failure
    total = run.config.trainer.total_training_steps
    update_summary(run.files.path, {"finished_steps": total})
    write_pictures(run.files)


def report_model(run: Run) -> None:
    """Print which model was exported, and add the last evaluation, which ran after the export, to its model card."""
    for folder in (run.files.model, run.files.adapter):
        exported = read_json(folder / EXPORTED, {})
        if exported.get("step") == run.config.trainer.total_training_steps:
            write_card(folder, run.files)
            what = f"{os.path.relpath(folder)}: step {exported['step']}, {exported['dtype']}"
            console.print(f"[bold]model[/]   {escape(what)}", soft_wrap=True)
            return
    why = f"see {run.log('trainer')}" if run.config.trainer.save_freq > 0 else "trainer.save_freq saves no checkpoint"
    console.print(f"[bold]model[/]   none is exported: {escape(why)}", soft_wrap=True)


async def _end(
    run: Run, environments: Environments | Joining | None, evaluations: Evaluations | None, started: float
) -> list[Exception]:
    """Stop everything despite failures, account for the groups and for the time since ``started`` (monotonic), and
    return the failures.
    """
    failures: list[Exception] = []

    async def attempt(step: Callable[[], Any]) -> None:
        try:
            if inspect.isawaitable(result := step()):
                await result
        except Exception as error:
            failures.append(error)

    async def account() -> None:
        # No group is sent any more, and the trainer has recorded those that it trained on.
        update_summary(run.files.path, {"environments": environments.summary()}, remove=["groups"])
        try:
            async with run.api_client(run.services["api"].url) as api:
                received = (await api.diagnose())["received"]
        except TrajectoryApiError as error:
            console.print(f"[bold]api[/]     does not account for the groups: {escape(str(error))}", soft_wrap=True)
        else:
            summary = read_json(run.files.summary, {})
            update_summary(run.files.path, {"groups": account_of_groups(summary, received)})

    with _ignore_interrupts(), progress("stopping the services"):
        if evaluations is not None:
            await attempt(evaluations.stop)
        if environments is not None:
            await attempt(environments.stop)
            if trainer := run.services.get("trainer"):
                await attempt(partial(run.end, trainer))
            await attempt(account)
        await attempt(run.stop)
    with contextlib.suppress(OSError, AtroposError):  # a run that has not failed fails as it is recorded as finished
        add_start(run.files.path, time.monotonic() - started)
    return failures


@contextlib.contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore interrupts while the block runs: another one would leave processes behind."""
    ending = _ending_signals()
    for number in ending:
        asyncio.get_running_loop().remove_signal_handler(number)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ending)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending_signals() -> list[signal.Signals]:
    return [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
