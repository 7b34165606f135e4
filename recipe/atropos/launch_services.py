"""One-shot launcher: ``python -m recipe.atropos.launch_services --preset demo [--steps N] [key=value ...]``

Starts the Trajectory API, the SGLang servers with the gateway before them, the trainer and the environments, in the
order in which each can use the one before; watches them until the trainer has trained every step; then ends exactly
what it started. Guarantees:

- the environments start only when the servers hold the trainer's weights; with ``environment.target=null`` it starts
  none, and prints how they join;
- an SGLang server, a gateway or an environment that ends is started again, so many times, and the run goes on, of
  several environments also without one that is given up; whichever other service ends early ends the run, with that
  service's name and last lines, and a non-zero status;
- held-out accuracy is measured by the environments themselves, on one version of the weights from beginning to end;
- however and whenever it ends, no process of the run is left 20 seconds later (see ``utils/guardian.py``);
- a run that trains no step for ``trainer.atropos.step_timeout`` seconds ends with an error.

A run leaves what DESIGN's run contract lists in ``runs/NAME``; the same command resumes an interrupted run.
"""

import argparse
import asyncio
import contextlib
import inspect
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig
from rich.markup import escape

from recipe.atropos.algorithm import alarms
from recipe.atropos.checkpoint.model_card import EXPORTED, write_card
from recipe.atropos.checkpoint.resumption import prepare_folder
from recipe.atropos.checkpoint.start_from import Start, forget_start
from recipe.atropos.config.compose import given_keys, given_values, load_config
from recipe.atropos.config.env_specs import EnvironmentSpec, environment_specs
from recipe.atropos.config.models import KEY as MODEL_KEY
from recipe.atropos.config.models import SMALL_POLICIES, check_model, set_model_path
from recipe.atropos.errors import ConfigurationError, expected_failure
from recipe.atropos.inference.server import SGLangLaunch, check_launch
from recipe.atropos.launcher.environment_processes import Environments, check_environments, check_target
from recipe.atropos.launcher.evaluation import Evaluations
from recipe.atropos.launcher.gpu_environment import check_gpu_environment
from recipe.atropos.launcher.joining import Joining, check_key
from recipe.atropos.launcher.placement import place_servers
from recipe.atropos.launcher.preflight import check_config
from recipe.atropos.launcher.progress import progress
from recipe.atropos.launcher.services import Run, console
from recipe.atropos.launcher.sglang import Inference, given_ports, inference_healthy, start_inference
from recipe.atropos.run_dir import DiskFull, LineReader, RunDir, disk_is_full, read_json
from recipe.atropos.run_record import QUEUED, account_of_groups, update_summary
from recipe.atropos.utils.hosts import reachable
from recipe.atropos.utils.process import (
    Service,
    ServiceFailed,
    default_port,
    free_port,
    port_is_free,
    wait_until_healthy,
)
from recipe.atropos.utils.secret import API_KEY_VARIABLE, holds_secret, secret_variables
from recipe.atropos.verl_ext.attention import set_attention

API_PORT = 8000  # where it is free: the address that Atropos' environments have by default

_MODEL_TO_COME = "model-of-the-run-to-resume-from"  # a value until the start is known, which only then is loaded
_SET_BY_THE_LAUNCHER = {  # keys, and what to give instead
    "evaluation.evaluated_file": "nothing",
    "inference.gateway": "inference.host and inference.gateway_port",
    "inference.urls": "inference.servers, inference.host and inference.port",
    "trainer.atropos.api_url": "api.host and api.port",
    "trainer.atropos.startup_timeout": "inference.start_timeout",
}
_WATCH_SECONDS = 0.5
_VERSION_SECONDS = 120.0
_QUEUE_SECONDS = 5.0


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.atropos.launch_services",
        description="Start the Trajectory API, SGLang, the trainer and Atropos environments; train; end them all.",
        epilog="key=value: any key of config/trainer.yaml or of verl's ppo_trainer, as for recipe.atropos.main",
    )
    parser.add_argument("--preset", help="a file of config/preset, without .yaml; demo runs on two CPU cores")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of your own, over trainer.yaml and the preset")
    parser.add_argument("--steps", type=int, help="updates to train (trainer.total_training_steps)")
    parser.add_argument("--run-dir", help="folder of the run (run.dir); an unfinished run there is resumed")
    parser.add_argument("--model", help="local folder or hub name (actor_rollout_ref.model.path)")
    parser.add_argument(
        "--resume-from", metavar="RUN[@STEP]", help="begin with another run's weights (run.resume_from)"
    )
    parser.add_argument("--gpus", type=int, help="ranks of the trainer (trainer.n_gpus_per_node); on a CPU, processes")
    parser.add_argument("--seed", type=int, help="of the data, the sampling and the small policy (seed)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(argv)


def compose_overrides(arguments: argparse.Namespace) -> list[str]:
    """The launcher's options as key=value; the user's own key=value come last and win."""
    named = {
        "preset": arguments.preset,
        "config": arguments.config and quoted(Path(arguments.config).resolve()),
        "trainer.total_training_steps": arguments.steps,
        "run.dir": arguments.run_dir and quoted(Path(arguments.run_dir).resolve()),
        "actor_rollout_ref.model.path": arguments.model and quoted(arguments.model),
        "run.resume_from": arguments.resume_from and quoted(arguments.resume_from),
        "trainer.n_gpus_per_node": arguments.gpus,
        "seed": arguments.seed,
    }
    return [f"{key}={value}" for key, value in named.items() if value is not None] + arguments.overrides


def quoted(value: str | Path | int | list[str]) -> str:
    """As Hydra's override grammar takes it, a string whatever is in it, ``=``, commas and spaces included."""
    if isinstance(value, list):
        return f"[{','.join(quoted(item) for item in value)}]"
    if isinstance(value, int):
        return str(value)
    return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"


def load_run_config(overrides: list[str]) -> tuple[DictConfig, list[str], Path, Start | None]:
    """The configuration, the overrides that give it, the run's folder, and another run's weights that it begins with.

    Paths below run.dir are in that folder.

    Raises:
        ConfigurationError: as ``load_config``, ``choose_run_dir`` and ``Start.of``; or a key that only the trainer by
            itself takes.
    """
    given, start, more = given_keys(overrides), None, []
    for key in sorted(given & _SET_BY_THE_LAUNCHER.keys()):
        raise ConfigurationError(
            f"{key} is the launcher's to set, which starts the services itself; drop it and give "
            f"{_SET_BY_THE_LAUNCHER[key]}, or train beside services of your own by python -m recipe.atropos.main"
        )
    later = "run.resume_from" in given and MODEL_KEY not in given  # its model is known once the run's folder is
    config = load_config([*overrides, f"{MODEL_KEY}={_MODEL_TO_COME}"] if later else overrides, tell=_say)
    directory = choose_run_dir(config, explicit="run.dir" in given)
    if directory != Path(config.run.dir).resolve():
        more = [("run.dir", directory)]
    if config.run.resume_from:
        start = Start.of(config, directory, given)
        more += start.overrides
    if more or later:
        overrides = [*overrides, *(f"{key}={quoted(value)}" for key, value in more)]
        config = load_config(overrides)
    return config, overrides, directory, start


def choose_run_dir(config: DictConfig, explicit: bool) -> Path:
    """The folder of the run: the configured one, or, where a finished run is in it, the next free number after it.

    Raises:
        ConfigurationError: a folder given by hand holds a finished run.
    """
    configured = Path(config.run.dir).resolve()
    candidate, number = configured, 1
    while _finished(candidate) >= config.trainer.total_training_steps:
        if explicit:
            raise ConfigurationError(
                f"run.dir={candidate} holds a run that has trained {_finished(candidate)} steps already; "
                "give another folder, or more --steps to go on"
            )
        number += 1
        candidate = configured.with_name(f"{configured.name}-{number}")
    return candidate


def _finished(folder: Path) -> int:
    """The steps of a run whose last evaluation is done too; 0 where there is none."""
    try:
        return read_json(RunDir(folder).summary, {}).get("finished_steps", 0)
    except OSError as error:
        raise ConfigurationError(f"run.dir={folder}: {error.strerror}; give another --run-dir") from error


def environments_of(config: DictConfig) -> dict[str, EnvironmentSpec]:
    """By name. Raises ConfigurationError where one's target is neither a file nor a module that can be found."""
    specs = environment_specs(config)
    try:
        for spec in specs.values():
            check_target(spec)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return specs


def check_start(config: DictConfig) -> None:
    """Hosts, ports, SGLang's interpreter and its flags, before anything is started.

    Raises:
        ConfigurationError, LaunchError: naming the key.
    """
    inference = config.inference
    _check_host(config.api.host, "api.host")
    _check_host(inference.host, "inference.host")
    _check_port(config.api.port, config.api.host, "api.port")
    _check_port(inference.gateway_port, inference.host, "inference.gateway_port")
    ports = given_ports(config)
    given = list(ports.values())
    if double := next((port for port in given if given.count(port) > 1), None):
        keys = " and ".join(key for key, port in ports.items() if port == double)
        raise ConfigurationError(f"{keys}: both are {double}; give another, or null for a free one")
    for number in range(inference.servers):
        check_launch(
            SGLangLaunch(
                model_path=config.actor_rollout_ref.model.path,
                python=inference.python,
                host=inference.host,
                port=None if inference.port is None else inference.port + number,
                device=inference.device,
                extra_args=inference.args,
            )
        )


def make_folder(directory: Path) -> None:
    """Raises ConfigurationError where it cannot be made or written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigurationError(f"run.dir={directory}: {error.strerror}; give another --run-dir") from error


def prepare_model(config: DictConfig, log_path: Path) -> None:
    """Put the model's folder in place of a small policy's name or a path with ``~``; makes a small policy.

    ``log_path``: for what its making prints.
    """
    path = config.actor_rollout_ref.model.path
    making = progress(f"preparing {path}, which is made once, in a minute", log_path)
    with making if path in SMALL_POLICIES else contextlib.nullcontext():
        set_model_path(config, log_path)


async def launch(
    config: DictConfig,
    overrides: list[str],
    directory: Path,
    specs: dict[str, EnvironmentSpec],
    lock: int | None = None,
) -> None:
    """Run everything to the last step. What is started holds the run folder too, by the descriptor ``lock``.

    Raises:
        ConfigurationError, ServiceFailed, DiskFull: with nothing left running; what went wrong first, and as its notes
            what went wrong in the end.
    """
    # Terminated, it ends its services as when it is interrupted; also where a shell started it with SIGINT ignored.
    # So too when its terminal is closed, unless it was told to outlive that (nohup).
    for number in _ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, asyncio.current_task().cancel)
    run = Run(config, overrides, directory, lock=lock)
    started = time.monotonic()
    environments = evaluations = failure = api_url = None
    try:
        api = start_api(run)
        api_url = api.url
        inference = start_inference(run)
        evaluations = Evaluations(run, specs, inference)
        console.print(
            f"[bold]sglang[/]  starting {config.actor_rollout_ref.model.path} at {', '.join(inference.urls)}, "
            f"behind {inference.gateway}",
            soft_wrap=True,
        )
        # It waits for the servers as it starts. Colocated ones measure first what is free of their GPU.
        beside = not any(launch.releases_memory for launch in inference.servers.values())
        trainer = start_trainer(run, api, inference, evaluations.word) if beside else None
        what = "the SGLang servers start" + (", and beside them the trainer" if beside else "")
        with progress(what, run.log(next(iter(inference.servers)))):
            await servers_healthy(run, api, inference)
        trainer = trainer or start_trainer(run, api, inference, evaluations.word)
        with progress("the trainer loads the model and pushes its weights", trainer.log_path):
            version = await first_version(run, trainer, inference)
        await evaluations.begin(version)
        if specs:
            environments = Environments(run, specs, api.url, inference.gateway)
        else:
            environments = Joining(run, api.url, inference.gateway)
        environments.start()
        with contextlib.ExitStack() as first:
            if specs:
                what = "the first step: the environments sample, the trainer compiles and trains"
                first.enter_context(progress(what, trainer.log_path))
            await watch(run, trainer, version, environments, evaluations, on_step=first.close)
        environments.stop()
        await evaluations.end()
        tell_model(run)
    except BaseException as error:
        failure = error
        # A service's log, on the same disk, may not say so.
        if disk_is_full(directory) and not isinstance(error, DiskFull):
            error.add_note(f"no space left on device: {directory}")
    later = await _end(run, api_url, environments, evaluations)
    if failure := failure or next(iter(later), None):
        for error in later:
            if error is not failure:
                failure.add_note(f"then, at the end: {error}")
        raise failure
    total = config.trainer.total_training_steps
    update_summary(directory, {"seconds_in_all": time.monotonic() - started, "finished_steps": total})
    from recipe.atropos.launcher.plots import plot_reward  # here: matplotlib takes a second

    plot_reward(directory)


def tell_model(run: Run) -> None:
    """Name what the trainer has exported, and complete its card: the last evaluation came after it."""
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
    run: Run, api_url: str | None, environments: Environments | Joining | None, evaluations: Evaluations | None
) -> list[Exception]:
    """End everything, whatever fails, and account for the groups; returns what failed."""
    failures: list[Exception] = []

    async def attempt(step: Callable[[], Any]) -> None:
        try:
            if inspect.isawaitable(result := step()):
                await result
        except Exception as error:
            failures.append(error)

    async def account() -> None:
        # Nothing is sent or fetched any more, and the trainer has told what it had not trained on.
        queued = await groups_in_queue(api_url) if api_url else 0
        summary = read_json(run.files.summary, {})
        told = {"environments": environments.summary(), QUEUED: queued + summary.get(QUEUED, 0)}
        update_summary(run.directory, told | {"groups": account_of_groups(summary | told)})

    with _undisturbed():
        if evaluations is not None:
            await attempt(evaluations.stop)
        if environments is not None:
            await attempt(environments.stop)
            for trainer in [service for service in run.services if service.name == "trainer"]:
                await attempt(partial(run.stop, trainer))
            await attempt(account)
        await attempt(run.stop)
    return failures


async def groups_in_queue(api_url: str) -> int:
    """Groups that the Trajectory API has in no batch yet; 0 where it is gone, with what it had."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_QUEUE_SECONDS)) as session:
            async with session.get(f"{api_url}/status") as reply:
                return (await reply.json())["queue_size"]
    except (aiohttp.ClientError, TimeoutError):
        return 0


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Another interrupt would leave processes behind."""
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


def start_api(run: Run) -> Service:
    """The Trajectory API; not healthy yet."""
    config = run.config.api
    _check_port(config.port, config.host, "api.port")
    port = config.port or default_port(API_PORT, config.host, given_ports(run.config).values())
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", config.host, "--port", str(port)]
    return run.start("api", command, url=f"http://{reachable(config.host)}:{port}")


async def servers_healthy(run: Run, api: Service, inference: Inference) -> None:
    async def answers() -> bool:
        run.check()
        return await _answers(f"{api.url}/status")

    await wait_until_healthy(api, answers, run.config.api.start_timeout)
    seconds = await inference_healthy(run, inference)
    many = f"{len(inference.urls)} servers " if len(inference.urls) > 1 else ""
    console.print(f"[bold]sglang[/]  {many}up after {seconds:.0f} s; api at {api.url}")


def start_trainer(run: Run, api: Service, inference: Inference, evaluated: Path | None = None) -> Service:
    """Start it; it waits for the evaluations that the file ``evaluated`` tells of, for none without such a file."""
    addresses = [
        f"inference.urls=[{','.join(inference.urls)}]",
        f"inference.gateway={inference.gateway}",
        f"inference.colocated={bool(run.config.inference.colocated)}",
        f"trainer.atropos.api_url={api.url}",
        f"trainer.atropos.startup_timeout={run.config.inference.start_timeout}",
        f"evaluation.evaluated_file={'null' if evaluated is None else quoted(evaluated)}",
        f"inference.api_key=${{oc.env:{API_KEY_VARIABLE}}}",
    ]
    model = f"actor_rollout_ref.model.path={quoted(run.config.actor_rollout_ref.model.path)}"
    # All of them together, since each may replace what one before it has set.
    private = any(holds_secret({key: value}) for key, value in given_values(run.overrides))
    public, secret = ([], run.overrides) if private else (run.overrides, [])
    command = [sys.executable, "-m", "recipe.atropos.main", *public, *addresses, model]
    variables = {
        **secret_variables(secret),
        API_KEY_VARIABLE: run.api_key,
        "TENSORBOARD_DIR": str(run.files.tensorboard),
        "WANDB_DIR": str(run.directory),
    }
    return run.start("trainer", [*command, f"run.dir={quoted(run.directory)}"], **variables)


async def first_version(run: Run, trainer: Service, inference: Inference) -> int:
    """The version of the trainer's first push: until then no environment may start."""

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


async def watch(
    run: Run,
    trainer: Service,
    version: int,
    environments: Environments | Joining,
    evaluations: Evaluations,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """Until the trainer has ended well; says every step that it trained, after a call of ``on_step``.

    Raises:
        ServiceFailed: a service ended that the run needs, the trainer ended short of the last step, or a process of it
            hangs: no step was trained for ``trainer.atropos.step_timeout`` seconds.
    """
    total, limit = run.config.trainer.total_training_steps, run.config.trainer.atropos.step_timeout
    longest = limit + run.config.trainer.atropos.join_timeout  # whatever is waited for
    last_step = trained = time.monotonic()
    seen, reader = version, LineReader(run.files.metrics)
    reported: set[str] = set()
    while True:
        ended = trainer.poll() is not None
        for line in reader.new_lines():
            if line["step"] > seen:
                seen = line["step"]
                last_step = trained = time.monotonic()
                on_step()
                console.print(
                    f"[bold]step {seen:>4}/{total}[/] score {scores_of(line)}  "
                    f"rows {line['atropos/rows']:.0f}  {line['timing_s/step']:.1f} s "
                    f"(wait {line['phase_s/wait']:.1f} s)  version {line['atropos/policy_version']}{_alarms(line)}",
                    soft_wrap=True,
                )
                _report_new_alarms(run.config, line, reported)
        await environments.look_after()
        if environments.awaited:  # bounded by trainer.atropos.join_timeout
            last_step = time.monotonic()
        run.check()
        await evaluations.look_after()
        now = time.monotonic()
        if not ended and (now - last_step > limit or now - trained > longest):
            waited = f"{now - trained:.0f} s; trainer.atropos.step_timeout={limit:g} s"
            raise trainer.failure(f"no step after step {seen} for {waited}")
        if ended:
            if seen < total:
                raise trainer.failure(f"ended after step {seen} of {total}")
            return
        await asyncio.sleep(_WATCH_SECONDS)


def scores_of(line: dict[str, float]) -> str:
    """A step's mean score, and where several environments are in it, that of each."""
    named = [(key.split("/"), score) for key, score in line.items() if key.endswith("/mean_score")]
    each = [f"{parts[1]} {score:+.3f}" for parts, score in named if len(parts) == 3]
    return f"{line['atropos/mean_score']:+.3f}" + (f" ({', '.join(each)})" if len(each) > 1 else "")


def _alarms(line: dict[str, float]) -> str:
    names = ", ".join(alarms.of_line(line))
    return f"  [bold yellow]{names}[/]" if names else ""


def _report_new_alarms(config: DictConfig, line: dict[str, float], reported: set[str]) -> None:
    """Say in full what the names behind the steps mean, each once."""
    tolerance = alarms.logprob_tolerance(config.trainer.atropos.logprob_tolerance, config.inference.dtype)
    for name, value in alarms.of_line(line).items():
        if name not in reported:
            reported.add(name)
            console.print(f"[bold yellow]{name}[/] {escape(alarms.describe(name, value, tolerance))}", soft_wrap=True)


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


def _check_host(host: str, key: str) -> None:
    try:
        free_port(host)
    except OSError as error:
        raise ConfigurationError(
            f"{key}={host} is no IPv4 address of this machine ({error.strerror}); give 127.0.0.1, or 0.0.0.0 for all"
        ) from error


def _check_port(given: int | None, host: str, key: str) -> None:
    if given is not None and not port_is_free(given, host):
        raise ConfigurationError(f"{key}={given} is taken on {host}; give another, or null for a free one")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 only if every step was trained."""
    arguments = parse_arguments(argv)
    try:
        config, overrides, directory, start = load_run_config(compose_overrides(arguments))
        remarks = [place_servers(config), set_attention(config.copy())]
        checked = start.for_checks(config) if start else config
        check_config(checked)
        specs = environments_of(config)
        _say(os.path.relpath(directory))
        check_model(checked.actor_rollout_ref.model.path)
        for remark in filter(None, [*remarks, *check_gpu_environment(checked)]):
            _say(remark)
        check_start(checked)
        if specs:
            check_environments(Run(checked, overrides, directory), specs)
        else:
            check_key(config)
        make_folder(directory)
        with RunDir(directory).lock(_say) as lock:
            if start:
                with progress(f"copying the weights of {start.source.path}, step {start.step}", start.log):
                    start.make()
            else:
                forget_start(RunDir(directory))
            prepare_model(config, RunDir(directory).log("policy"))
            for change in prepare_folder(RunDir(directory), config):
                _say(f"resumed with another {change}")
            asyncio.run(launch(config, overrides, directory, specs, lock))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("[bold]stopped[/] the same command resumes the run")
        return 130
    except Exception as error:
        if (told := expected_failure(error)) is None:
            raise
        console.print(f"[bold red]error[/]   {escape(told)}", soft_wrap=True)
        return 1
    files = RunDir(directory)
    console.print(f"[bold]done[/]    {os.path.relpath(files.summary)}, {files.reward_picture.name}")
    console.print_json(files.summary.read_text())
    return 0


def _say(text: str) -> None:
    console.print(f"[bold]run[/]     {escape(text)}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
