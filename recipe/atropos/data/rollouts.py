"""Write the trained rollouts in readable form: ``rollouts/STEP.jsonl``."""

from pathlib import Path
from typing import Any

import torch

from recipe.atropos.utils.files import rewrite_lines
from recipe.atropos.verl_ext.batch import DataProto

_COLUMNS = ("raw_score", "uid", "env_id", "env_name", "policy_version_min", "policy_version_max")


def write_rollouts(folder: Path, step: int, rows: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """Write sampled text, scores and versions of the rows to ``folder/STEP.jsonl``, a line each; return the lines.

    Raises:
        DiskFull: nothing is changed.
    """
    width, attended = rows.batch["prompts"].shape[1], rows.batch["attention_mask"].bool()

    def texts(tokens: torch.Tensor, kept: torch.Tensor) -> list[str]:
        return [tokenizer.decode(row[keep]) for row, keep in zip(tokens, kept, strict=True)]

    columns = {
        "input": texts(rows.batch["prompts"], attended[:, :width]),
        "output": texts(rows.batch["responses"], attended[:, width:]),
        "score": rows.batch["token_level_scores"].sum(-1).tolist(),
        "step": [step] * len(rows),
        "response_tokens": attended[:, width:].sum(-1).tolist(),
        **{key: rows.non_tensor_batch[key].tolist() for key in _COLUMNS},
    }
    folder.mkdir(parents=True, exist_ok=True)
    lines = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rewrite_lines(folder / f"{step}.jsonl", lines)
    return lines
