"""What a run would do, without starting it: ``launch_services --dry-run``.

It prints the values that differ from the default, on request the whole configuration, the memory plan of GPUs, and the
command of each service with the variables that it gets. Secrets are shown as ``***``. Ports that are not
configured are chosen at each start. What a start finds in the run's folder is checked, and not changed.
"""

import os
import shlex
from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from recipe.atropos.checkpoint.resumption import check_folder
from recipe.atropos.config.compose import leaves, load_config
from recipe.atropos.config.models import MODEL_KEY, SMALL_POLICIES, config_file
from recipe.atropos.demo.small_policy import policy_folder
from recipe.atropos.errors import AtroposError
from recipe.atropos.inference.server import sglang_command
from recipe.atropos.launcher.environment_processes import environment_variables, serve_command
from recipe.atropos.launcher.services import Run
from recipe.atropos.launcher.sglang import command_of_gateway, plan_inference
from recipe.atropos.launcher.startup import api_command, session_command, trainer_command
from recipe.atropos.utils.private_process import SECRET_FLAGS
from recipe.atropos.utils.secret import API_KEY_VARIABLE, HIDDEN, public_config, without_secrets

_NO_MODEL = "none"  # the default configuration names no model


def show_dry_run(run: Run, console: Console, whole: bool = False) -> None:
    """Print what ``run``, whose other checks have passed, would be, and start nothing. ``whole``: every value.

    Raises:
        ConfigurationError: as ``resumption.check_folder``.
    """
    to_be_made = _find_policy(run.config)
    if run.config.run.resume_from or to_be_made:  # then the model is not there yet; ``Start.of`` has checked the first
        run.files.check_format()
    else:
        check_folder(run.files, run.config)
    shown, default = (
        public_config(run.config),
        without_secrets(public_config(load_config([f"{MODEL_KEY}={_NO_MODEL}"]))),
    )
    usual = dict(leaves(default))
    changed = [(key, value) for key, value in leaves(shown) if value != usual.get(key, _NO_MODEL)]
    rest = "" if whole else "; --all: the rest"
    _title(console, f"configuration ({len(changed)} values differ from the default{rest})")
    for key, value in changed:
        before = _inline(usual[key]) if key in usual else _NO_MODEL
        console.print(Text(f"{key}: {_inline(value)}  # default: {before}", "bold green"), soft_wrap=True)
    if whole:
        _title(console, "the whole configuration")
        console.print(Text(yaml.safe_dump(shown, sort_keys=False, width=10**6)), soft_wrap=True)
    _title(console, "memory of each GPU")
    if run.config.trainer.device == "cpu":
        console.print("the trainer runs on a CPU; verl-atropos plan plans GPUs")
    else:
        from recipe.atropos.commands.plan import plan_memory, show  # imported here: torch takes seconds

        try:
            show(plan_memory(run.config), console)
        except AtroposError as error:
            console.print(Text(f"no plan: {error}"), soft_wrap=True)
    for name, (command, variables) in service_commands(run).items():
        _title(console, name)
        words = [*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), shlex.join(command)]
        console.print(Text(" ".join(words)), soft_wrap=True)
    if to_be_made:
        console.print(Text(f"\n{to_be_made} is made at the start, and then its folder stands in the commands"))
    console.print("\n[bold]nothing was started[/]")


def _find_policy(config: DictConfig) -> str | None:
    """Replace a small policy's name by its folder, as a start does, or return the name if it is not made yet."""
    name = config.actor_rollout_ref.model.path
    if name not in SMALL_POLICIES:
        return None
    from recipe.atropos.demo.policies import RECIPES  # imported here: few runs have such a policy

    folder, made = policy_folder(config.seed, RECIPES[name])
    if not made:
        return name
    config.actor_rollout_ref.model.path = str(folder)
    return None


def _title(console: Console, text: str) -> None:
    console.print(Text(f"\n# {text}", "bold cyan"))


def _inline(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def service_commands(run: Run) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return the command of each service, in the order of their start, and the variables that it gets."""
    key = {API_KEY_VARIABLE: HIDDEN}
    api, api_url = api_command(run)
    found: dict[str, tuple[list[str], dict[str, str]]] = {"api": (api, key)}
    # The flags of an adapter depend on the model's layers.
    inference = plan_inference(run, lora=config_file(run.config.actor_rollout_ref.model.path) is not None)
    for name, launch in inference.servers.items():
        command, variables = sglang_command(launch)
        found[name] = command, _shown(variables)
    found["gateway"] = command_of_gateway(run, inference), key
    if (sessions := session_command(run, inference, api_url)) is not None:
        found["sessions"] = sessions, key
    found["trainer"] = trainer_command(run), key
    for spec in run.plan.specs.values():
        for replica, service in enumerate(spec.services):
            command = serve_command(run, spec, api_url, inference.gateway, replica)
            found[service] = command, _shown(environment_variables(run, spec))
    return found


def _shown(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without secrets; what stands in $PATH already is left to it."""
    shown = {name: HIDDEN if name in (API_KEY_VARIABLE, SECRET_FLAGS) else value for name, value in variables.items()}
    if "PATH" in shown:
        shown["PATH"] = shown["PATH"].replace(os.environ.get("PATH", os.defpath), "$PATH")
    return shown
