"""The model that a name means: a folder, a name on the Hugging Face hub, or a small policy that is made locally."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.utils.process import run_command

MODEL_KEY = "actor_rollout_ref.model.path"
SMALL_POLICIES = (
    "small-policy",
    "small-policy-calculator",
    "small-policy-code",
    "small-policy-terse",
    "small-policy-two-tasks",
)
_HUB_SECONDS = 10.0


def looks_local(path: str) -> bool:
    """Return whether a model or dataset name is taken for a path: hub names are NAME or ORG/NAME."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or os.path.exists(os.path.expanduser(path))


def check_model(path: str) -> None:
    """Check that the model exists: its folder, or on the hub (queried for at most 10 s), or in the hub's cache.

    Raises:
        ConfigurationError: naming what to give instead.
    """
    if path in SMALL_POLICIES or config_file(path):
        return
    if looks_local(path):
        raise ConfigurationError(
            f"{MODEL_KEY}={path}: no model there (no config.json); give a folder in Hugging Face format, or a hub name"
        )
    if path.startswith(SMALL_POLICIES[0]):
        raise ConfigurationError(f"{MODEL_KEY}={path}: no such small policy; choose one of {', '.join(SMALL_POLICIES)}")
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=_HUB_SECONDS)
    except GatedRepoError as error:
        raise ConfigurationError(
            f"{MODEL_KEY}={path}: gated; accept its license on the hub, and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigurationError(
            f"{MODEL_KEY}={path}: the hub has no such model, or not for you (HF_TOKEN); correct the name, or give a "
            "folder"
        ) from error
    except EntryNotFoundError as error:
        raise ConfigurationError(
            f"{MODEL_KEY}={path}: it has no config.json, so it is no model of transformers"
        ) from error
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        raise ConfigurationError(
            f"{MODEL_KEY}={path}: no such folder, not in the hub's cache, and the hub cannot be reached "
            f"({type(error).__name__}); give the folder of a model, or a name that the hub can resolve"
        ) from error


def config_file(path: str) -> Path | None:
    """Return ``config.json`` of a model's folder, or of the hub's cache; None if it is in neither."""
    if looks_local(path):
        file = Path(path).expanduser() / "config.json"
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


@contextlib.contextmanager
def needs_no_trust(path: str | Path, trust_remote_code: bool) -> Iterator[None]:
    """Raise ConfigurationError if the block would run code of the model in ``path``, and that is not trusted."""
    try:
        yield
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise ConfigurationError(
            f"{path} is a model with code of its own, which would be run; give --trust-remote-code if you trust it"
        ) from error


def model_settings(file: Path) -> dict[str, Any]:
    """Return the content of a model's ``config.json``.

    Raises:
        ConfigurationError: it is damaged, as by a download that was interrupted.
    """
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ConfigurationError(
            f"{MODEL_KEY}: {file} cannot be read ({error}): download or save the model again"
        ) from error


def resolve_model(path: str, seed: int, log_path: Path | None = None) -> str:
    """Return the model's folder or hub name; make a small policy for ``seed`` if one is requested and missing.

    ``log_path``: for the output of making it.

    Raises:
        AtroposError: with the last lines of the process that makes it.
    """
    if path not in SMALL_POLICIES:
        folder = os.path.expanduser(path)
        return os.path.abspath(folder) if os.path.isdir(folder) else folder  # environments may run in another folder
    # In a separate process: torch and transformers cost seconds and memory that a launcher does not need.
    command = [sys.executable, "-m", "recipe.atropos.demo.policies", path, "--seed", str(seed)]
    status, printed = run_command("policy", command, log_path=log_path)
    folders = [line for line in printed.splitlines() if line and Path(line).is_dir()]
    if status != 0 or not folders:
        raise AtroposError(f"{MODEL_KEY}={path} could not be made:\n{printed.strip()[-2000:]}")
    return folders[-1]
