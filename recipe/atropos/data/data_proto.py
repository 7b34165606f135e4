"""Convert scored groups of the Trajectory API to verl's ``DataProto``.

Guarantees, which the tests check against a slow but obvious reference implementation:

- Every trained token is in ``responses`` with ``response_mask`` 1, along with the logprob, advantage and teacher top-k
  that the environment sent for that exact position. Environment tokens between turns are there too, with mask 0.
- Padding rows are fully masked and have unique ``uid`` values, so they do not affect any group statistic.

``scored_group`` says what a group is, ``reading`` cuts it into rows; this module converts the ragged rows to tensors.

Shapes: B rows, P and R the longest prompt and response of the batch, S = P + R, K the teacher's top-k.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.rows import NO_TEACHER, ConversionReport, Row, RowLimits, VersionLimits
from recipe.atropos.data.scored_group import Group
from recipe.atropos.verl_ext.batch import DataProto

_NOTHING = np.empty(0)


class _Padding(Row):
    """A row of one padding token in its prompt, and no response."""

    def __post_init__(self) -> None:
        """Nothing of it is trained on."""


def _pad(arrays: Sequence[np.ndarray], width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a (B, width) tensor of ragged rows, with 0 after each."""
    padded = torch.zeros(len(arrays), width, dtype=dtype)
    for row, values in zip(padded.numpy(), arrays, strict=True):
        row[: len(values)] = values
    return padded


def rows_to_data_proto(rows: Sequence[Row | None], limits: RowLimits, multiple_of: int = 1) -> DataProto:
    """Convert rows to the tensors that verl's actor and trainer read; None is a fully masked padding row. At least one
    is real.

    Padding rows are appended until the number of rows is a multiple of ``multiple_of``.

    Returns a DataProto with these tensors (int64 unless stated otherwise):

    - ``input_ids`` (B, S), of which ``prompts`` (B, P), left-padded, and ``responses`` (B, R), right-padded, are views;
      ``attention_mask``, ``position_ids`` (B, S), 0 in the padding; ``response_mask`` (B, R);
    - ``token_level_scores`` (B, R) float32: the score on the last trained token;
    - ``atropos_advantages`` (B, R) float32, 0 where masked or not sent (``has_advantages`` says which rows have them);
    - ``rollout_log_probs`` (B, R) float32 if any row has them, 0 where masked (``has_log_probs`` says which rows do);
    - ``ref_log_prob`` (B, R) float32 if every row has it;
    - ``teacher_ids`` (B, S, K) and ``teacher_logprobs`` (B, S, K) float32 if any row has them, aligned with the logits
      as verl's engine expects: position t holds the teacher's prediction for t + 1; NO_TEACHER where there is none;

    and with these (B,) arrays: objects ``uid``, ``env_id``, ``env_name``, ``policy_version_min``,
    ``policy_version_max``, ``credit`` and ``sampling`` (None if unknown), ``dropped`` (a tuple of each ``DroppedRow``
    of the row's group) and ``trajectory``; float ``raw_score`` (the environment's own score, equal to the score unless
    a reward bridge shaped it); bool ``is_padding``, ``has_log_probs``, ``has_advantages``, ``has_teacher``,
    ``zero_advantage``.
    """
    real = [row for row in rows if row is not None]
    filled = [
        _Padding(np.array([limits.pad_token_id]), _NOTHING, _NOTHING, 0.0, f"padding-{i}") if row is None else row
        for i, row in enumerate([*rows, *[None] * (-len(rows) % multiple_of)])
    ]

    def per_token(name: str) -> torch.Tensor:
        values = [_NOTHING if value is None else value for value in _column(filled, name)]
        return _pad(values, width, torch.float32)

    width = max(len(row.response) for row in filled)
    prompt_width = max(len(row.prompt) for row in filled)
    input_ids = torch.full((len(filled), prompt_width + width), limits.pad_token_id)
    attention_mask, position_ids = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    scores = torch.zeros(len(filled), width)
    arrays = [tensor.numpy() for tensor in (input_ids, attention_mask, position_ids, scores)]
    for row, ids, attended, positions, score in zip(filled, *arrays, strict=True):
        begin, end = prompt_width - len(row.prompt), prompt_width + len(row.response)
        ids[begin:end] = np.concatenate([row.prompt, row.response])
        attended[begin:end] = 1
        positions[begin:end] = np.arange(end - begin)
        score[np.flatnonzero(row.mask)[-1:]] = row.score

    tensors = {
        "prompts": input_ids[:, :prompt_width],
        "responses": input_ids[:, prompt_width:],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "response_mask": _pad(_column(filled, "mask"), width, torch.int64),
        "token_level_scores": scores,
        "atropos_advantages": per_token("advantages"),
    }
    if any(row.log_probs is not None for row in real):
        tensors["rollout_log_probs"] = per_token("log_probs")
    if all(row.ref_log_probs is not None for row in real):
        tensors["ref_log_prob"] = per_token("ref_log_probs")
    tensors |= _teacher_tensors(filled, prompt_width, prompt_width + width)
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors=_non_tensors(filled),
        meta_info={"global_token_num": attention_mask.sum(dim=-1).tolist()},
    )


def _column(rows: Sequence[Row], name: str) -> list[Any]:
    return [getattr(row, name) for row in rows]


def _teacher_tensors(rows: Sequence[Row], prompt_width: int, length: int) -> dict[str, torch.Tensor]:
    """Return ``teacher_ids`` and ``teacher_logprobs`` (B, length, K); an empty dict if no row has a teacher."""
    top_k = max((row.teacher_ids.shape[1] for row in rows if row.teacher_ids is not None), default=0)
    if not top_k:
        return {}
    teacher_ids = np.zeros((len(rows), length, top_k), dtype=np.int64)
    teacher_logprobs = np.full(teacher_ids.shape, NO_TEACHER)
    for i, row in enumerate(rows):
        if row.teacher_ids is not None:
            length, k = row.teacher_ids.shape
            predictors = slice(prompt_width - 1, prompt_width - 1 + length)
            teacher_ids[i, predictors, :k] = row.teacher_ids
            # Unused slots have no mass, but the loss takes their ids as part of the top-k: repeat one that is in it.
            teacher_ids[i, predictors, k:] = row.teacher_ids[:, :1]
            teacher_logprobs[i, predictors, :k] = row.teacher_log_probs
    return {"teacher_ids": torch.from_numpy(teacher_ids), "teacher_logprobs": torch.from_numpy(teacher_logprobs)}


def _objects(values: Sequence[Any]) -> np.ndarray:
    return np.fromiter(values, dtype=object, count=len(values))  # np.array would unpack tuples


def _non_tensors(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Return the per-row values, one (B,) array per name."""
    objects = ("uid", "env_id", "env_name", "sampling", "credit", "dropped", "trajectory")
    return {
        **{name: _objects(_column(rows, name)) for name in objects},
        "policy_version_min": _objects([row.versions[0] for row in rows]),
        "policy_version_max": _objects([row.versions[1] for row in rows]),
        "raw_score": np.array([row.score if row.raw_score is None else row.raw_score for row in rows]),
        "is_padding": np.array([isinstance(row, _Padding) for row in rows]),
        "has_log_probs": np.array([row.log_probs is not None for row in rows]),
        "has_advantages": np.array([row.advantages is not None for row in rows]),
        "has_teacher": np.array([row.teacher_ids is not None for row in rows]),
        "zero_advantage": np.array(_column(rows, "zero_advantage")),
        "sequence": np.array(_column(rows, "sequence")),
    }


def groups_to_data_proto(
    groups: Sequence[Group], limits: RowLimits, multiple_of: int = 1, versions: VersionLimits | None = None
) -> tuple[DataProto | None, ConversionReport]:
    """Convert one batch of the Trajectory API to a DataProto, and report what happened to its sequences.

    ``versions``, if given, drops rows that ``VersionLimits.refuses``. The DataProto is None if no row is left to train
    on. That is not an error; the report counts the reasons.
    """
    rows, report = read_groups(groups, limits, versions)
    if not rows:
        return None, report
    batch = rows_to_data_proto(rows, limits, multiple_of)
    report.padding_rows = len(batch) - len(rows)
    return batch, report


def rows_where(batch: DataProto, chosen: np.ndarray) -> DataProto:
    """Return the rows that are ``chosen``, (B,) bool, as a batch of its own; no tensor is copied if all are."""
    if not chosen.all():
        batch = batch.select_idxs(np.flatnonzero(chosen))
    return DataProto(batch.batch.copy(), dict(batch.non_tensor_batch), dict(batch.meta_info))


def real_rows(batch: DataProto) -> DataProto:
    """Return the batch without its padding rows."""
    rows = rows_where(batch, ~batch.non_tensor_batch["is_padding"])
    rows.meta_info["global_token_num"] = rows.batch["attention_mask"].sum(dim=-1).tolist()
    return rows
