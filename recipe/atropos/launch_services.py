"""One-shot launcher: ``python -m recipe.atropos.launch_services --preset demo [--steps N] [key=value ...]``

Starts the Trajectory API, the SGLang servers with the gateway before them, the trainer and the environment, in the
order in which each can use the one before; watches them until the trainer has trained every step; then ends exactly
what it started. The promises:

- the environment starts only when the servers hold the trainer's weights;
- an SGLang server or a gateway that ends is started again, so many times, and the run goes on; whichever other service
  ends early ends the run, with that service's name and last lines, and a non-zero status;
- held-out accuracy is measured by the environment itself, on one version of the weights from beginning to end;
- whatever happens, Ctrl-C included, no process of the run stays.

A run leaves what DESIGN's run contract lists in ``runs/NAME``; the same command resumes an interrupted run.
"""

import argparse
import asyncio
import importlib.util
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.markup import escape

from recipe.atropos.environments.pace import VARIABLE
from recipe.atropos.inference.server import LaunchError
from recipe.atropos.preflight import ConfigurationError, check_config, resolve_model
from recipe.atropos.run_record import MetricsReader, update_summary
from recipe.atropos.services.inference import Inference, inference_healthy, start_inference
from recipe.atropos.services.process import Service, ServiceFailed, free_port, port_is_free, wait_until_healthy
from recipe.atropos.services.run import Run, console
from recipe.atropos.utils.plots import plot_reward

_WATCH_SECONDS = 0.5
_VERSION_SECONDS = 120.0
_REWARD_BRIDGE = "reward_bridge.yaml"  # in the run's folder


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
    # These mappings are the user's own: a new key in them needs no "+".
    own = r"^((environment|inference)\.args|environment\.reward_bridge)\."
    return [re.sub(own, r"++\g<0>", override) for override in overrides]


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


async def launch(config: DictConfig, overrides: list[str], directory: Path) -> None:
    """Run everything to the last step.

    Raises:
        ConfigurationError, ServiceFailed: with nothing left running.
    """
    # Terminated, it ends its services as when it is interrupted; also where a shell started it with SIGINT ignored.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    run = Run(config, overrides, directory)
    started = time.monotonic()
    try:
        resumed = _steps_done(directory) > 0
        api = start_api(run)
        inference = start_inference(run)
        console.print(
            f"[bold]sglang[/]  starting {config.actor_rollout_ref.model.path} at {', '.join(inference.urls)}, "
            f"behind {inference.gateway}",
            soft_wrap=True,
        )
        trainer = start_trainer(run, api, inference)  # it waits for the servers while its own workers start
        await servers_healthy(run, api, inference)
        version = await first_version(run, trainer, inference)
        if config.environment.evaluate and not resumed:
            before = await evaluate(run, inference, "before")
            update_summary(
                directory, {"heldout_accuracy_before": before["accuracy"], "heldout_problems": before["total"]}
            )
        environment = start_environment(run, api, inference)
        await watch(run, trainer, version)
        run.stop(environment)
        run.remove(environment)
        if config.environment.evaluate:
            after = await evaluate(run, inference, "after")
            update_summary(directory, {"heldout_accuracy_after": after["accuracy"], "heldout_problems": after["total"]})
    finally:
        run.stop()
    update_summary(directory, {"seconds_in_all": time.monotonic() - started})
    plot_reward(directory)


def start_api(run: Run) -> Service:
    """The Trajectory API; not healthy yet."""
    config = run.config.api
    port = _port(config.port, config.host, "api.port")
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", config.host, "--port", str(port)]
    return run.start("api", command, url=f"http://{config.host}:{port}")


async def servers_healthy(run: Run, api: Service, inference: Inference) -> None:
    async def answers() -> bool:
        run.check()
        return await _answers(f"{api.url}/status")

    await wait_until_healthy(api, answers, run.config.api.start_timeout)
    seconds = await inference_healthy(run, inference)
    many = f"{len(inference.urls)} servers " if len(inference.urls) > 1 else ""
    console.print(f"[bold]sglang[/]  {many}up after {seconds:.0f} s; api at {api.url}")


def start_trainer(run: Run, api: Service, inference: Inference) -> Service:
    addresses = [
        f"inference.urls=[{','.join(inference.urls)}]",
        f"inference.gateway={inference.gateway}",
        f"trainer.atropos.api_url={api.url}",
        f"trainer.atropos.startup_timeout={run.config.inference.start_timeout}",
    ]
    model = f"actor_rollout_ref.model.path={quoted(run.config.actor_rollout_ref.model.path)}"
    command = [sys.executable, "-m", "recipe.atropos.main", *run.overrides, *addresses, model]
    folders = {"TENSORBOARD_DIR": str(run.directory / "tensorboard"), "WANDB_DIR": str(run.directory)}
    return run.start("trainer", [*command, f"run.dir={quoted(run.directory)}"], ATROPOS_API_KEY=run.api_key, **folders)


async def first_version(run: Run, trainer: Service, inference: Inference) -> int:
    """The version of the trainer's first push: until then no environment may start."""

    async def pushed() -> bool:
        run.check()
        return await inference.version() is not None

    timeout = run.config.trainer.ray_wait_register_center_timeout + run.config.trainer.atropos.weight_sync.timeout
    seconds = await wait_until_healthy(trainer, pushed, timeout, what="done with its first push of weights")
    version = await served_version(run, inference)
    console.print(f"[bold]trainer[/] pushed version {version} after {seconds:.0f} s")
    return version


async def served_version(run: Run, inference: Inference) -> int:
    """The version that every request meets now.

    Raises:
        ServiceFailed: none is served, also not in a while: a gateway that was started again waits for the trainer.
    """
    deadline = time.monotonic() + _VERSION_SECONDS
    while (version := await inference.version()) is None:
        run.check()
        if time.monotonic() > deadline:
            gateway = next(service for service in run.services if service.name == "gateway")
            raise gateway.failure(f"admits no server with the trainer's weights for {_VERSION_SECONDS:g} s")
        await asyncio.sleep(_WATCH_SECONDS)
    return version


def environment_command(run: Run, subcommand: str, api_url: str, server_url: str) -> list[str]:
    """The environment's own command line; ``environment.args`` come last and win.

    ``environment.args.KEY`` is the environment's ``--env.KEY``, ``environment.args.openai.KEY`` is ``--openai.KEY``;
    null leaves a flag out. With ``environment.reward_bridge`` it runs through the adapter, and ``serve`` is shaped.
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
    words = [subcommand, *(f"--{key}={_text(value)}" for key, value in given.items())]
    if config.environment.reward_bridge is not None:
        words += ["--env", program[-1]]
        words += ["--reward-bridge", str(run.directory / _REWARD_BRIDGE)] if subcommand == "serve" else []
        program = ["-m", "recipe.atropos.utils.env_adapter"]
    return [sys.executable, *program, *words]


def start_environment(run: Run, api: Service, inference: Inference) -> Service:
    command = environment_command(run, "serve", api.url, inference.gateway)
    if run.config.environment.reward_bridge is not None:
        OmegaConf.save(run.config.environment.reward_bridge, run.directory / _REWARD_BRIDGE)
    max_staleness = run.config.trainer.atropos.max_staleness
    return run.start("environment", command, **{VARIABLE: "" if max_staleness is None else str(max_staleness)})


async def evaluate(run: Run, inference: Inference, when: str) -> dict[str, float]:
    """Held-out accuracy of the version that the servers hold, by the environment's own ``evaluate``.

    Returns ``accuracy`` in [0, 1] and ``total``, the number of problems.

    Raises:
        ServiceFailed: the evaluation failed, took too long, or met another version at its end than at its start.
    """
    folder = run.directory / "evaluation" / when
    folder.mkdir(parents=True, exist_ok=True)
    version = await served_version(run, inference)
    command = environment_command(run, "evaluate", "http://127.0.0.1:1", inference.gateway)
    service = run.start(f"evaluate-{when}", [*command, f"--env.data_dir_to_save_evals={folder}"])
    run.remove(service)
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
    if version != await served_version(run, inference):
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
        asyncio.run(launch(config, overrides, directory))
    except (ConfigurationError, LaunchError, ServiceFailed) as error:
        console.print(f"[bold red]error[/]   {escape(str(error))}", soft_wrap=True)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("[bold]stopped[/] the same command resumes the run")
        return 130
    summary = orjson.loads((directory / "summary.json").read_bytes())
    console.print(f"[bold]done[/]    {os.path.relpath(directory)}/summary.json, reward.png")
    console.print_json(orjson.dumps(summary).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
