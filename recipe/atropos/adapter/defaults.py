"""Default values for an environment, where neither its flags nor its ``--config`` file give a value.

Guarantees, the first three for servers over plain http, as in a run; each one applied is printed as a line, and so is a
server that does not answer:

- the server type is "sglang" if the environment has "openai", whose replies have no tokens;
- the key is ``$ATROPOS_API_KEY`` if the environment has none, or "x";
- model and tokenizer are those that the server, or the gateway in front of it, reports, whatever the environment's own
  defaults; the request waits for the trainer's first push. If no server answers, the defaults stay;
- wandb is disabled if nobody has logged in to it, since it would end the environment;
- an environment serves until it is stopped, not for BaseEnv's 1,000 steps: a longer run would wait for it in vain.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

from recipe.atropos.adapter.recorded_calls import client_of
from recipe.atropos.config.env_specs import NO_STEP_LIMIT
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.utils.wandb_login import wandb_login

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 900.0  # longer than the gateway holds a request while no server has the trainer's weights


class WrongKey(EnvironmentFailure):
    """The server requires an API key, and rejects the given one; or none is known, nor a server."""


def complete(
    env: BaseEnvConfig,
    servers: list[APIServerConfig],
    given: Mapping[str, Any],
    env_given: Mapping[str, Any],
    serves: bool = True,
) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
    """Return an environment's defaults, completed with what its servers report; explicit values are unchanged.

    ``given``, ``env_given``: the servers' and the environment's values from flags and file. ``serves``: it will serve.

    Raises:
        WrongKey: a server rejects the key, names the variable to set; or it has no address.
    """
    uses_wandb = env.use_wandb or not serves  # atroposlib turns it on to evaluate and to process, whatever the default
    if uses_wandb and "use_wandb" not in env_given:
        mode, host, logged_in = wandb_login()
        if mode == "online" and not logged_in:
            _say(f"nobody has logged in to {host} here (--env.use_wandb=false)")
            env = env.model_copy(update={"use_wandb": False})
            if not serves:
                os.environ["WANDB_MODE"] = "disabled"
    if serves and "total_steps" not in env_given:
        _say(f"it serves until it is stopped (--env.total_steps={NO_STEP_LIMIT})")
        env = env.model_copy(update={"total_steps": NO_STEP_LIMIT})
    completed = [_complete(server, given) for server in servers]
    first = completed[0].model_copy(update=dict(given))
    names = {"model_name", "tokenizer_name"} - {*given, *(["tokenizer_name"] if "tokenizer_name" in env_given else [])}
    url = first.base_url or ""
    if not names or not _is_plain(url):
        return env, completed
    if (found := served_model(url, first.api_key or None)) is None:
        _say(f"no server answers at {url}: the policy stays {first.model_name}, and its tokenizer {env.tokenizer_name}")
        return env, completed
    model, tokenizer = found
    if "model_name" in names and first.model_name != model:
        _say(f"the policy is {model}, by {url} (--openai.model_name)")
        completed = [server.model_copy(update={"model_name": model}) for server in completed]
    if "tokenizer_name" not in env_given and env.tokenizer_name != tokenizer:
        _say(f"its tokenizer is {tokenizer} (--env.tokenizer_name)")
        env = env.model_copy(update={"tokenizer_name": tokenizer})
    return env, completed


def _complete(server: APIServerConfig, given: Mapping[str, Any]) -> APIServerConfig:
    url = given.get("base_url", server.base_url) or ""
    changes: dict[str, Any] = {}
    if _is_plain(url) and "server_type" not in given and server.server_type == "openai":
        _say(f"{url} is assumed to be an SGLang server (--openai.server_type=sglang)")
        changes["server_type"] = "sglang"
    key, has_key = os.environ.get(API_KEY_VARIABLE), "api_key" in given or server.api_key not in (None, "", "x")
    if _is_plain(url) and not has_key:
        changes["api_key"] = key or "x"
        if key:
            _say(f"the key for {url} is that of ${API_KEY_VARIABLE} (--openai.api_key)")
    elif not (url or has_key or "OPENAI_API_KEY" in os.environ):
        raise WrongKey("where the policy is served is not known: give --openai.base_url=http://HOST:PORT/v1")
    return server.model_copy(update=changes)


def _is_plain(url: str) -> bool:
    return urlsplit(url).scheme == "http"


def served_model(base_url: str, api_key: str | None) -> tuple[str, str] | None:
    """Return model and tokenizer, names or folders, of the SGLang server at ``base_url``; None if unavailable.

    Raises:
        WrongKey: the server answers 401 or 403.
    """
    parts = urlsplit(base_url)
    try:
        socket.create_connection((parts.hostname, parts.port or 80), timeout=_CONNECT_SECONDS).close()
        server = APIServerConfig(base_url=base_url, api_key=api_key)
        info = asyncio.run(client_of(server, _ANSWER_SECONDS).model_info())
    except InferenceError as error:
        if error.status in (401, 403):
            raise WrongKey(
                f"{error.url}/model_info answers HTTP {error.status}: give the run's key as {API_KEY_VARIABLE}, or as "
                f"--openai.api_key. A launcher that is given none makes its own: set {API_KEY_VARIABLE} before "
                "both starts, or start the launcher with environment.target=null, and it shows how to join"
            ) from None
        return None
    except (OSError, ValueError):
        return None
    model = info.get("model_path") if isinstance(info, dict) else None  # else another program's page
    return model and (model, info.get("tokenizer_path") or model)


def _say(text: str) -> None:
    print(f"adapter: {text}", file=sys.stderr, flush=True)
