"""One-shot launcher: ``python -m recipe.atropos.launch_services --preset demo [--steps N] [key=value ...]``

Starts the Trajectory API, the SGLang server, the trainer and the environment, in the order in which each can use the
one before; watches them until the trainer has trained every step; then ends exactly what it started. The promises:

- the environment starts only when the server holds the trainer's weights;
- whichever service ends early ends the run, with that service's name and last lines, and a non-zero status;
- held-out accuracy is measured by the environment itself, on weights whose version the server reports before and after;
- whatever happens, Ctrl-C included, no process of the run stays.

A run leaves what DESIGN's run contract lists in ``runs/NAME``; the same command resumes an interrupted run.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from recipe.atropos.environments.pace import VARIABLE
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.inference.server import LaunchError, SGLangLaunch, start_sglang
from recipe.atropos.preflight import ConfigurationError, check_config, resolve_model
from recipe.atropos.run_record import MetricsReader, update_summary
from recipe.atropos.services.process import (
    Service,
    ServiceFailed,
    free_port,
    port_is_free,
    start_service,
    wait_until_healthy,
)
from recipe.atropos.utils.plots import plot_reward

console = Console(highlight=False)

_WATCH_SECONDS = 0.5


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.atropos.launch_services",
        description="Start the Trajectory API, SGLang, the trainer and an Atropos environment; train; end them all.",
        epilog="key=value: any key of config/trainer.yaml or of verl's ppo_trainer, as for recipe.atropos.main",
    )
    parser.add_argument("--preset", help="a file of config/preset, without .yaml; demo runs on two CPU cores")
    parser.add_argument("--steps", type=int, help="updates to train (trainer.total_training_steps)")
    parser.add_argument("--run-dir", help="folder of the run (run.dir); an unfinished run there is resumed")
    parser.add_argument("--model", help="local folder or hub name (actor_rollout_ref.model.path)")
    parser.add_argument("--gpus", type=int, help="ranks of the trainer (trainer.n_gpus_per_node); on a CPU, processes")
    parser.add_argument("--seed", type=int, help="of the data, the sampling and the small policy (seed)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(argv)


def compose_overrides(arguments: argparse.Namespace) -> list[str]:
    """The launcher's options as Hydra overrides; explicit key=value come last and win."""
    named = {
        "preset": arguments.preset,
        "trainer.total_training_steps": arguments.steps,
        "run.dir": arguments.run_dir and quoted(Path(arguments.run_dir).resolve()),
        "actor_rollout_ref.model.path": arguments.model and quoted(arguments.model),
        "trainer.n_gpus_per_node": arguments.gpus,
        "seed": arguments.seed,
    }
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None] + arguments.overrides
    # These two mappings are the user's own: a new key in them needs no "+".
    return [re.sub(r"^(environment|inference)\.args\.", r"++\g<0>", override) for override in overrides]


def quoted(value: str | Path) -> str:
    """A string as Hydra's override grammar takes it whatever is in it, ``=``, commas and spaces included."""
    return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"


def load_config(overrides: list[str]) -> DictConfig:
    """Raises ConfigurationError, naming the key, where Hydra refuses an override."""
    try:
        with initialize_config_module("recipe.atropos.config", version_base=None):
            config = compose("trainer", overrides=overrides)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(str(error)) from error
    return config


def choose_run_dir(config: DictConfig, explicit: bool) -> Path:
    """The folder of the run: the configured one, or, where a finished run is in it, the next free number after it.

    Raises:
        ConfigurationError: a folder given by hand holds a finished run.
    """
    configured = Path(config.run.dir).resolve()
    candidate, number = configured, 1
    while _steps_done(candidate) >= config.trainer.total_training_steps:
        if explicit:
            raise ConfigurationError(
                f"run.dir={candidate} holds a run that has trained {_steps_done(candidate)} steps already; "
                "give another folder, or more --steps to go on"
            )
        number += 1
        candidate = configured.with_name(f"{configured.name}-{number}")
    return candidate


def _steps_done(folder: Path) -> int:
    summary = folder / "summary.json"
    return orjson.loads(summary.read_bytes()).get("steps", 0) if summary.exists() else 0


def check_environment(target: str) -> None:
    """Raises ConfigurationError where ``environment.target`` is neither a file nor a module that can be found."""
    try:
        found = Path(target).is_file() if target.endswith(".py") else importlib.util.find_spec(target) is not None
    except ModuleNotFoundError:  # of a parent package
        found = False
    if not found:
        raise ConfigurationError(
            f"environment.target={target}: no such {'file' if target.endswith('.py') else 'module'}; give a module "
            "that can be imported (put its folder on PYTHONPATH), or the path of its .py file"
        )


@dataclass
class Run:
    """A run's services and files. ``services`` are in the order of their start; they are ended in the reverse."""

    config: DictConfig
    overrides: list[str]
    directory: Path
    services: list[Service] = field(default_factory=list)
    api_key: str = field(default_factory=lambda: secrets.token_hex(16))

    def start(self, name: str, command: list[str], url: str | None = None, **env: str) -> Service:
        """In the launcher's own working folder, so that relative paths and local modules mean what the user meant."""
        service = start_service(name, command, log_path=self.log(name), env={"PYTHONUNBUFFERED": "1", **env}, url=url)
        self.add(service)
        return service

    def add(self, service: Service) -> None:
        self.services.append(service)
        listing = {s.name: {"pid": s.pid, "url": s.url, "log": str(s.log_path)} for s in self.services}
        (self.directory / "services.json").write_bytes(orjson.dumps(listing, option=orjson.OPT_INDENT_2))

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def stop(self, *services: Service) -> None:
        """End the given services, or all, the youngest first."""
        for service in reversed(services or tuple(self.services)):
            service.stop()

    def check(self) -> None:
        """Raises ServiceFailed if a service has ended; the trainer may, with status 0."""
        for service in self.services:
            status = service.poll()
            if status is not None and not (service.name == "trainer" and status == 0):
                raise service.failure("ended while the run needs it")


async def launch(config: DictConfig, overrides: list[str], directory: Path) -> None:
    """Run everything to the last step.

    Raises:
        ConfigurationError, ServiceFailed: with nothing left running.
    """
    run = Run(config, overrides, directory)
    started = time.monotonic()
    try:
        resumed = _steps_done(directory) > 0
        api, sglang = start_servers(run)
        trainer = start_trainer(run, api, sglang)  # it waits for the servers while its own workers start
        await servers_healthy(run, api, sglang)
        version = await first_version(run, sglang)
        if config.environment.evaluate and not resumed:
            before = await evaluate(run, sglang, "before")
            update_summary(
                directory, {"heldout_accuracy_before": before["accuracy"], "heldout_problems": before["total"]}
            )
        environment = start_environment(run, api, sglang)
        await watch(run, trainer, version)
        run.stop(environment)
        run.services.remove(environment)
        if config.environment.evaluate:
            after = await evaluate(run, sglang, "after")
            update_summary(directory, {"heldout_accuracy_after": after["accuracy"], "heldout_problems": after["total"]})
    finally:
        run.stop()
    update_summary(directory, {"seconds_in_all": time.monotonic() - started})
    plot_reward(directory)


def start_servers(run: Run) -> tuple[Service, Service]:
    """The Trajectory API and SGLang; not healthy yet."""
    api_config, inference = run.config.api, run.config.inference
    port = _port(api_config.port, api_config.host, "api.port")
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", api_config.host, "--port", str(port)]
    api = run.start("api", command, url=f"http://{api_config.host}:{port}")
    sglang_launch = SGLangLaunch(
        model_path=run.config.actor_rollout_ref.model.path,
        python=inference.python,
        host=inference.host,
        port=inference.port,
        device=inference.device,
        dtype=inference.dtype,
        api_key=run.api_key,
        extra_args={"random_seed": run.config.seed, **inference.args},
    )
    sglang = start_sglang(sglang_launch, log_path=run.log("sglang"))
    run.add(sglang)
    console.print(f"[bold]sglang[/]  starting {sglang_launch.model_path} at {sglang.url}")
    return api, sglang


async def servers_healthy(run: Run, api: Service, sglang: Service) -> None:
    async def answers() -> bool:
        run.check()
        return await _answers(f"{api.url}/status")

    async def serves() -> bool:
        run.check()
        async with SGLangClient(sglang.url, run.api_key) as client:
            return await client.health()

    await wait_until_healthy(api, answers, run.config.api.start_timeout)
    seconds = await wait_until_healthy(sglang, serves, run.config.inference.start_timeout)
    console.print(f"[bold]sglang[/]  up after {seconds:.0f} s; api at {api.url}")


def start_trainer(run: Run, api: Service, sglang: Service) -> Service:
    addresses = [
        f"inference.urls=[{sglang.url}]",
        f"trainer.atropos.api_url={api.url}",
        f"trainer.atropos.startup_timeout={run.config.inference.start_timeout}",
    ]
    model = f"actor_rollout_ref.model.path={quoted(run.config.actor_rollout_ref.model.path)}"
    command = [sys.executable, "-m", "recipe.atropos.main", *run.overrides, *addresses, model]
    folders = {"TENSORBOARD_DIR": str(run.directory / "tensorboard"), "WANDB_DIR": str(run.directory)}
    return run.start("trainer", [*command, f"run.dir={quoted(run.directory)}"], ATROPOS_API_KEY=run.api_key, **folders)


async def first_version(run: Run, sglang: Service) -> int:
    """The version of the trainer's first push: until then no environment may start."""

    async def pushed() -> bool:
        run.check()
        return (await _weight_version(run, sglang)).isdigit()

    timeout = run.config.trainer.ray_wait_register_center_timeout + run.config.trainer.atropos.weight_sync.timeout
    seconds = await wait_until_healthy(sglang, pushed, timeout, what="given the trainer's weights")
    version = int(await _weight_version(run, sglang))
    console.print(f"[bold]trainer[/] pushed version {version} after {seconds:.0f} s")
    return version


def environment_command(run: Run, subcommand: str, api_url: str, server_url: str) -> list[str]:
    """The environment's own command line; ``environment.args`` come last and win.

    ``environment.args.KEY`` is the environment's ``--env.KEY``, ``environment.args.openai.KEY`` is ``--openai.KEY``;
    null leaves a flag out.
    """
    config, model = run.config, run.config.actor_rollout_ref.model.path
    target = config.environment.target
    flags = {
        "env.rollout_server_url": api_url,
        "env.tokenizer_name": model,
        "env.group_size": config.environment.group_size,
        "env.max_token_length": config.data.max_prompt_length + config.data.max_response_length,
        "env.total_steps": 10**9,  # the launcher ends it
        "env.use_wandb": False,
        "openai.base_url": f"{server_url}/v1",
        "openai.model_name": model,
        "openai.server_type": "sglang",
        "openai.api_key": run.api_key,
        "openai.health_check": False,
    }
    if subcommand == "serve":
        flags["slurm"] = False
    for key, value in OmegaConf.to_container(config.environment.args).items():
        flags |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {f"env.{key}": value}
    program = [str(Path(target).resolve())] if target.endswith(".py") else ["-m", target]
    given = {key: value for key, value in flags.items() if value is not None}
    return [sys.executable, *program, subcommand, *(f"--{key}={_text(value)}" for key, value in given.items())]


def start_environment(run: Run, api: Service, sglang: Service) -> Service:
    command = environment_command(run, "serve", api.url, sglang.url)
    max_staleness = run.config.trainer.atropos.max_staleness
    return run.start("environment", command, **{VARIABLE: "" if max_staleness is None else str(max_staleness)})


async def evaluate(run: Run, sglang: Service, when: str) -> dict[str, float]:
    """Held-out accuracy of the version that the server holds, by the environment's own ``evaluate``.

    Returns ``accuracy`` in [0, 1] and ``total``, the number of problems.

    Raises:
        ServiceFailed: the evaluation failed, took too long, or met another version at its end than at its start.
    """
    folder = run.directory / "evaluation" / when
    folder.mkdir(parents=True, exist_ok=True)
    version = await _weight_version(run, sglang)
    command = environment_command(run, "evaluate", "http://127.0.0.1:1", sglang.url)
    service = run.start(f"evaluate-{when}", [*command, f"--env.data_dir_to_save_evals={folder}"])
    run.services.remove(service)
    try:
        timeout = run.config.environment.start_timeout
        deadline = time.monotonic() + timeout
        while service.poll() is None:
            run.check()
            if time.monotonic() > deadline:
                raise service.failure(f"not done within environment.start_timeout={timeout} s")
            await asyncio.sleep(_WATCH_SECONDS)
    finally:
        service.stop()
    metrics_path = folder / "metrics.json"
    if service.poll() != 0 or not metrics_path.exists():
        raise service.failure("no evaluation")
    if version != await _weight_version(run, sglang):
        raise service.failure(f"the weights changed during the evaluation of version {version}")
    metrics = orjson.loads(metrics_path.read_bytes())["results"]["all"]
    accuracy = next(value for key, value in metrics.items() if key.endswith(("percent_correct", "accuracy")))
    total = next((value for key, value in metrics.items() if key.endswith("total")), 0)
    console.print(f"[bold]heldout[/] {accuracy:.1%} of {total:.0f} problems right, greedy, version {version}")
    return {"accuracy": accuracy, "total": total}


async def watch(run: Run, trainer: Service, version: int) -> None:
    """Until the trainer has ended well; says every step that it trained.

    Raises:
        ServiceFailed: a service ended, or the trainer ended short of the last step.
    """
    total = run.config.trainer.total_training_steps
    seen, reader = version, MetricsReader(run.directory)
    while True:
        ended = trainer.poll() is not None
        for line in reader.new_lines():
            if line["step"] > seen:
                seen = line["step"]
                console.print(
                    f"[bold]step {seen:>4}/{total}[/] score {line['atropos/mean_score']:+.3f}  "
                    f"rows {line['atropos/rows']:.0f}  {line['timing_s/step']:.1f} s, of them waiting "
                    f"{line['phase_s/wait']:.1f}  version {line['atropos/policy_version']}"
                )
        run.check()
        if ended:
            if seen < total:
                raise trainer.failure(f"ended after step {seen} of {total}")
            return
        await asyncio.sleep(_WATCH_SECONDS)


async def _weight_version(run: Run, sglang: Service) -> str:
    try:
        async with SGLangClient(sglang.url, run.api_key, timeout=30) as client:
            return await client.weight_version()
    except InferenceError as error:
        run.check()
        raise sglang.failure(str(error)) from error


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


def _port(given: int | None, host: str, key: str) -> int:
    if given is not None and not port_is_free(given, host):
        raise ConfigurationError(f"{key}={given} is taken on {host}; give another, or null for a free one")
    return given or free_port(host)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A terminated launcher ends its services like an interrupted one."""
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 only if every step was trained."""
    arguments = parse_arguments(argv)
    overrides = compose_overrides(arguments)
    try:
        config = load_config(overrides)
        explicit = any(override.startswith("run.dir=") for override in overrides)
        directory = choose_run_dir(config, explicit)
        config.actor_rollout_ref.model.path = resolve_model(config.actor_rollout_ref.model.path, config.seed)
        check_config(config)
        check_environment(config.environment.target)
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, directory / "config.yaml")
        console.print(f"[bold]run[/]     {os.path.relpath(directory)}")
        with _sigterm_as_interrupt():
            asyncio.run(launch(config, overrides, directory))
    except (ConfigurationError, LaunchError, ServiceFailed) as error:
        console.print(f"[bold red]error[/]   {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("[bold]stopped[/] the same command resumes the run")
        return 130
    summary = orjson.loads((directory / "summary.json").read_bytes())
    console.print(f"[bold]done[/]    {os.path.relpath(directory)}/summary.json, reward.png")
    console.print_json(orjson.dumps(summary).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
