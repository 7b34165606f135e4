"""The tokens of rows that a run trained on, with mask, logprob and advantage, from the run's own batches: of one row,
and of those that a page shows, short enough to be embedded in it. Imports torch and verl.

The run must have kept its batches (``api.retention=all``, the default).
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoTokenizer

from recipe.atropos.algorithm.advantages import RunningMoments, compute_advantages
from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.config.models import check_model
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits, VersionLimits
from recipe.atropos.report.run_history import RunHistory
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.sources.numbered import Batch, DataSourceError
from recipe.atropos.trajectory_api import records
from recipe.atropos.utils.secret import read_config_yaml
from recipe.atropos.verl_ext.batch import DataProto


def rows_of_step(
    config: DictConfig, step: int, groups: Batch | None = None, line: Mapping[str, Any] | None = None
) -> DataProto:
    """Return the batch of ``step`` as rows, with advantages computed from these rows alone.

    ``groups``, and the ``line`` of ``metrics.jsonl``, are those of the step, if they were read already. What was too
    old then is left out, whatever the newest ``max_staleness`` is; other settings are those of ``config``. A KL penalty
    in the reward, rejection, and statistics over the whole run are left out, since they need the model and the run.

    Raises:
        ConfigurationError: the model is not where the run had it.
        DataSourceError: there is no such step, or the estimator needs the model.
        TrajectoryStoreError: there is no such batch.
    """
    if "old_log_probs" in ESTIMATORS[config.algorithm.adv_estimator].tensors:
        raise DataSourceError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs the model: nothing to show"
        )
    model = config.actor_rollout_ref.model
    check_model(model.path)  # transformers would ask a hub that cannot be reached again and again
    model_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    limits = RowLimits.from_config(config, 0, model_config.get_text_config().vocab_size)
    if line is None:
        line = {line["step"]: line for line in read_metrics(config.run.dir)}.get(step, {})
    age = line.get("atropos/staleness/max", config.trainer.atropos.get("max_staleness"))  # an old run has none
    versions = VersionLimits(step - 1, None if "atropos/rows_with/unknown_version" in line else age)
    rows, report = groups_to_data_proto(
        groups or batch_of_step(RunDir(config.run.dir), step), limits, versions=versions
    )
    if rows is None:
        raise DataSourceError(f"step {step} holds no row to train on; dropped: {dict(report.dropped)}")
    rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
    compute_advantages(rows, config.algorithm, config.trainer.atropos, RunningMoments())
    return rows


def batch_of_step(run: RunDir, step: int) -> Batch:
    """Return the groups that ``step`` was trained on; raise DataSourceError if the run has no such step, and
    TrajectoryStoreError if its store has no such batch.
    """
    numbers = {line["step"]: line.get("atropos/batch") for line in read_metrics(run.path)}
    if numbers.get(step) is None:
        there = f"it has steps {min(numbers)} to {max(numbers)}" if numbers else "it has none"
        raise DataSourceError(f"step {step}: {run.path} has trained no such step; {there}")
    return records.read(run.trajectories, int(numbers[step]))


def origin_of_advantages(config: DictConfig, rows: DataProto, row: int) -> str:
    """Return whence a row's advantages are: of credit, with its rule, of the environment, or of an estimator."""
    name, others = config.algorithm.adv_estimator, rows.non_tensor_batch
    if others["has_advantages"][row] and config.trainer.atropos.use_advantages and ESTIMATORS[name].token_advantages:
        return "of the environment" if others["credit"][row] is None else f"credit, {others['credit'][row]}"
    return name.removesuffix("_atropos").upper()


def find_row(rows: DataProto, group: int, sequence: int) -> int:
    """Return the index of the row with trained sequence number ``sequence`` (from 0) of ``group``.

    Raises:
        DataSourceError: there is none; the message says which there are.
    """
    of_group = [row for row, uid in enumerate(rows.non_tensor_batch["uid"]) if uid == str(group)]
    if sequence not in range(len(of_group)):
        groups = sorted({int(uid) for uid in rows.non_tensor_batch["uid"]})
        raise DataSourceError(
            f"no sequence {sequence} in group {group}, which has {len(of_group)} trained ones; groups are {groups}"
        )
    return of_group[sequence]


def tokens_of_row(rows: DataProto, row: int, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield a row's tokens in order: position, id, text, trained, logprob and advantage (None if there is none)."""
    tensors = rows.batch
    width = tensors["prompts"].shape[1]
    known = rows.non_tensor_batch["has_log_probs"][row]
    for column in tensors["attention_mask"][row].nonzero().squeeze(-1).tolist():
        at = column - width
        trained = at >= 0 and bool(tensors["response_mask"][row, at])
        token = int(tensors["input_ids"][row, column])
        yield {
            "position": int(tensors["position_ids"][row, column]),
            "id": token,
            "text": tokenizer.decode([token]),
            "trained": trained,
            "logprob": tensors["rollout_log_probs"][row, at].item() if trained and known else None,
            "advantage": tensors["advantages"][row, at].item() if trained else None,
        }


def token_columns(
    history: RunHistory, chosen: Mapping[int, list[dict[str, Any]]], limit: int, of_a_row: int
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the response's tokens of rows recorded in ``rollouts/STEP.jsonl``, by (step, place in ``chosen[step]``).

    Each row has the ``origin`` of its advantages, and parallel columns: ``pieces``, the texts; ``mask``, "1" where
    trained on; ``logprobs`` and ``advantages``, null where there is none. Rows have at most ``of_a_row`` tokens, all of
    them together ``limit``.

    Raises:
        ConfigurationError: the model is not where the run had it.
        TrajectoryStoreError: the batches are not there.
        DataSourceError: the estimator needs the model.
    """
    config = read_config_yaml(history.run.config)  # not checked: an earlier version had other keys
    OmegaConf.resolve(config)
    config.run.dir = str(history.run.path)
    model = config.actor_rollout_ref.model
    model.trust_remote_code = False  # it may be somebody else's run; without a value it would be asked for
    if not Path(model.path).exists() and (history.run.model / "config.json").exists():
        model.path = str(history.run.model)  # the run may have been copied from another machine
    check_model(model.path)
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    failed: DataSourceError | records.TrajectoryStoreError | None = None
    lines = {line["step"]: line for line in history.lines if "atropos/batch" in line}
    left = limit
    for step, rows in chosen.items():
        if step not in lines:
            continue
        try:
            groups = records.read(history.run.trajectories, int(lines[step]["atropos/batch"]))
            recorded = rows_of_step(config, step, groups, lines[step])
        except (DataSourceError, records.TrajectoryStoreError) as error:  # some batches may have been removed
            failed = error
            continue
        unused = dict(enumerate(recorded.non_tensor_batch["uid"]))  # each row is shown once
        width = recorded.batch["prompts"].shape[1]
        for place, row in enumerate(rows):
            of_group = [index for index, uid in unused.items() if uid == row["uid"]]
            index = _same_row(recorded, of_group, row["output"], tokenizer)
            if index is None or left <= 0:
                continue
            del unused[index]
            prompt = int(recorded.batch["attention_mask"][index, :width].sum())
            tokens = [*islice(tokens_of_row(recorded, index, tokenizer), prompt, prompt + min(left, of_a_row))]
            left -= len(tokens)
            found[step, place] = {
                "origin": origin_of_advantages(config, recorded, index),
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
