"""Start the Trajectory API, the session server and the trainer as processes, and wait for the services to be ready."""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.checkpoint.store import Checkpoints
from recipe.atropos.config.derived import request_limits
from recipe.atropos.config.env_specs import options
from recipe.atropos.data.sampling import TEMPERATURE_VARIABLE
from recipe.atropos.errors import RECOVERABLE
from recipe.atropos.launcher.services import RestartPolicy, Run
from recipe.atropos.launcher.sglang import InferenceServices, given_ports, inference_healthy, serves
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import update_summary
from recipe.atropos.terminal.progress import say
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.utils.files import write_atomic
from recipe.atropos.utils.hosts import reachable
from recipe.atropos.utils.process import (
    Service,
    default_port,
    free_port,
    wait_until_healthy,
)
from recipe.atropos.utils.secret import API_KEY_VARIABLE, config_yaml, hidden_settings, secret_variables
from recipe.atropos.utils.sockets import reserve

_SESSIONS_SECONDS = 120.0  # for the session server to load its tokenizer
_FORGOTTEN_SECONDS = 120.0  # for a gateway to answer once the trainer has ended: longer than its start takes
API_PORT = 8000  # used if free: the default address of Atropos environments


def start_api(run: Run) -> Service:
    """Start the Trajectory API on the run's store, without waiting for it to be healthy."""
    config = run.config.api
    set_aside_store(run.files, run.config.trainer)
    command, url = api_command(run)
    run.reserved["api"] = reserve(config.host, urlsplit(url).port, "api.port")
    start = partial(run.start, "api", command, url=url, **{API_KEY_VARIABLE: run.api_key})
    run.restart_policies["api"] = RestartPolicy(
        start,
        config.max_restarts,
        kind="api",
        key="api.max_restarts",
        recovers=lambda status: status < 0,  # until it was healthy, an error of its own would repeat
    )
    return start()


def api_command(run: Run) -> tuple[list[str], str]:
    """Return the Trajectory API's command and URL, on the port that is configured, 8000 or a free one."""
    config = run.config.api
    port = config.port or default_port(API_PORT, config.host, given_ports(run.config).values())
    flags = {"host": config.host, "port": port, "data-dir": run.files.trajectories, "retention": config.retention}
    command = [sys.executable, "-m", "recipe.atropos.trajectory_api", *options(flags)]
    return command, f"http://{reachable(config.host)}:{port}"


def start_sessions(run: Run, inference: InferenceServices, api: Service) -> None:
    """Start the session server, by which programs sample, without waiting for it, if something uses it."""
    config, command = run.config.inference, session_command(run, inference, api.url)
    if command is None:
        return
    run.reserved["sessions"] = reserve(config.host, urlsplit(run.sessions_url).port, "sessions.port")
    variables = {
        API_KEY_VARIABLE: run.environments_key,
        TEMPERATURE_VARIABLE: str(run.config.actor_rollout_ref.rollout.temperature),
    }
    start = partial(run.start, "sessions", command, url=run.sessions_url, **variables)
    run.restart_policies["sessions"] = RestartPolicy(
        start, config.max_restarts, kind="sessions", recovers=lambda status: status < 0
    )
    start()


def session_command(run: Run, inference: InferenceServices, api_url: str) -> list[str] | None:
    """Return the session server's command, None if nothing uses one; its address is ``run.sessions_url`` then."""
    sessions, model, host = run.config.sessions, run.config.actor_rollout_ref.model.path, run.config.inference.host
    used = any(spec.program for spec in run.plan.specs.values()) if sessions.enabled is None else sessions.enabled
    if not used:
        return None
    port = sessions.port or free_port(host)
    run.sessions_url = f"http://{reachable(host)}:{port}"
    credit = None if run.plan.specs else OmegaConf.to_container(run.config.environment).get("credit")  # else is theirs
    flags = {
        "host": host,
        "port": port,
        "gateway": inference.gateway,
        "api": api_url,
        "tokenizer": model,
        "model": model,
        "data": run.files.sessions,
        "run-dir": run.files.path,
        "renderer": sessions.renderer,
        "tool-parser": sessions.tool_parser,
        "thinking": sessions.thinking,
        "credit": credit and json.dumps(credit),
        "timeout": request_limits(run.config).get("timeout"),
    }
    return [sys.executable, "-m", "recipe.atropos.sessions.server", *options(flags)]


def set_aside_store(files: RunDir, trainer: DictConfig) -> None:
    """Rename what a run that ``trainer`` does not continue has stored: its batches, the groups of its sessions and the
    environments' reports are not those of the new weights.
    """
    if Checkpoints(trainer.default_local_dir).continues(trainer):
        return
    if files.summary.exists():
        update_summary(files.path, {}, remove=["environments_joined", "seconds_in_all"])  # which count from 0 again
    now = f"{time.time():.0f}"
    for store, logs in (files.trajectories, [""]), (files.environments, [""]), (files.sessions, ["", "-wal", "-shm"]):
        for log in logs:
            if (path := store.with_name(store.name + log)).exists():
                path.rename(store.with_name(f"{store.name}.{now}{log}"))


def _saved(run: Run) -> set[tuple[Path, int]]:
    """Return the whole checkpoints, and when they were changed: on a shared disk, by another machine's clock."""
    return {(folder, folder.stat().st_mtime_ns) for folder in Checkpoints(run.config.trainer.default_local_dir).whole()}


def _start_trainer(run: Run, before: set[tuple[Path, int]]) -> Service:
    """Start the trainer from the newest checkpoint of this start; if it has saved none, as it is configured.

    ``before``: those that were ``_saved`` when this start began.

    Raises:
        Preempted: the run has ended meanwhile.
    """
    run.check_preempted()
    if _saved(run) - before:
        run.complete.trainer.resume_mode, run.complete.trainer.resume_from_path = "auto", None
    write_atomic(run.files.config, config_yaml(run.complete))
    run.files.waiting.unlink(missing_ok=True)  # left by a killed trainer; the next one begins only seconds later
    variables = {
        **secret_variables([json.dumps(each) for each in hidden_settings(OmegaConf.to_container(run.complete))]),
        API_KEY_VARIABLE: run.api_key,
    }
    return run.start("trainer", trainer_command(run), **variables)


def trainer_command(run: Run) -> list[str]:
    return [sys.executable, "-m", "recipe.atropos.train_run", str(run.files.path)]


def _may_restart_trainer(run: Run, status: int) -> bool:
    """Whether the trainer was killed or lost a rank, and no server has taken the memory of its GPUs."""
    shared = run.config.inference.colocated or run.files.servers_offloaded.exists()
    return (status < 0 or status == RECOVERABLE) and not shared


async def servers_healthy(run: Run, api: Service, inference: InferenceServices) -> None:
    async def answers() -> bool:
        run.check()
        try:
            return bool(await run.ask_api(api.url, TrajectoryApiClient.status))
        except TrajectoryApiError:
            return False

    await wait_until_healthy(
        lambda: run.services["api"], answers, run.config.api.start_timeout, key="api.start_timeout"
    )
    run.restart_policies["api"].recovers = lambda status: True
    seconds = await inference_healthy(run, inference)
    many = f"{len(inference.urls)} servers " if len(inference.urls) > 1 else ""
    say(f"{many}up after {seconds:.0f} s; api at {api.url}", "sglang")


async def sessions_healthy(run: Run) -> None:
    """Wait until the session server answers, if the run has one. Raises ServiceFailed if it does not."""
    if run.sessions_url is not None:
        await wait_until_healthy(
            lambda: run.services["sessions"], partial(serves, run, run.sessions_url), _SESSIONS_SECONDS
        )


def start_trainer(run: Run, api: Service, inference: InferenceServices) -> Service:
    """Start the trainer, which loads the run's ``config.yaml``; that file is completed here."""
    addresses = {
        "inference.urls": list(inference.urls),
        "inference.gateway": inference.gateway,
        "inference.api_key": run.api_key,
        "trainer.atropos.api_url": api.url,
        "trainer.atropos.startup_timeout": float(run.config.inference.start_timeout),
        "evaluation.evaluated_file": str(run.files.evaluated),
    }
    run.complete, before = run.plan.complete(addresses), _saved(run)
    run.restart_policies["trainer"] = RestartPolicy(
        partial(_start_trainer, run, before),
        run.config.trainer.atropos.max_restarts,
        kind="trainer",
        key="trainer.atropos.max_restarts",
        recovers=partial(_may_restart_trainer, run),
    )
    return _start_trainer(run, before)


async def first_version(run: Run, inference: InferenceServices) -> int:
    """Wait for the trainer's first push and return its version; no environment may start before it."""
    version: Any = None
    ended: float | None = None

    async def pushed() -> bool:
        nonlocal version, ended
        run.check()
        version = await inference.version()
        if version is None and (trainer := run.services["trainer"]).poll() == 0:  # it pushed, and will not again
            ended = ended or time.monotonic()
            if time.monotonic() - ended > _FORGOTTEN_SECONDS:
                raise trainer.failure(
                    "has ended, and the gateway, started again, does not know which weights it pushed"
                )
        return version is not None

    timeout = run.config.trainer.ray_wait_register_center_timeout + run.config.trainer.atropos.weight_sync.timeout
    seconds = await wait_until_healthy(
        lambda: run.services["trainer"],
        pushed,
        timeout,
        what="done with its first push of weights",
        key="trainer.ray_wait_register_center_timeout + trainer.atropos.weight_sync.timeout",
    )
    say(f"pushed version {version} after {seconds:.0f} s", "trainer")
    return version
