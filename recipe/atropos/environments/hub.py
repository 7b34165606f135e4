"""Data sets that Hugging Face's ``datasets`` loads: from the hub, or from folders and files."""

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
