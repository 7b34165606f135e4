"""Secret settings: which they are, and how they are kept out of files and command lines.

A secret is a setting with the name of one, or anything but a boolean inside such a setting. It reaches a service in
its environment, or in a file of mode 0600: other users of the machine can read command lines. Configurations that are
saved or sent to trackers contain none. A reference to another place, ``${oc.env:NAME}``, is not a secret.

A run has two keys: the trainer's, which opens everything, and the environments', which samples and posts. The second is
made from the first, never the reverse, so that one key starts a run. ``python -m recipe.atropos.utils.secret`` prints
the environments' key of ``$ATROPOS_API_KEY``.
"""

import functools
import hashlib
import hmac
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.files import read_yaml
from recipe.atropos.utils.private_process import SECRET_FLAGS

API_KEY_VARIABLE = "ATROPOS_API_KEY"
API_KEY = f"${{oc.env:{API_KEY_VARIABLE},null}}"  # what files have instead of the key
HIDDEN = "***"
COMPLETE = b"# The complete configuration of a run, without secrets, as its launcher wrote it.\n"
_TOKENS = "access|api|auth|bearer|github|gitlab|hf|hub|hugging_?face|judge|openai|refresh|session"  # not pad, stop, ...
_NAME = re.compile(
    r"(^|[_.])((access|anthropic|api|openai|private|secret)_?keys?|secrets?|passwords?|passphrase|passwd"
    rf"|authorization|bearer|({_TOKENS})_token)$|(^|\.)token$",
    re.IGNORECASE,
)
_REFERENCE = re.compile(r"\$\{(oc\.env:\w+(,\s*null)?|[\w.]+)\}")


def environments_key(key: str) -> str:
    """Return the environments' key of a run, given the trainer's."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"environments").hexdigest()


def whose_key(given: str, key: str) -> Literal["trainer", "environments"] | None:
    """Return whose key a client gave, None if it is neither; ``key`` is the trainer's."""
    word = given.encode(errors="surrogateescape")  # bytes of a header that are not UTF-8 arrive as surrogates
    if hmac.compare_digest(word, key.encode()):
        return "trainer"
    return "environments" if hmac.compare_digest(word, environments_key(key).encode()) else None


def is_secret(name: str) -> bool:
    """Return whether a setting of this name holds a secret: ``api_key``, ``openai.api_key``, ``hf_token``, ..."""
    return _NAME.search(name.replace("-", "_")) is not None


def without_secrets(settings: Any) -> Any:
    """Return a copy of nested mappings and lists with ``***`` for every secret that is set."""
    return _with_secrets_as(lambda *_: HIDDEN, settings)


def shown_value(key: str, value: Any) -> Any:
    """Return the value of a setting for a message: as ``without_secrets``."""
    return without_secrets({key: value})[key]


def hidden_settings(settings: Any) -> list[list[Any]]:
    """Return what ``without_secrets`` hides, as [keys and indices, value] each; ``restore`` puts it back."""
    found: list[list[Any]] = []
    _with_secrets_as(lambda *place_and_value: found.append(list(place_and_value)), settings)
    return found


def check_not_hidden(settings: Any) -> None:
    """Raise ConfigurationError if a secret is the placeholder of a file that was written without secrets."""
    for place, value in hidden_settings(settings):
        if value == HIDDEN:
            raise ConfigurationError(
                f"{'.'.join(map(str, place))}={HIDDEN}: the file that this is from holds no secrets; give its value, "
                "or ${oc.env:NAME}, as an argument"
            )


def _with_secrets_as(
    change: Callable[[list[str | int], Any], Any],
    settings: Any,
    secret: bool = False,
    place: tuple[str | int, ...] = (),
) -> Any:
    """Return a copy in which ``change``, given keys and indices, replaces each secret; ``secret``: all are."""
    if isinstance(settings, Mapping):
        return {
            key: _with_secrets_as(change, value, secret or is_secret(str(key)), (*place, key))
            for key, value in settings.items()
        }
    if isinstance(settings, list | tuple | ListConfig):
        return [_with_secrets_as(change, value, secret, (*place, index)) for index, value in enumerate(settings)]
    return change(list(place), settings) if secret and _is_set(settings) else settings


def _is_set(value: Any) -> bool:
    return value not in (None, "") and not isinstance(value, bool) and not _REFERENCE.fullmatch(str(value))


def public_config(config: DictConfig) -> dict[str, Any]:
    """Return the resolved configuration without secrets, for a tracker."""
    return without_secrets(OmegaConf.to_container(config, resolve=True))


def escaped(values: Any) -> Any:
    """Return a copy of nested mappings and lists with each ``${`` escaped: OmegaConf resolves it to ``values``."""
    if isinstance(values, dict):
        return {key: escaped(value) for key, value in values.items()}
    if isinstance(values, list):
        return [escaped(value) for value in values]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", values) if isinstance(values, str) else values


def config_yaml(config: DictConfig) -> bytes:
    """Return the complete configuration without secrets; when loaded, the key comes from $ATROPOS_API_KEY."""
    public = escaped(public_config(config))
    public["inference"]["api_key"] = API_KEY
    return COMPLETE + OmegaConf.to_yaml(OmegaConf.create(public)).encode()


def restore(settings: Any, hidden: Iterable[Sequence[Any]]) -> None:
    """Put hidden settings back into nested mappings and lists."""
    for (*path, last), value in hidden:
        functools.reduce(getitem, path, settings)[last] = value


def read_config_yaml(path: str | Path) -> DictConfig:
    """Read the result of ``config_yaml``. Raises as ``read_yaml``."""
    return OmegaConf.create(read_yaml(path))


def split_secret_flags(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags for the command line, and the secret ones."""
    public = {name: value for name, value in flags.items() if not hidden_settings({name: value})}
    return public, {name: value for name, value in flags.items() if name not in public}


def secret_variables(flags: list[str]) -> dict[str, str]:
    """Return the environment of a process that reads ``flags`` with ``private_process.take_secret_flags``."""
    return {SECRET_FLAGS: json.dumps(flags)} if flags else {}


if __name__ == "__main__":
    if not (given := os.environ.get(API_KEY_VARIABLE)):
        sys.exit(f"error: ${API_KEY_VARIABLE} is not set")
    print(environments_key(given))
