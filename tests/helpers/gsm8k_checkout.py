"""A checkout of Atropos as far as its GSM8K environment needs it, and problems that the boxed policy answers."""

import json
import shutil

import yaml

from helpers.boxed_policy import ANSWERS
from helpers.environments import gsm8k_server

MODULE = "recipe.atropos.environments.gsm8k_upstream"


def make_checkout(folder):
    (folder / "environments").mkdir(parents=True)
    shutil.copy(gsm8k_server.__file__, folder / "environments" / "gsm8k_server.py")
    return folder


def write_problems(folder, test=6):
    """20 problems to train on, ``test`` held-out ones, as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", 20), ("test", test)):
        rows = [{"question": f"{split} {i}?", "answer": f"so\n#### {ANSWERS[i % 2]}"} for i in range(size)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def write_hub_data(folder, **sizes):
    """The same, as the hub has GSM8K: with a card that names the files."""
    write_problems(folder / "main", **sizes)
    files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    card = {"configs": [{"config_name": "main", "data_files": files}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
