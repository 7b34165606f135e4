"""Write a checkpoint's model as a folder in Hugging Face format: ``verl-atropos export RUN``."""

import argparse
from pathlib import Path

from recipe.atropos.run.status import find_run

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name below runs/")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint of this step; default: the newest")
    which.add_argument("--best", action="store_true", help="the checkpoint with the best held-out score")
    parser.add_argument(
        "--out", type=Path, help="folder to write; default: RUN/model, RUN/model-STEP for an older step, or RUN/adapter"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they were trained")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter in PEFT's format, not merged")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def main(given: argparse.Namespace) -> int:
    given.run = find_run(given.run).path
    from recipe.atropos.checkpoint.export import export  # imported here: torch takes seconds

    print(export(given))
    return 0
