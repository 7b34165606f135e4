"""The commands by which an environment that nobody starts here joins a run."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from recipe.atropos.config.derived import groups_in_flight, request_limits
from recipe.atropos.config.env_specs import NO_STEP_LIMIT, options
from recipe.atropos.data.sampling import TEMPERATURE_VARIABLE
from recipe.atropos.utils.hosts import reachable, reachable_from_others
from recipe.atropos.utils.secret import API_KEY_VARIABLE

_EXAMPLE = "environments/gsm8k_server.py"  # in a checkout of Atropos
_WHICH_KEY = (
    f"with the environments' key as ${API_KEY_VARIABLE}; from the run's own, python -m recipe.atropos.utils.secret "
    "prints it"
)


def join_settings(config: DictConfig, api_url: str, gateway: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ``env`` and ``openai`` settings that an environment needs to join, except for the key."""
    env, openai = policy_settings(config, api_url, gateway)
    return {**env, "group_size": config.environment.group_size, "max_num_workers": groups_in_flight(config)}, openai


def policy_settings(config: DictConfig, api_url: str, gateway: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ``env`` and ``openai`` settings of every environment that samples from the run's policy."""
    model = config.actor_rollout_ref.model.path
    env = {
        "rollout_server_url": api_url,
        "tokenizer_name": model,
        "max_token_length": config.data.max_prompt_length + config.data.max_response_length,
        "total_steps": NO_STEP_LIMIT,
        "use_wandb": False,
    }
    openai = {"base_url": f"{gateway}/v1", "model_name": model, "server_type": "sglang", "health_check": False}
    return env, openai | request_limits(config)


def adapter_flags(env: Mapping[str, Any], openai: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an environment as flags of the adapter."""
    flags = {f"env.{name}": value for name, value in env.items()}
    return flags | {f"openai.{name}": value for name, value in openai.items()}


def stock_command(env: dict[str, Any], openai: dict[str, Any], key: str) -> str:
    """Return a bash command for an environment without the adapter, which needs a file that lists several servers, and
    drops what has all of the trainer's tokens.
    """
    shorter, server = {"max_token_length": env["max_token_length"] - 1}, {**openai, "api_key": key}
    yaml_env, yaml_server = (json.dumps(values, ensure_ascii=False) for values in ({**env, **shorter}, server))
    settings = f"{{env: {yaml_env}, openai: [&policy {yaml_server}, *policy]}}"
    return f"python {_EXAMPLE} serve --config /dev/stdin <<< {shlex.quote(settings)}"


def adapted_command(config: DictConfig, env: dict[str, Any], openai: dict[str, Any], key: str) -> str:
    """Return a shell command for an environment through this recipe's adapter; ``key`` is quoted for the shell."""
    temperature = config.actor_rollout_ref.rollout.temperature
    variables = [f"{API_KEY_VARIABLE}={key}"]
    variables += [] if temperature == 1 else [f"{TEMPERATURE_VARIABLE}={temperature:g}"]
    program = ["python", "-m", "recipe.atropos.utils.env_adapter", "serve", "--env", _EXAMPLE]
    return " ".join([*variables, shlex.join([*program, *options(adapter_flags(env, openai))])])


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


def for_others(url: str, host: str) -> str:
    """Return ``url`` with the address for other machines if the service listens on all interfaces."""
    return url.replace(f"//{reachable(host)}:", f"//{reachable_from_others(host)}:")
