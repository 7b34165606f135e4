"""The tokens of the rows that a page shows, short enough to be embedded in it. Imports torch and verl."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from recipe.atropos.report.run_history import History
from recipe.atropos.report.token_view import rows_of_step, tokens_of_row
from recipe.atropos.sources.numbered import DataSourceError
from recipe.atropos.sources.recorded import read_batch
from recipe.atropos.utils.secret import read_config_yaml


def token_columns(
    history: History, chosen: Mapping[int, list[dict[str, Any]]], limit: int, of_a_row: int
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the response's tokens of rows recorded in ``rollouts/STEP.jsonl``, by (step, place in ``chosen[step]``).

    Each row has parallel columns: ``pieces``, the texts; ``mask``, "1" where trained on; ``logprobs`` and
    ``advantages``, null where there is none. Rows have at most ``of_a_row`` tokens, all of them together ``limit``.

    Raises:
        DataSourceError: the batches are not there, or the estimator needs the model.
    """
    config = read_config_yaml(history.run.config)  # not checked: an earlier version had other keys
    OmegaConf.resolve(config)
    config.run.dir = str(history.run.path)
    model = config.actor_rollout_ref.model
    if not Path(model.path).exists() and (history.run.model / "config.json").exists():
        model.path = str(history.run.model)  # the run may have been copied from another machine
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    failed: DataSourceError | None = None
    numbers = {line["step"]: int(line["atropos/batch"]) for line in history.lines if "atropos/batch" in line}
    left = limit
    for step, rows in chosen.items():
        if step not in numbers:
            continue
        try:
            groups = read_batch(history.run.trajectories, numbers[step]).groups
            recorded = rows_of_step(config, step, groups)
        except DataSourceError as error:  # some batches may have been removed
            failed = error
            continue
        places = defaultdict(list)
        for index, uid in enumerate(recorded.non_tensor_batch["uid"]):
            places[uid].append(index)
        width = recorded.batch["prompts"].shape[1]
        for place, row in enumerate(rows):
            index = _same_row(recorded, places[row["uid"]], row["output"], tokenizer)
            if index is None or left <= 0:
                continue
            places[row["uid"]].remove(index)  # each row is shown once
            tokens = list(tokens_of_row(recorded, index, tokenizer))
            prompt = int(recorded.batch["attention_mask"][index, :width].sum())
            tokens = tokens[prompt:][: min(left, of_a_row)]
            left -= len(tokens)
            found[step, place] = {
                "pieces": [token["text"] for token in tokens],
                "mask": "".join("1" if token["trained"] else "0" for token in tokens),
                "logprobs": [_short(token["logprob"]) for token in tokens],
                "advantages": [_short(token["advantage"]) for token in tokens],
            }
    if failed is not None and not found:
        raise failed
    return found


def _same_row(recorded: Any, indices: list[int], output: str, tokenizer: Any) -> int | None:
    """Return the first of a group's rows that has this response; None if there is none."""
    responses = recorded.batch["responses"]
    attended = recorded.batch["attention_mask"][:, -responses.shape[1] :].bool()
    return next((index for index in indices if tokenizer.decode(responses[index][attended[index]]) == output), None)


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
