"""Scored groups of the Trajectory API -> verl's ``DataProto``.

The promises, which the tests hold against a slow and obvious reference:

- Every trained token stands in ``responses`` under ``response_mask`` 1, with the logprob and the advantage that the
  environment sent for that very position. Environment tokens between turns stand there too, under mask 0.
- For one sequence, ``first`` is the first position whose mask is not -100: what comes before is the prompt.
- A group that cannot be understood is refused whole, named and counted; a row that cannot be trained on is dropped and
  counted. Nothing is repaired by guessing, and nothing leaves without a count.
- Padding rows are fully masked and have a ``uid`` of their own, so that no group statistic sees them.

Shapes: B rows, P the longest prompt, R the longest response of the batch, S = P + R.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from verl import DataProto
from verl.utils.model import compute_position_id_with_mask

logger = logging.getLogger(__name__)

IGNORED = -100  # the mask of a token that is not trained on (atroposlib, as in torch's cross-entropy)

Group = Mapping[str, Any]  # one ScoredData of the API: parallel lists over sequences


class RefusedGroup(ValueError):
    """A group that breaks the format; ``reason`` is its name in the counts."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class RowLimits:
    """How rows are cut and filled. Lengths in tokens.

    ``overlong`` is what happens to a response longer than ``max_response_length``: "truncate" keeps its beginning,
    "drop" leaves the row out, "error" raises. A longer prompt keeps its end. ``vocab_size``, where given, refuses
    groups that were made with another tokenizer.
    """

    max_prompt_length: int
    max_response_length: int
    pad_token_id: int
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.overlong not in ("truncate", "drop", "error"):
            raise ValueError(f"trainer.atropos.overlong={self.overlong!r}: choose truncate, drop or error")
        if self.max_prompt_length < 1 or self.max_response_length < 1:
            raise ValueError(f"lengths must be positive: {self.max_prompt_length=}, {self.max_response_length=}")


@dataclass
class ConversionReport:
    """What became of a batch's sequences.

    ``dropped`` counts the sequences that are not in the batch, by reason; ``events`` the rows that are in it, altered
    or lacking something: prompt_truncated, response_truncated, no_logprobs, zero_advantage. ``messages`` are for
    people.
    """

    received: int = 0
    rows: int = 0
    padding_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """As trainer metrics under ``atropos/``."""
        counts = {"received": self.received, "rows": self.rows, "padding_rows": self.padding_rows}
        counts |= {f"dropped/{reason}": n for reason, n in self.dropped.items()}
        counts |= {f"rows_with/{event}": n for event, n in self.events.items()}
        return {f"atropos/{key}": float(n) for key, n in counts.items()}


@dataclass
class Row:
    """One sequence, split at ``first``. Every array over the response has the same length R_i >= 1.

    ``log_probs`` is None where a trained token lacks a valid one; ``advantages`` and ``ref_log_probs`` are None where
    the environment sent none. ``versions`` is (oldest, newest) weight version among the trained tokens, None if
    unknown.
    """

    prompt: np.ndarray  # (P_i,) int64
    response: np.ndarray  # (R_i,) int64
    mask: np.ndarray  # (R_i,) bool, True where trained on
    score: float
    uid: str
    env_id: int | None = None
    env_name: str | None = None
    versions: tuple[int | None, int | None] = (None, None)
    log_probs: np.ndarray | None = None  # (R_i,) float32
    advantages: np.ndarray | None = None  # (R_i,) float32
    ref_log_probs: np.ndarray | None = None  # (R_i,) float32
    zero_advantage: bool = False

    def __post_init__(self) -> None:
        assert len(self.prompt) >= 1 and self.mask.any(), "a row has a prompt and at least one trained token"
        for name in ("mask", "log_probs", "advantages", "ref_log_probs"):
            values = getattr(self, name)
            assert values is None or len(values) == len(self.response), name


def group_name(group: Group, index: int) -> str:
    """How messages call a group: its place in the batch and its environment."""
    name = (group.get("group_overrides") or {}).get("env_name")
    env_id = group.get("env_id")
    return f"group {index} of env {name or ('unknown' if env_id is None else env_id)}"


def _array(group: Group, key: str, row: int, where: str, dtype: type, length: int) -> np.ndarray:
    """Row ``row`` of a parallel field as an array of ``length``; refuses what is not a flat list of numbers."""
    try:
        values = np.asarray(group[key][row], dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedGroup("malformed", f"{where}: {key}[{row}] is not a list of numbers ({error})") from error
    if values.shape != (length,):
        raise RefusedGroup(
            "unequal_lengths", f"{where}: {key}[{row}] has length {len(values)}, tokens[{row}] has {length}"
        )
    return values


def _require_finite(values: np.ndarray, key: str, row: int, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise RefusedGroup(
            f"nonfinite_{key}", f"{where}: {key}[{row}] is {values[bad[0]]} at position {bad[0]}; it must be finite"
        )


def read_group(group: Group, index: int, limits: RowLimits, report: ConversionReport) -> list[Row]:
    """The rows of one group, cut to ``limits``; fills ``report.dropped`` and ``report.events``.

    Raises:
        RefusedGroup: lengths differ within the group, or a score or advantage is not finite, or a token is outside the
            vocabulary. The message names the group, the environment, the sequence and the position.
        ValueError: a response is too long and ``limits.overlong`` is "error".
    """
    where = group_name(group, index)
    tokens, scores = group.get("tokens") or [], group.get("scores")
    if not tokens:
        raise RefusedGroup("empty_group", f"{where}: no sequences")
    if not isinstance(scores, Sequence) or len(scores) != len(tokens):
        found = len(scores) if isinstance(scores, Sequence) else scores
        raise RefusedGroup("unequal_lengths", f"{where}: {found} scores for {len(tokens)} sequences")
    optional = {}
    for key in ("masks", "inference_logprobs", "advantages", "ref_logprobs", "overrides"):
        values = group.get(key)
        if values and len(values) != len(tokens):
            raise RefusedGroup("unequal_lengths", f"{where}: {len(values)} {key} for {len(tokens)} sequences")
        optional[key] = bool(values)
    if not optional["masks"]:
        raise RefusedGroup("unequal_lengths", f"{where}: no masks for {len(tokens)} sequences")

    overrides = group.get("group_overrides") or {}
    rows: list[Row] = []
    dropped, events = Counter(), Counter()
    for i, score in enumerate(scores):
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise RefusedGroup("nonfinite_scores", f"{where}: score {i} is {score}; it must be a finite number")
        length = len(tokens[i])
        ids = _array(group, "tokens", i, where, np.int64, length)
        outside = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size)) if limits.vocab_size else np.empty(0, int)
        if outside.size:
            raise RefusedGroup(
                "foreign_tokens",
                f"{where}: token {ids[outside[0]]} at position {outside[0]} of sequence {i} is outside the policy's "
                f"vocabulary of {limits.vocab_size}; start the environment with the policy's tokenizer",
            )
        trained = _array(group, "masks", i, where, np.int64, length) != IGNORED
        arrays: dict[str, np.ndarray | None] = {}
        for key in ("inference_logprobs", "advantages", "ref_logprobs"):
            present = optional[key] and group[key][i]
            arrays[key] = _array(group, key, i, where, np.float32, length) if present else None
        if arrays["advantages"] is not None:
            _require_finite(arrays["advantages"], "advantages", i, where)

        if not trained.any():
            dropped["no_trained_token"] += 1
            continue
        first = int(trained.argmax())
        if first == 0:  # its first token has no context to be predicted from
            dropped["no_prompt"] += 1
            continue
        end = length
        if length - first > limits.max_response_length:
            if limits.overlong == "error":
                raise ValueError(
                    f"{where}: response {i} has {length - first} tokens, data.max_response_length is "
                    f"{limits.max_response_length}; raise it, or set trainer.atropos.overlong to truncate or drop"
                )
            if limits.overlong == "drop":
                dropped["overlong_response"] += 1
                continue
            events["response_truncated"] += 1
            end = first + limits.max_response_length
        if first > limits.max_prompt_length:
            events["prompt_truncated"] += 1

        mask = trained[first:end]
        log_probs = _masked(arrays["inference_logprobs"], first, end, mask)
        if log_probs is not None and not (np.isfinite(log_probs) & (log_probs <= 0)).all():
            log_probs = None
        if log_probs is None:
            events["no_logprobs"] += 1
        ref_log_probs = _masked(arrays["ref_logprobs"], first, end, mask)
        if ref_log_probs is not None:
            _require_finite(ref_log_probs, "ref_logprobs", i, where)
        row_overrides = (group["overrides"][i] or {}) if optional["overrides"] else {}
        zero = bool(overrides.get("set_advantage_to_zero") or row_overrides.get("set_advantage_to_zero"))
        events["zero_advantage"] += zero
        rows.append(
            Row(
                prompt=ids[max(0, first - limits.max_prompt_length) : first],
                response=ids[first:end],
                mask=mask,
                score=float(score),
                uid=str(index),
                env_id=group.get("env_id"),
                env_name=overrides.get("env_name"),
                versions=_versions(overrides, i),
                log_probs=log_probs,
                advantages=_masked(arrays["advantages"], first, end, mask),
                ref_log_probs=ref_log_probs,
                zero_advantage=zero,
            )
        )
    report.dropped += dropped
    report.events += events
    return rows


def _masked(values: np.ndarray | None, first: int, end: int, mask: np.ndarray) -> np.ndarray | None:
    """The response part, 0 where not trained on (there stand sentinels such as 1.0)."""
    return None if values is None else np.where(mask, values[first:end], np.float32(0))


def _versions(overrides: Mapping[str, Any], row: int) -> tuple[int | None, int | None]:
    """(oldest, newest) weight version of a row from ``group_overrides.policy_version_{min,max}``, lists over rows."""

    def version(key: str) -> int | None:
        values = overrides.get(key)
        return (
            int(values[row]) if isinstance(values, Sequence) and len(values) > row and values[row] is not None else None
        )

    return version("policy_version_min"), version("policy_version_max")


def read_groups(groups: Sequence[Group], limits: RowLimits) -> tuple[list[Row], ConversionReport]:
    """All rows of a batch in the API's order. A refused group is logged with its name and counted by sequences."""
    report = ConversionReport()
    rows: list[Row] = []
    for index, group in enumerate(groups):
        size = len(group.get("tokens") or [])
        report.received += size
        try:
            rows.extend(read_group(group, index, limits, report))
        except RefusedGroup as refused:
            report.dropped[refused.reason] += max(1, size)
            report.messages.append(str(refused))
            logger.error("refused %s", refused)
    report.rows = len(rows)
    return rows, report


def _pad(arrays: Sequence[np.ndarray], width: int, dtype: np.dtype | type, fill: Any = 0, left: bool = False):
    """(B, width) tensor of ragged rows, padded on one side."""
    out = np.full((len(arrays), width), fill, dtype=dtype)
    for row, values in zip(out, arrays, strict=True):
        if left:
            row[width - len(values) :] = values
        else:
            row[: len(values)] = values
    return torch.from_numpy(out)


def rows_to_data_proto(rows: Sequence[Row], limits: RowLimits, multiple_of: int = 1) -> DataProto:
    """Rows, filled up with masked padding rows to a multiple of ``multiple_of``, as verl's actor and trainer read them.

    Returns a DataProto with the tensors (int64 unless said otherwise)

    - ``prompts`` (B, P) left-padded; ``responses`` (B, R) right-padded; ``input_ids``, ``attention_mask``,
      ``position_ids`` (B, S); ``response_mask`` (B, R);
    - ``token_level_scores`` (B, R) float32: the score on the last trained token;
    - ``atropos_advantages`` (B, R) float32, 0 where masked or not sent (``has_advantages`` says which);
    - ``rollout_log_probs`` (B, R) float32 if any row has them, 0 where masked (``has_log_probs`` says which rows do);
    - ``ref_log_prob`` (B, R) float32 if every row has it;

    and the object arrays ``uid``, ``env_id``, ``env_name``, ``policy_version_min``, ``policy_version_max`` (None where
    unknown) and the bool arrays ``is_padding``, ``has_log_probs``, ``has_advantages``, ``zero_advantage``, all (B,).

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("a batch without a row to train on; see the counts of dropped sequences")
    n_pad = -len(rows) % multiple_of
    pad = np.array([limits.pad_token_id])
    empty = np.empty(0)

    def column(name: str, padding: Any = None) -> list[Any]:
        return [getattr(row, name) for row in rows] + [padding] * n_pad

    def per_token(name: str) -> torch.Tensor:
        values = [empty if value is None else value for value in column(name, empty)]
        return _pad(values, width, np.float32)

    width = max(len(row.response) for row in rows)
    prompt_width = max(len(row.prompt) for row in rows)
    prompt_lengths = np.array([len(prompt) for prompt in column("prompt", pad)])
    response_lengths = np.array([len(response) for response in column("response", empty)])
    prompts = _pad(column("prompt", pad), prompt_width, np.int64, limits.pad_token_id, left=True)
    responses = _pad(column("response", empty), width, np.int64, limits.pad_token_id)
    attention_mask = torch.from_numpy(
        np.concatenate(
            [
                np.arange(prompt_width) >= prompt_width - prompt_lengths[:, None],
                np.arange(width) < response_lengths[:, None],
            ],
            axis=1,
        ).astype(np.int64)
    )
    scores = np.zeros((len(rows) + n_pad, width), dtype=np.float32)
    for row, values in zip(scores, rows, strict=False):
        row[np.flatnonzero(values.mask)[-1]] = values.score

    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
        "response_mask": _pad(column("mask", empty), width, np.int64),
        "token_level_scores": torch.from_numpy(scores),
        "atropos_advantages": per_token("advantages"),
    }
    if any(row.log_probs is not None for row in rows):
        tensors["rollout_log_probs"] = per_token("log_probs")
    if all(row.ref_log_probs is not None for row in rows):
        tensors["ref_log_prob"] = per_token("ref_log_probs")

    def objects(values: Sequence[Any]) -> np.ndarray:
        out = np.empty(len(values), dtype=object)
        out[:] = values
        return out

    padding_uids = [f"padding-{i}" for i in range(n_pad)]
    non_tensors = {
        "uid": objects([row.uid for row in rows] + padding_uids),
        "env_id": objects(column("env_id")),
        "env_name": objects(column("env_name")),
        "policy_version_min": objects([row.versions[0] for row in rows] + [None] * n_pad),
        "policy_version_max": objects([row.versions[1] for row in rows] + [None] * n_pad),
        "is_padding": np.arange(len(rows) + n_pad) >= len(rows),
        "has_log_probs": np.array([values is not None for values in column("log_probs")]),
        "has_advantages": np.array([values is not None for values in column("advantages")]),
        "zero_advantage": np.array(column("zero_advantage", False)),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def groups_to_data_proto(
    groups: Sequence[Group], limits: RowLimits, multiple_of: int = 1
) -> tuple[DataProto | None, ConversionReport]:
    """One batch of the Trajectory API as a DataProto and the report of what became of its sequences.

    The DataProto is None where no row is left to train on: a named, counted event for the caller, not an error.
    """
    rows, report = read_groups(groups, limits)
    if not rows:
        return None, report
    batch = rows_to_data_proto(rows, limits, multiple_of)
    report.padding_rows = len(batch) - len(rows)
    return batch, report
