"""Atropos' own GSM8K environment, run from a checkout of Atropos:

    python -m recipe.atropos.environments.gsm8k_upstream serve [--atropos-dir DIR] [--data-dir FOLDER] [its own flags]

(or evaluate, or process). The checkout is DIR, or else one on PYTHONPATH. Its file runs unmodified through the adapter
(``adapter``). With ``--data-dir`` it needs no network: it reads GSM8K not from the hub, but from FOLDER/train.jsonl
and FOLDER/test.jsonl, or FOLDER/main/..., in GSM8K's format.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atroposlib.envs.base import BaseEnv

from recipe.atropos.adapter.cli import adapt, run, wrong_usage
from recipe.atropos.adapter.flags import UsageError, take_flag
from recipe.atropos.environments.word_problems import load_problems

_FILE = Path("environments") / "gsm8k_server.py"
_NAMES = ("gsm8k", "openai/gsm8k")  # on the hub


def with_local_data(folder: str, environment: type[BaseEnv]) -> type[BaseEnv]:
    """Return a subclass whose ``setup()`` loads GSM8K from ``folder``, and every other dataset as usual."""

    class LocalData(environment):
        __doc__ = environment.__doc__

        async def setup(self) -> None:
            with _serving(folder, environment.__module__):
                await super().setup()

    LocalData.__name__, LocalData.__module__ = environment.__name__, environment.__module__
    return LocalData


@contextlib.contextmanager
def _serving(folder: str, module: str) -> Iterator[None]:
    """Make ``load_dataset`` in ``module`` and in ``datasets`` read GSM8K from ``folder`` during the block."""
    import datasets

    original = datasets.load_dataset

    @functools.wraps(original)
    def load_dataset(path: str, name: str | None = None, *args: Any, split: str | None = None, **kwargs: Any) -> Any:
        if path in _NAMES and split in ("train", "test"):
            return datasets.Dataset.from_list(load_problems(folder, split, name))
        return original(path, name, *args, split=split, **kwargs)

    holders = [
        holder for holder in (datasets, sys.modules[module]) if getattr(holder, "load_dataset", None) is original
    ]
    try:
        for holder in holders:
            holder.load_dataset = load_dataset
        yield
    finally:
        for holder in holders:
            holder.load_dataset = original


def _find(checkout: str | None) -> Path:
    """Return the environment's file. Raises UsageError if there is none."""
    if checkout is None:
        on_path = (Path(folder) / _FILE for folder in sys.path)
        if (file := next(filter(Path.is_file, on_path), None)) is None:
            raise UsageError(
                "no checkout of Atropos is on PYTHONPATH: git clone https://github.com/NousResearch/atropos, and name "
                "it there, or as --atropos-dir"
            )
        return file
    file = Path(checkout).expanduser() / _FILE
    if not file.is_file():
        raise UsageError(f"--atropos-dir {checkout}: no checkout of Atropos, it has no {_FILE}")
    return file


def main() -> None:
    arguments = sys.argv[1:]
    try:
        checkout, folder = take_flag(arguments, "--atropos-dir"), take_flag(arguments, "--data-dir")
        file = _find(checkout)
        if folder is not None:
            folder = str(Path(folder).expanduser().resolve())
            for split in ("train", "test"):
                load_problems(folder, split)
    except (UsageError, OSError, ValueError) as error:
        if {"-h", "--help"} & {*arguments}:  # the environment's own flags are in the checkout
            print(f"{__doc__}\n{error}")
            return
        wrong_usage(f"error: {error}")

    def prepare(environment: type[BaseEnv]) -> type[BaseEnv]:
        return adapt(environment if folder is None else with_local_data(folder, environment))

    run(f"{file}:GSM8kEnv", arguments, prepare)


if __name__ == "__main__":
    main()
