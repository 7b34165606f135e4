"""One-shot launcher: ``python -m recipe.atropos.launch_services --preset demo [--steps N] [key=value ...]``

Starts the Trajectory API, the SGLang servers behind a gateway, the trainer and the environments, in the order of their
dependencies; supervises them until the trainer has trained every step; then stops exactly what it started. Guarantees:

- environments start only when the servers hold the trainer's weights; with ``environment.target=null``, the launcher
  starts none and prints how environments join;
- an SGLang server, gateway or environment that ends is restarted up to its limit, and the run continues; with several
  environments, it also continues without an abandoned one. If any other service ends early, the run ends with that
  service's name, its last log lines, and a non-zero exit status;
- the environments themselves measure held-out accuracy, each evaluation on a single weight version;
- however and whenever the launcher ends, no process of the run is left 20 seconds later (see ``utils/guardian.py``);
- a run that trains no step for ``trainer.atropos.step_timeout`` seconds, apart from waits, ends with an error.

``docs/run-folder.md`` lists the files of a run in ``runs/NAME``; the same command resumes an interrupted run.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.text import Text

from recipe.atropos.checkpoint.resumption import prepare_folder
from recipe.atropos.checkpoint.start_from import forget_start
from recipe.atropos.commands.dry_run import show_dry_run
from recipe.atropos.config.compose import add_options, compose_overrides
from recipe.atropos.config.env_specs import fill_warnings
from recipe.atropos.config.models import SMALL_POLICIES, check_model, resolve_model
from recipe.atropos.config.preflight import check_config
from recipe.atropos.config.transports import named_transport
from recipe.atropos.errors import RECOVERABLE, ConfigurationError, Preempted, expected_failure, output_may_be_closed
from recipe.atropos.inference.installed import installed_versions
from recipe.atropos.inference.server import check_flags, check_launch
from recipe.atropos.launcher.detaching import run_detached
from recipe.atropos.launcher.environment_processes import check_environments, check_target
from recipe.atropos.launcher.gpu_environment import check_gpu_environment
from recipe.atropos.launcher.joining import check_key
from recipe.atropos.launcher.launch import launch, signals_handled
from recipe.atropos.launcher.placement import check_environments_placement, place_servers
from recipe.atropos.launcher.run_plan import RunPlan, plan_run
from recipe.atropos.launcher.services import Run, bounded_logs
from recipe.atropos.launcher.sglang import check_ports, plan_servers
from recipe.atropos.run.folder import LAUNCHER, RunDir
from recipe.atropos.terminal.dashboard import shell_command, shown_path
from recipe.atropos.terminal.progress import LiveView, console, progress, say, shows_live
from recipe.atropos.terminal.status import show_summary
from recipe.atropos.utils.process import free_port
from recipe.atropos.verl_ext.attention import set_attention


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.atropos.launch_services",
        description="Start the Trajectory API, SGLang, the trainer and Atropos environments; train; end them all.",
        epilog="key=value: any key of config/trainer.yaml or of verl's ppo_trainer, as for recipe.atropos.main",
    )
    add_options(parser)
    parser.add_argument("--plain", action="store_true", help="print lines instead of the live view")
    parser.add_argument("--detach", action="store_true", help="leave the run going when the terminal closes")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what differs from the default, memory plan and commands; start nothing",
    )
    parser.add_argument("--all", action="store_true", help="with --dry-run: print the whole configuration too")
    return parser.parse_intermixed_args(argv)


def check_start(run: Run) -> None:
    """Check hosts, ports, and SGLang's interpreter and flags, before anything is started.

    Raises:
        ConfigurationError, LaunchError: naming the key.
    """
    config, inference = run.config, run.config.inference
    for host, key in ((config.api.host, "api.host"), (inference.host, "inference.host")):
        try:
            free_port(host)
        except OSError as error:
            raise ConfigurationError(
                f"{key}={host} is no IPv4 address of this machine; give 127.0.0.1, or 0.0.0.0 for all"
            ) from error
    check_ports(config)
    for server in plan_servers(run, lora=False).values():
        check_launch(server)
    transport = named_transport(config)
    if (transport is None or transport.by_rank) and int(server.extra_args.get("dp_size") or 1) > 1:
        raise ConfigurationError(
            f"inference.args.dp_size={server.extra_args['dp_size']} with trainer.atropos.weight_sync.transport="
            f"{config.trainer.atropos.weight_sync.transport}: it cannot push to such a server; give inference.servers "
            "instead, or set transport=disk"
        )
    if inference.args:
        check_flags(server, OmegaConf.to_container(inference.args, resolve=True))


def prepare_model(config: DictConfig, log_path: Path) -> None:
    """Replace a small policy's name, or a path with ``~``, by the model's folder; create a missing small policy.

    ``log_path``: receives the output of that creation.
    """
    path = config.actor_rollout_ref.model.path
    making = progress(f"preparing {path}, which is made once, in a few minutes", log_path)
    with making if path in SMALL_POLICIES else contextlib.nullcontext():
        config.actor_rollout_ref.model.path = resolve_model(path, config.seed, log_path)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 only if every step was trained or, with ``--detach``, if the run has begun."""
    arguments = parse_arguments(argv)
    if not arguments.detach:
        return run_all(arguments)
    return run_detached(lambda leave: run_all(arguments, partial(_detach, leave)))


def _detach(leave: Callable[[Path], None], files: RunDir) -> None:
    """Say how to look at the run and end it, and leave the terminal."""
    say(f"goes on without this terminal; its output is in {shown_path(files.log(LAUNCHER))}")
    for command in ("attach", "status", "logs", "stop"):
        console.print(Text(f"  {shell_command(command, files.path)}"), soft_wrap=True)
    leave(files.log(LAUNCHER))
    console.__init__(highlight=False)  # for the new output, which is no terminal: without color


def run_all(arguments: argparse.Namespace, detach: Callable[[RunDir], None] | None = None) -> int:
    """Check, start, train, end; return the exit status. ``detach`` is called once all checks have passed."""
    console.is_interactive = not arguments.plain
    mode = "auto"
    try:
        with _signals_as_interrupts():
            plan = plan_run(compose_overrides(arguments))
            mode = plan.config.trainer.resume_mode
            run = Run(plan)
            check_run(run, shows_key=detach is None)
            if arguments.dry_run:
                show_dry_run(run, console, arguments.all)
                return 0
            with run.files.lock(say) as run.lock:
                prepare_run(plan)
                if detach is not None:
                    detach(run.files)
                shown = shows_live(console)
                view = LiveView(console, run.files.path, "Ctrl-C stops the run") if shown else contextlib.nullcontext()
                with bounded_logs(run.files.logs), view:
                    asyncio.run(launch(run))
    except (KeyboardInterrupt, asyncio.CancelledError) as stopped:
        otherwise = f" begins anew; without trainer.resume_mode={mode} it goes on from the newest checkpoint"
        say("the same command" + (" resumes the run" if mode == "auto" else otherwise), "stopped")
        return RECOVERABLE if isinstance(stopped, _EarlyPreemption) else 130
    except Exception as error:
        if (message := expected_failure(error)) is None:
            raise
        say(message.replace("\n", "\n        "), "error", "bold red")
        return RECOVERABLE if isinstance(error, Preempted) else 1
    show_summary(run.files, console)
    return 0


def check_run(run: Run, shows_key: bool = True) -> None:
    """Make all checks that need no service, and print what the user should know before the start.

    ``shows_key``: whether what is printed later may still reach a terminal.

    Raises:
        ConfigurationError, LaunchError: naming the value and the fix.
    """
    config, specs = run.config, run.plan.specs
    remarks = [place_servers(config), set_attention(config.copy())]
    check_config(config)
    check_environments_placement(config, specs.values())
    for spec in specs.values():
        check_target(spec)
    say(os.path.relpath(run.files.path))
    check_model(config.actor_rollout_ref.model.path)
    remarks += fill_warnings(specs.values(), config.data.train_batch_size * config.actor_rollout_ref.rollout.n)
    for remark in filter(None, [*remarks, *check_gpu_environment(config)]):
        say(remark)
    check_start(run)
    if specs:
        check_environments(run)
    else:
        check_key(config, shows_key)


def prepare_run(plan: RunPlan) -> None:
    """Prepare the folder, which is locked: the weights to start from, the model, and a resumed run's changes."""
    if plan.start:
        label = f"copying the weights of {plan.start.source.path}, step {plan.start.step}"
        with progress(label, plan.files.log("start")):
            plan.start.make()
        plan.config.actor_rollout_ref.model.path = plan.start.base
    else:
        forget_start(plan.files)
    prepare_model(plan.config, plan.files.log("policy"))
    versions = installed_versions(plan.config.inference.python)
    for change in prepare_folder(plan.files, plan.complete(), versions, plan.given()):
        say(f"resumed with another {change}")


def _signals_as_interrupts() -> contextlib.AbstractContextManager[None]:
    """While the block runs, SIGTERM ends it as Ctrl-C does, and SIGUSR1 as a preemption."""
    handlers = {signal.SIGUSR1: _preempt, signal.SIGTERM: signal.default_int_handler}
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        del handlers[signal.SIGTERM]
    return signals_handled(handlers)


class _EarlyPreemption(KeyboardInterrupt):
    """SIGUSR1 before the services are started."""


def _preempt(*_: object) -> None:
    raise _EarlyPreemption


if __name__ == "__main__":
    with output_may_be_closed():
        sys.exit(main())
