"""Show one trajectory that a run trained on, token by token: ``verl-atropos inspect runs/NAME --step 3 --group 0``

Each token is styled by mask, logprob and advantage. The run must have kept its batches (``api.retention=all``, the
default).
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer

from recipe.atropos.algorithm.advantages import AdvantageConfig, RunningMoments, compute_advantages
from recipe.atropos.config.compose import load_complete
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.recording import read_batch
from recipe.atropos.data.rows import RowLimits, environment_name
from recipe.atropos.data_source import Batch, DataSourceError
from recipe.atropos.errors import one_line_errors
from recipe.atropos.run_dir import RunDir
from recipe.atropos.run_record import read_metrics
from recipe.atropos.verl_ext.batch import DataProto

_UNLIKELY = -3.0  # nats, a probability of 5%; a less likely token is underlined


def rows_of_step(config: DictConfig, step: int) -> DataProto:
    """Return the batch of ``step`` as rows, with advantages computed from these rows alone.

    A KL penalty in the reward, rejection, and statistics over the whole run are left out, since they need the model and
    the run.

    Raises:
        DataSourceError: there is no such batch, or the estimator needs the model.
    """
    atropos = config.trainer.atropos
    if "optimal_token_baseline" in config.algorithm.adv_estimator:
        raise DataSourceError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs the model: nothing to show"
        )
    model = config.actor_rollout_ref.model
    model_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    limits = RowLimits.from_config(config, 0, model_config.get_text_config().vocab_size)
    rows, report = groups_to_data_proto(batch_of_step(RunDir(config.run.dir), step), limits)
    if rows is None:
        raise DataSourceError(f"step {step} holds no row to train on; dropped: {dict(report.dropped)}")
    rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
    settings = AdvantageConfig.from_config(atropos)
    compute_advantages(rows, config.algorithm, settings, RunningMoments())
    return rows


def batch_of_step(run: RunDir, step: int) -> Batch:
    """Return the groups that ``step`` was trained on; raise DataSourceError if the run has no such step or batch."""
    numbers = {line["step"]: line.get("atropos/batch") for line in read_metrics(run.path)}
    if numbers.get(step) is None:
        there = f"it has steps {min(numbers)} to {max(numbers)}" if numbers else "it has none"
        raise DataSourceError(f"step {step}: {run.path} has trained no such step; {there}")
    return read_batch(run.trajectories, int(numbers[step])).groups


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


def style_of(token: dict[str, Any], largest: float) -> Style:
    """Return gray if not trained on, else green or red by the advantage's sign and size; underlined if unlikely."""
    if not token["trained"]:
        return Style(color="bright_black")
    share = min(1.0, abs(token["advantage"]) / largest) if largest else 0.0
    full, empty = int(60 + 140 * share), int(60 - 60 * share)
    color = (60, 60, 60) if share == 0 else (empty, full, empty) if token["advantage"] > 0 else (full, empty, empty)
    unlikely = token["logprob"] is not None and token["logprob"] < _UNLIKELY
    return Style(color="white", bgcolor=f"rgb({color[0]},{color[1]},{color[2]})", underline=unlikely)


def show(run: Path, step: int, group: int, sequence: int, table: bool, console: Console) -> None:
    """Print one trajectory of a step."""
    config = load_complete(RunDir(run).config)
    config.run.dir = str(run)
    rows = rows_of_step(config, step)
    row = find_row(rows, group, sequence)
    model = config.actor_rollout_ref.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    tokens = list(tokens_of_row(rows, row, tokenizer))
    trained = [token for token in tokens if token["trained"]]
    largest = max(abs(token["advantage"]) for token in trained)
    others = rows.non_tensor_batch
    environment = environment_name(others["env_name"][row], others["env_id"][row])
    versions = f"{others['policy_version_min'][row]} to {others['policy_version_max'][row]}"
    console.print(
        f"step {step}, group {group}, sequence {sequence} of {environment}: "
        f"score {rows.batch['token_level_scores'][row].sum():g}, {len(tokens)} tokens, {len(trained)} trained, "
        f"largest advantage {largest:.3g}, weight versions {versions}",
        markup=False,
    )
    legend = Text("grey: not trained on; green / red: advantage above / below 0; underlined: logprob under ")
    console.print(legend.append(f"{_UNLIKELY:g}"))
    console.print(Text.assemble(*((token["text"], style_of(token, largest)) for token in tokens)))
    if table:
        grid = Table("position", "id", "token", "trained", "logprob", "advantage")
        for token in tokens:
            numbers = ["" if token[key] is None else f"{token[key]:.4f}" for key in ("logprob", "advantage")]
            text = Text(repr(token["text"]), style_of(token, largest))
            grid.add_row(str(token["position"]), str(token["id"]), text, "yes" if token["trained"] else "", *numbers)
        console.print(grid)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="verl-atropos inspect", description="Print one trajectory of a step.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--group", type=int, default=0, help="its place in the batch")
    parser.add_argument("--sequence", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="also one line per token")
    given = parser.parse_args(argv)
    with one_line_errors(OmegaConfBaseException, OSError):
        show(given.run, given.step, given.group, given.sequence, given.table, Console(highlight=False))
    return 0
