"""The tables and lists of docs/migration.md, and the presets for real models, made small."""

import re

from helpers import ROOT

PRESETS = ["gsm8k", "gsm8k-lora", "golden"]
SMALL = [  # what a GPU's presets cannot be on two CPU cores: the device, the sizes, and a policy's own prompt
    "inference.dtype=float32",
    "inference.mem_fraction_static=0.3",
    "inference.args.max_total_tokens=16384",
    "actor_rollout_ref.actor.use_torch_compile=false",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=64",
    "environment.args.system_prompt=''",
    "environment.args.eval_size=32",
    "environment.args.max_eval_workers=16",
]


def tables(page):
    """The tables of a page of docs by their heading: rows of cells, without the head."""
    found, heading, rows = {}, "", []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            rows = found.setdefault(heading, [])
            rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return {heading: rows[2:] for heading, rows in found.items()}


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


MIGRATION = tables("migration.md")


def rows_of(heading):
    """Of docs/migration.md: (there, here) of each row."""
    rows = MIGRATION[heading]
    assert rows and all(len(row) == 2 for row in rows), f"{heading}: a malformed row"
    return rows


def listed(heading, lead):
    """The names in code of the paragraph below a heading of docs/migration.md that begins with ``lead``."""
    section = (ROOT / "docs/migration.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    [names] = [code(paragraph) for paragraph in section.split("\n\n") if paragraph.lstrip().startswith(lead)]
    assert names, f"{heading}: {lead} nothing"
    return names
