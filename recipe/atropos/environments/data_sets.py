"""Data sets: a .jsonl file, or what Hugging Face's ``datasets`` loads from the hub, from folders and from files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe.atropos.errors import ConfigurationError


def load_dataset(option: str, name: str, fix: str, *args: Any, shown: str | None = None, **kwargs: Any) -> Any:
    """Return ``datasets.load_dataset(name, ...)``; ``shown``: what the option says, if that is not the name.

    Raises:
        ConfigurationError: there is no such data set, or it cannot be reached; has ``option``, the cause and ``fix``.
    """
    import datasets

    try:
        return datasets.load_dataset(name, *args, **kwargs)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = " ".join(str(error).split())
        raise ConfigurationError(f"--env.{option}={shown or name}: cannot be loaded: {cause}; {fix}") from error


def read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each with its place, "FILE line NUMBER".

    Raises:
        OSError, ValueError: it cannot be read, or a line is no JSON; names it.
    """
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if line.strip():
            where = f"{file} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
            yield where, row
