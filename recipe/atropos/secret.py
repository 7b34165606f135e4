"""Which settings are secrets, and what is written of them.

A secret reaches a service in its environment, or in a file of mode 0600: other users of the machine can read command
lines. Configurations that are kept, and those that trackers get, hold none.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.utils.private_process import SECRET_FLAGS

API_KEY_VARIABLE = "ATROPOS_API_KEY"
HIDDEN = "***"
_NAME = re.compile(r"(^|[_.-])(api_?key|secret|password|passwd|(auth|access|hf|bearer)_token)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret: ``api_key``, ``openai.api_key``, ``hf_token``, ..."""
    return _NAME.search(name.replace("-", "_")) is not None


def without_secrets(settings: Any) -> Any:
    """A copy of nested mappings and lists with ``***`` for every secret that is set."""
    if isinstance(settings, Mapping):
        return {
            key: HIDDEN if value and is_secret(str(key)) and isinstance(value, str) else without_secrets(value)
            for key, value in settings.items()
        }
    return [without_secrets(value) for value in settings] if isinstance(settings, list) else settings


def public_config(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration without secrets, for a tracker."""
    return without_secrets(OmegaConf.to_container(config, resolve=True))


def config_yaml(config: DictConfig) -> bytes:
    """The complete configuration without secrets; loaded again, the run's key comes from $ATROPOS_API_KEY."""
    public = public_config(config)
    public["inference"]["api_key"] = f"${{oc.env:{API_KEY_VARIABLE},null}}"
    public["actor_rollout_ref"]["rollout"]["checkpoint_engine"]["engine_kwargs"]["atropos"]["api_key"] = (
        "${inference.api_key}"
    )
    return OmegaConf.to_yaml(OmegaConf.create(public)).encode()


def without_secret_overrides(overrides: list[str]) -> list[str]:
    """Hydra overrides for another process's command line: those that name a secret are left out."""
    return [override for override in overrides if not is_secret(override.partition("=")[0])]


def split_secret_flags(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those for the command line, and the others."""
    public = {name: value for name, value in flags.items() if not is_secret(name)}
    return public, {name: value for name, value in flags.items() if name not in public}


def secret_variables(flags: list[str]) -> dict[str, str]:
    """The environment of a process that takes ``flags`` with ``private_process.take_secret_flags``."""
    return {SECRET_FLAGS: json.dumps(flags)} if flags else {}
