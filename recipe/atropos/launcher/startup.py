"""Start the Trajectory API and the trainer as processes, and wait for the services to be ready."""

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from recipe.atropos.checkpoint.store import Checkpoints
from recipe.atropos.config.compose import complete_config
from recipe.atropos.errors import RECOVERABLE, ConfigurationError
from recipe.atropos.launcher.services import Run, console
from recipe.atropos.launcher.sglang import Inference, given_ports, inference_healthy
from recipe.atropos.launcher.supervision import WATCH_SECONDS
from recipe.atropos.trajectory_api.trajectory_client import TrajectoryApiError
from recipe.atropos.utils.files import write_atomic
from recipe.atropos.utils.hosts import reachable
from recipe.atropos.utils.process import (
    Service,
    ServiceFailed,
    default_port,
    port_is_free,
    wait_until_healthy,
)
from recipe.atropos.utils.secret import API_KEY_VARIABLE, config_yaml, hidden_settings, secret_variables

API_PORT = 8000  # used if free: the default address of Atropos environments
_VERSION_SECONDS = 120.0


def start_api(run: Run) -> Service:
    """Start the Trajectory API on the run's store, without waiting for it to be healthy."""
    config, store = run.config.api, run.files.trajectories
    if run.config.trainer.resume_mode == "disable" and store.exists():
        store.rename(store.with_name(f"{store.name}.{time.time():.0f}"))  # of a run that this one does not continue
    check_port(config.port, config.host, "api.port")
    return _start_api(run, *api_command(run))


def api_command(run: Run) -> tuple[list[str], str]:
    """Return the Trajectory API's command and URL, on the port that is configured, 8000 or a free one."""
    config = run.config.api
    port = config.port or default_port(API_PORT, config.host, given_ports(run.config).values())
    command = [sys.executable, "-m", "recipe.atropos.trajectory_api", "--host", config.host, "--port", str(port)]
    command += ["--data-dir", str(run.files.trajectories), "--retention", config.retention]
    return command, f"http://{reachable(config.host)}:{port}"


def _start_api(run: Run, command: list[str], url: str) -> Service:
    return run.start("api", command, url=url, **{API_KEY_VARIABLE: run.api_key})


def restart_services(run: Run) -> None:
    """From now on, start again an API that ended, and a trainer that was killed or lost a rank.

    The API continues with its store, and the trainer from this start's newest checkpoint. No trainer is started on GPUs
    that servers share: they hold the memory that it would need.
    """
    api, trainer, config = run.service("api"), run.service("trainer"), run.config
    again = partial(_start_api, run, api.command, api.url)
    run.set_restart_policy(api, again, config.api.max_restarts, kind="api", key="api.max_restarts")
    if run.files.servers_offloaded.exists() or config.inference.colocated:
        return
    run.set_restart_policy(
        trainer,
        partial(_restart_trainer, run),
        config.trainer.atropos.max_restarts,
        kind="trainer",
        key="trainer.atropos.max_restarts",
        recovers=lambda status: status < 0 or status == RECOVERABLE,
    )


def _restart_trainer(run: Run) -> Service:
    """Start the trainer from its newest checkpoint, or as it was started if it has saved none in this start."""
    checkpoints = Checkpoints(run.config.trainer.default_local_dir).whole()
    if any(folder.stat().st_mtime > run.started for folder in checkpoints):
        run.complete.trainer.resume_mode, run.complete.trainer.resume_from_path = "auto", None
    return _start_trainer(run)


def _start_trainer(run: Run) -> Service:
    write_atomic(run.files.config, config_yaml(run.complete, by_launcher=True))
    variables = {
        **secret_variables([json.dumps(each) for each in hidden_settings(OmegaConf.to_container(run.complete))]),
        API_KEY_VARIABLE: run.api_key,
        "TENSORBOARD_DIR": str(run.files.tensorboard),
        "WANDB_DIR": str(run.directory),
    }
    return run.start("trainer", trainer_command(run), **variables)


def trainer_command(run: Run) -> list[str]:
    return [sys.executable, "-m", "recipe.atropos.main", "--run", str(run.directory)]


async def servers_healthy(run: Run, api: Service, inference: Inference) -> None:
    async def answers() -> bool:
        run.check()
        try:
            async with run.api_client(api.url) as client:
                return bool(await client.status())
        except TrajectoryApiError:
            return False

    await wait_until_healthy(api, answers, run.config.api.start_timeout)
    seconds = await inference_healthy(run, inference)
    many = f"{len(inference.urls)} servers " if len(inference.urls) > 1 else ""
    console.print(f"[bold]sglang[/]  {many}up after {seconds:.0f} s; api at {api.url}")


def start_trainer(run: Run, api: Service, inference: Inference, evaluated: Path | None = None) -> Service:
    """Start the trainer, which loads the run's ``config.yaml``; that file is completed here.

    The trainer waits for the evaluations reported in the file ``evaluated``; without one, it does not wait.
    """
    addresses = {
        "inference.urls": list(inference.urls),
        "inference.gateway": inference.gateway,
        "inference.api_key": run.api_key,
        "trainer.atropos.api_url": api.url,
        "trainer.atropos.startup_timeout": float(run.config.inference.start_timeout),
        "evaluation.evaluated_file": evaluated and str(evaluated),
    }
    run.complete = complete_config(run.composed, run.config, run.directory, addresses)
    return _start_trainer(run)


async def first_version(run: Run, trainer: Service, inference: Inference) -> int:
    """Wait for the trainer's first push and return its version; no environment may start before it."""

    async def pushed() -> bool:
        run.check()
        return await inference.version() is not None

    timeout = run.config.trainer.ray_wait_register_center_timeout + run.config.trainer.atropos.weight_sync.timeout
    try:
        seconds = await wait_until_healthy(trainer, pushed, timeout, what="done with its first push of weights")
    except ServiceFailed:
        if trainer.poll() != 0:
            raise
        seconds = 0.0  # it had nothing left to train
    version = await served_version(run, inference)
    console.print(f"[bold]trainer[/] pushed version {version} after {seconds:.0f} s")
    return version


async def served_version(run: Run, inference: Inference) -> int:
    """Return the served version. Wait if there is none: a restarted gateway waits for the trainer to admit servers.

    Raises:
        ServiceFailed: none is served within ``_VERSION_SECONDS``, or a required service ended.
    """
    deadline = time.monotonic() + _VERSION_SECONDS
    while (version := await inference.version()) is None:
        run.check()
        if time.monotonic() > deadline:
            gateway = next(service for service in run.services if service.name == "gateway")
            raise gateway.failure(f"admits no server with the trainer's weights for {_VERSION_SECONDS:g} s")
        await asyncio.sleep(WATCH_SECONDS)
    return version


def check_port(given: int | None, host: str, key: str) -> None:
    if given is not None and not port_is_free(given, host):
        raise ConfigurationError(f"{key}={given} is taken on {host}; give another, or null for a free one")
