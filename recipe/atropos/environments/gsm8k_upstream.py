"""Atropos' own GSM8K environment, run from a checkout of Atropos:

    python -m recipe.atropos.environments.gsm8k_upstream serve [--atropos-dir DIR] [--data-dir FOLDER] [its own flags]

(or evaluate, or process). The checkout is DIR, or else one on PYTHONPATH. Its file runs unmodified through the adapter
(``adapter``). With ``--data-dir`` it needs no network: it reads GSM8K not from the hub, but from FOLDER/train.jsonl
and FOLDER/test.jsonl, or FOLDER/main/..., in GSM8K's format.
"""

import functools
import sys
from pathlib import Path
from typing import Any

from recipe.atropos.adapter.cli import run, wrong_usage
from recipe.atropos.adapter.flags import UsageError, take_flag
from recipe.atropos.environments.word_problems import load_problems

_FILE = Path("environments") / "gsm8k_server.py"
_NAMES = ("gsm8k", "openai/gsm8k")  # on the hub


def read_gsm8k_from(folder: str) -> None:
    """From now on, let ``datasets.load_dataset`` read GSM8K from ``folder``, and every other dataset as usual.

    Call it before the environment is imported, which takes the function from ``datasets``.
    """
    import datasets

    original = datasets.load_dataset

    @functools.wraps(original)
    def load_dataset(path: str, name: str | None = None, *args: Any, split: str | None = None, **kwargs: Any) -> Any:
        if path in _NAMES and split in ("train", "test"):
            return datasets.Dataset.from_list(load_problems(folder, split, name))
        return original(path, name, *args, split=split, **kwargs)

    datasets.load_dataset = load_dataset


def _find(checkout: str | None) -> Path:
    """Return the environment's file. Raises UsageError if there is none."""
    folders = sys.path if checkout is None else [Path(checkout).expanduser()]
    if file := next(filter(Path.is_file, (Path(folder) / _FILE for folder in folders)), None):
        return file
    if checkout is not None:
        raise UsageError(f"--atropos-dir {checkout}: no checkout of Atropos, it has no {_FILE}")
    raise UsageError(
        "no checkout of Atropos is on PYTHONPATH: git clone https://github.com/NousResearch/atropos, and name it "
        "there, or as --atropos-dir"
    )


def main() -> None:
    arguments = sys.argv[1:]
    try:
        checkout, folder = take_flag(arguments, "--atropos-dir"), take_flag(arguments, "--data-dir")
        file = _find(checkout)
        if folder is not None:
            folder = str(Path(folder).expanduser().resolve())
            for split in ("train", "test"):
                load_problems(folder, split)
            read_gsm8k_from(folder)
    except (UsageError, OSError, ValueError) as error:
        if {"-h", "--help"} & {*arguments}:  # the environment's own flags are in the checkout
            print(f"{__doc__}\n{error}")
            return
        wrong_usage(f"error: {error}")
    run(f"{file}:GSM8kEnv", arguments)


if __name__ == "__main__":
    main()
