"""Environments that the launcher does not start: how they join a run, how many have joined, and what the run waits for.

Guarantees:

- the environments' key is printed only to a terminal, never to a file, a pipe or a log; the trainer's key never is;
- each environment that registers is announced, at any time;
- while no batch arrives, a line says why, after one minute and then at intervals of up to ten minutes; the trainer
  waits ``trainer.atropos.join_timeout`` seconds in total.

The Trajectory API keeps the registration of an environment that has left, and gives a new number to one that returns.
The remaining environments fill each batch; a ``min_batch_allocation`` of one that left is waited for a minute.
"""

import json
import shlex
import time
from typing import Any

from omegaconf import DictConfig
from rich.markup import escape

from recipe.atropos.data.sampling import TEMPERATURE_VARIABLE
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launcher.concurrency import groups_in_flight, request_limits
from recipe.atropos.launcher.environment_processes import options
from recipe.atropos.launcher.services import Run, console
from recipe.atropos.run_record import WaitingMark, update_summary
from recipe.atropos.trajectory_api.trajectory_client import TrajectoryApiError
from recipe.atropos.utils.files import read_json
from recipe.atropos.utils.hosts import reachable, reachable_from_others
from recipe.atropos.utils.secret import API_KEY_VARIABLE

_EXAMPLE = "environments/gsm8k_server.py"  # in a checkout of Atropos
_WHICH_KEY = (
    f"with the environments' key as ${API_KEY_VARIABLE}; from the run's own, python -m recipe.atropos.utils.secret "
    "prints it"
)
_FIRST_LOOK, _LONGEST_LOOK = 2.0, 30.0  # s between polls; one that finds nobody new logs a traceback in the API
_FIRST_REPORT, _LONGEST_SILENCE = 60.0, 600.0  # s without a batch before the reason is printed
_FOREVER = 10**9  # steps; in effect, no limit


def check_key(config: DictConfig, shows_key: bool = True) -> None:
    """Raise ConfigurationError if the run would generate its own key and has no terminal on which to show it.

    ``shows_key``: False if the run leaves its terminal before it could.
    """
    if not config.inference.api_key and not (shows_key and console.file.isatty()):
        why = "this output is not one" if shows_key else "--detach leaves it"
        raise ConfigurationError(
            f"inference.api_key is not set, and a run shows its own key only on a terminal ({why}), so no environment "
            f"could join; set {API_KEY_VARIABLE} before the start"
        )


def join_settings(config: DictConfig, api_url: str, gateway: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ``env`` and ``openai`` settings that an environment needs to join, except for the key."""
    model = config.actor_rollout_ref.model.path
    env = {
        "rollout_server_url": api_url,
        "tokenizer_name": model,
        "group_size": config.environment.group_size,
        "max_token_length": config.data.max_prompt_length + config.data.max_response_length,
        "max_num_workers": groups_in_flight(config),
        "total_steps": _FOREVER,
        "use_wandb": False,
    }
    openai = {"base_url": f"{gateway}/v1", "model_name": model, "server_type": "sglang", "health_check": False}
    return env, openai | request_limits(config)


def stock_command(env: dict[str, Any], openai: dict[str, Any], key: str) -> str:
    """Return a bash command for an environment without the adapter, which needs a file that lists several servers."""
    server = {**openai, "api_key": key}
    settings = f"{{env: {_yaml(env)}, openai: [&policy {_yaml(server)}, *policy]}}"
    return f"python {_EXAMPLE} serve --config /dev/stdin <<< {shlex.quote(settings)}"


def _yaml(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)


def adapted_command(config: DictConfig, env: dict[str, Any], openai: dict[str, Any], key: str) -> str:
    """Return a shell command for an environment through this recipe's adapter; ``key`` is quoted for the shell."""
    temperature = config.actor_rollout_ref.rollout.temperature
    variables = [f"{API_KEY_VARIABLE}={key}"]
    variables += [] if temperature == 1 else [f"{TEMPERATURE_VARIABLE}={temperature:g}"]
    flags = {f"env.{name}": value for name, value in env.items()}
    flags |= {f"openai.{name}": value for name, value in openai.items()}
    command = [
        "python",
        "-m",
        "recipe.atropos.utils.env_adapter",
        "serve",
        "--env",
        _EXAMPLE,
        *options(flags),
    ]
    return " ".join([*variables, shlex.join(command)])


def how_to_join(config: DictConfig, api_url: str, gateway: str, key: str | None, guarded: bool = True) -> str:
    """Return the commands for another terminal, also on another machine if the services listen on all interfaces.

    ``key``: the environments'; None if it must not be shown: commands read it from the shell. ``guarded``: whether
    the Trajectory API asks for it too.
    """
    env, openai = join_settings(config, api_url, gateway)
    shell_key = f'"${API_KEY_VARIABLE}"' if key is None else shlex.quote(key)
    lines = [
        "any environment of Atropos, through this recipe's adapter (weight versions, exact tokens, pacing):",
        adapted_command(config, env, openai, shell_key),
    ]
    if key is None:
        lines.insert(0, _WHICH_KEY)
    if config.trainer.atropos.max_staleness is not None:
        return "\n".join(
            [*lines, f"(max_staleness={config.trainer.atropos.max_staleness} refuses what comes without the adapter)"]
        )
    secret = "KEY" if key is None else key
    if guarded:
        env = {**env, "rollout_server_url": f"{api_url}/{secret}"}
    stock = stock_command(env, openai, secret)
    if key is None:  # the shell expands no variable inside single quotes
        stock = stock.replace("KEY", f"'{shell_key}'")
    return "\n".join([*lines, "or by itself, from a checkout of Atropos:", stock])


class Joining:
    """Counterpart of ``Environments`` for environments that join; see the module. Call ``look_after`` periodically."""

    def __init__(self, run: Run, api_url: str, gateway: str):
        self._run, self._api_url, self._gateway = run, api_url, gateway
        self._waiting = WaitingMark(run.files)
        # Registrations, in earlier starts too: the API keeps them with its store.
        self.number: int = read_json(run.files.summary, {}).get("environments_joined", 0)
        self._look, self._next_look = _FIRST_LOOK, 0.0
        self._step: int | None = None  # the API's: the number of batches it has formed
        self._since = self._reported = time.monotonic()
        self._silence = _FIRST_REPORT

    def start(self) -> None:
        config, given = self._run.config, bool(self._run.config.inference.api_key)
        key = self._run.environments_key if console.file.isatty() else None
        api_url = for_others(self._api_url, config.api.host)
        gateway = for_others(self._gateway, config.inference.host)
        console.print(f"[bold]join[/]    {escape(how_to_join(config, api_url, gateway, key))}", soft_wrap=True)
        console.print(
            "[bold]eval[/]    this run starts no environment, so it evaluates nothing: one that joins does so by "
            "itself, every --env.steps_per_eval steps, and reports where it logs",
            soft_wrap=True,
        )
        if key and not given:
            console.print("[bold]join[/]    the key is this start's alone; set ATROPOS_API_KEY to keep one")

    async def look_after(self) -> None:
        """Announce environments that have joined, and print why no batch arrives."""
        now = time.monotonic()
        if now < self._next_look:
            return
        try:
            async with self._run.api_client(self._api_url) as api:
                state = await api.diagnose()
        except TrajectoryApiError:
            return  # the launcher restarts an API that has ended
        for number in sorted(line["number"] for line in state["environments"] if "number" in line):
            if number >= self.number:
                console.print(f"[bold]join[/]    an environment has joined, as number {number}")
                self.number, self._look = number + 1, _FIRST_LOOK
        self._next_look, self._look = now + self._look, min(1.5 * self._look, _LONGEST_LOOK)
        if state["batches"]["last"] != self._step or not self._waiting.is_fresh():
            self._step, self._since, self._reported, self._silence = state["batches"]["last"], now, now, _FIRST_REPORT
        elif now - self._reported >= self._silence:
            self._reported, self._silence = now, min(2 * self._silence, _LONGEST_SILENCE)
            self._report_why(state["why"])

    def _report_why(self, why: str) -> None:
        limit = self._run.config.trainer.atropos.join_timeout
        waited = time.monotonic() - self._since
        console.print(
            f"[bold yellow]join[/]    no batch for {waited:.0f} s: {escape(why)} (trainer.atropos.join_timeout="
            f"{limit:g} s)",
            soft_wrap=True,
        )

    def stop(self) -> None:
        """Record how many joined. None is stopped: without the Trajectory API, they end or wait for another run."""
        update_summary(self._run.directory, {"environments_joined": self.number})

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return an empty summary: their counts are unknown."""
        return {}


def for_others(url: str, host: str) -> str:
    """Return ``url`` with the address for other machines if the service listens on all interfaces."""
    return url.replace(f"//{reachable(host)}:", f"//{reachable_from_others(host)}:")
