"""The run's session server, by which programs sample from the policy; see ``recipe.atropos.sessions``."""

import json
import sys
from functools import partial
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from recipe.atropos.config.derived import request_limits
from recipe.atropos.launcher.services import RestartPolicy, Run
from recipe.atropos.launcher.sglang import Inference, serves
from recipe.atropos.utils.hosts import reachable
from recipe.atropos.utils.process import Service, free_port, wait_until_healthy
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.utils.sockets import reserve

_START_SECONDS = 120.0  # for the tokenizer to load


def start_sessions(run: Run, inference: Inference, api: Service) -> None:
    """Start the session server, without waiting for it, if something uses it."""
    config, command = run.config.inference, session_command(run, inference, api.url)
    if command is None:
        return
    run.reserved["sessions"] = reserve(config.host, urlsplit(run.sessions_url).port, "sessions.port")
    start = partial(run.start, "sessions", command, url=run.sessions_url, **{API_KEY_VARIABLE: run.environments_key})
    run.restart_policies["sessions"] = RestartPolicy(
        start, config.max_restarts, kind="sessions", recovers=lambda status: status < 0
    )
    start()


def session_command(run: Run, inference: Inference, api_url: str) -> list[str] | None:
    """Return the session server's command, None if nothing uses one; its address is ``run.sessions_url`` then."""
    sessions, model, host = run.config.sessions, run.config.actor_rollout_ref.model.path, run.config.inference.host
    used = any(spec.program for spec in run.plan.specs.values()) if sessions.enabled is None else sessions.enabled
    if not used:
        return None
    port = sessions.port or free_port(host)
    run.sessions_url = f"http://{reachable(host)}:{port}"
    credit = None if run.plan.specs else OmegaConf.to_container(run.config.environment).get("credit")  # else is theirs
    options = {
        "host": host,
        "port": port,
        "gateway": inference.gateway,
        "api": api_url,
        "tokenizer": model,
        "model": model,
        "data": run.files.sessions,
        "renderer": sessions.renderer,
        "tool-parser": sessions.tool_parser,
        "thinking": sessions.thinking,
        "credit": credit and json.dumps(credit),
        "timeout": request_limits(run.config).get("timeout"),
    }
    flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [sys.executable, "-m", "recipe.atropos.sessions.server", *flags]


async def sessions_healthy(run: Run) -> None:
    """Wait until the session server answers, if the run has one. Raises ServiceFailed if it does not."""
    if run.sessions_url is not None:
        await wait_until_healthy(
            lambda: run.services["sessions"], partial(serves, run, run.sessions_url), _START_SECONDS
        )
