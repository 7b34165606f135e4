"""Read scored groups of the Trajectory API into rows: one sequence each, validated and within the length limit.

Guarantees:

- ``first`` is the first position of a sequence whose mask is not -100; the tokens before it are the prompt.
- A prompt is never cut, so every token is trained in the context in which it was sampled, or not at all.
- A malformed group is refused as a whole, named and counted; a row that cannot be trained on is dropped and counted.
  Nothing is repaired by guessing, and nothing is left out without being counted.
- Each row of a group carries the scores of the rows dropped from the group, since a baseline covers all scored rows.

A missing or positive logprob (environments write 1.0 for a missing one) only leaves its row without logprobs. A NaN
or infinite logprob comes from a broken engine, so its group is refused, even if another logprob of the row is
missing.

Shapes: R_i response tokens of row i, K the teacher's top-k.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipe.atropos.data.fields import array_of, require_finite, teacher_top_k
from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import (
    IGNORED,
    ConversionReport,
    DroppedRow,
    Group,
    Row,
    RowLimits,
    VersionLimits,
    group_name,
)
from recipe.atropos.data.sampling import Sampled, SamplingParams
from recipe.atropos.errors import ConfigurationError

logger = logging.getLogger(__name__)

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_PER_SEQUENCE = ("masks", "inference_logprobs", "advantages", "ref_logprobs", "overrides")
_TEACHER = ("distill_token_ids", "distill_logprobs")

_FIXES = {
    "stale": "an environment keeps to it through the adapter",
    "unknown_version": "run the environment through the adapter, or set it to null to train on samples of any age",
    "not_pushed": "a server was restarted, or never got weights; put the servers behind inference.gateway",
    "future_version": "an abandoned policy sampled them: the trainer went back to a checkpoint",
}


@dataclass(frozen=True)
class _Checked:
    """A group whose parallel lists have equal lengths; ``present`` names those besides ``tokens`` and ``scores``."""

    values: Group
    where: str  # its name in messages
    overrides: Mapping[str, Any]
    limits: RowLimits
    present: frozenset[str]


def read_group(
    group: Group, index: int, limits: RowLimits, report: ConversionReport, versions: VersionLimits | None = None
) -> list[Row]:
    """Return the rows of one group, within ``limits``; update ``report.dropped`` and ``report.events``.

    Raises:
        RefusedGroup: a field is malformed; lengths differ within the group; a score, an advantage or the logprob of a
            trained token is not finite; a token is outside the vocabulary; the teacher's top-k is ragged or not a
            distribution. The message names the group, the environment, the sequence and the position.
        ConfigurationError: a row is too long and ``limits.overlong`` is "error".
    """
    checked = _check_lists(group, group_name(group, index), limits)
    rows: list[Row] = []
    dropped: list[DroppedRow] = []
    events: Counter[str] = Counter()
    for i in range(len(group["tokens"])):
        found = _read_row(checked, i, str(index), versions, events)
        if isinstance(found, DroppedRow):
            dropped.append(found)
        else:
            rows.append(found)
    for row in rows:
        row.dropped = tuple(dropped)
    for reason, sequences in Counter(row.reason for row in dropped).items():
        report.drop(group, reason, sequences)
    report.events += events  # += removes counts of 0
    return rows


def _check_lists(group: Group, where: str, limits: RowLimits) -> _Checked:
    """Return the checked group; raise RefusedGroup if its fields are not parallel lists over sequences."""
    if not isinstance(group, Mapping):
        raise RefusedGroup(
            Reason.MALFORMED, f"{where}: it is {str(group)[:80]!r}, not a mapping of lists over sequences"
        )
    overrides = group.get("group_overrides") or {}
    if not isinstance(overrides, Mapping):
        raise RefusedGroup(Reason.MALFORMED, f"{where}: group_overrides is {overrides!r}, not a mapping")
    tokens, scores = group.get("tokens") or [], group.get("scores")
    if not isinstance(tokens, Sequence):
        raise RefusedGroup(Reason.MALFORMED, f"{where}: tokens is {tokens!r}, not a list over sequences")
    if not tokens:
        raise RefusedGroup(Reason.EMPTY_GROUP, f"{where}: no sequences")
    for i, sequence in enumerate(tokens):
        if not isinstance(sequence, Sequence | np.ndarray):
            raise RefusedGroup(Reason.MALFORMED, f"{where}: tokens[{i}] is {sequence!r}, not a list of token ids")
    if not isinstance(scores, Sequence) or len(scores) != len(tokens):
        found = len(scores) if isinstance(scores, Sequence) else scores
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{where}: {found} scores for {len(tokens)} sequences")
    teacher = _TEACHER if limits.read_teacher else ()
    present = set()
    for key in (*_PER_SEQUENCE, *teacher):
        values = group.get(key)
        if values and not isinstance(values, Sequence):
            raise RefusedGroup(
                Reason.MALFORMED, f"{where}: {key} is a {type(values).__name__}, not a list over sequences"
            )
        if values and len(values) != len(tokens):
            raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{where}: {len(values)} {key} for {len(tokens)} sequences")
        if values:
            present.add(key)
    if "masks" not in present:
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{where}: no masks for {len(tokens)} sequences")
    if len(present & {*teacher}) == 1:
        raise RefusedGroup(Reason.UNEQUAL_LENGTHS, f"{where}: one of distill_token_ids and distill_logprobs is missing")
    return _Checked(group, where, overrides, limits, frozenset(present))


def _read_row(
    group: _Checked, i: int, uid: str, versions: VersionLimits | None, events: Counter[str]
) -> Row | DroppedRow:
    """Return sequence ``i`` as a row or a dropped row; count truncations, missing logprobs, and advantages, teacher and
    zero advantage where given, in ``events``.
    """
    where, overrides = group.where, group.overrides
    score, ids, trained = _sequence(group, i)
    arrays = {key: _numbers(group, key, i, len(ids)) for key in ("inference_logprobs", "advantages", "ref_logprobs")}
    if arrays["advantages"] is not None:
        require_finite(arrays["advantages"], "advantages", i, where)

    def dropped(reason: Reason) -> DroppedRow:
        return DroppedRow(float(score), int(trained.sum()), reason.value)

    if not trained.any():
        return dropped(Reason.NO_TRAINED_TOKEN)
    first = int(trained.argmax())
    if first == 0:  # its first token has no context to be predicted from
        return dropped(Reason.NO_PROMPT)
    oldest, newest = _versions(overrides, i, where)
    if versions is not None and (reason := versions.refuses(oldest, newest)):
        return dropped(reason)
    end = _end(group, i, first, len(ids))
    if isinstance(end, Reason):
        return dropped(end)
    events["response_truncated"] += end < len(ids)

    mask = trained[first:end]
    for key in ("inference_logprobs", "ref_logprobs"):
        arrays[key] = _valid_logprobs(group, key, i, arrays[key], trained[:end])
    log_probs = _masked(arrays["inference_logprobs"], first, end, mask)
    teacher_ids = teacher_log_probs = None
    if any(group.values[key][i] for key in _TEACHER if key in group.present):
        values = teacher_top_k(group.values, i, where, trained, group.limits.vocab_size)
        teacher_ids, teacher_log_probs = (array[first:end] for array in values)
    zero = _zero_advantage(group, i)
    events["no_logprobs"] += log_probs is None
    events["own_advantages"] += arrays["advantages"] is not None
    events["teacher"] += teacher_ids is not None
    events["zero_advantage"] += zero
    return Row(
        prompt=ids[:first],
        response=ids[first:end],
        mask=mask,
        score=float(score),
        uid=uid,
        env_id=group.values.get("env_id"),
        env_name=overrides.get("env_name"),
        versions=(oldest, newest),
        raw_score=_raw_score(overrides, i, len(group.values["tokens"]), where),
        sampling=_sampling(group.values, overrides, i, where),
        log_probs=log_probs,
        advantages=_masked(arrays["advantages"], first, end, mask),
        ref_log_probs=_masked(arrays["ref_logprobs"], first, end, mask),
        teacher_ids=teacher_ids,
        teacher_log_probs=teacher_log_probs,
        zero_advantage=zero,
    )


def _sequence(group: _Checked, i: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the score, the token ids, (length,) int64, and the mask of trained tokens, (length,) bool."""
    values, where, vocab_size = group.values, group.where, group.limits.vocab_size
    score, length = values["scores"][i], len(values["tokens"][i])
    if not isinstance(score, int | float) or not abs(score) <= _FLOAT32_MAX:
        raise RefusedGroup(Reason.NONFINITE_SCORES, f"{where}: score {i} is {score}; it must be a finite number")
    ids = array_of(values, "tokens", i, where, np.int64, length)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size)) if vocab_size else np.empty(0, int)
    if outside.size:
        raise RefusedGroup(
            Reason.FOREIGN_TOKENS,
            f"{where}: token {ids[outside[0]]} at position {outside[0]} of sequence {i} is outside the policy's "
            f"vocabulary of {vocab_size}; start the environment with the policy's tokenizer",
        )
    return score, ids, array_of(values, "masks", i, where, np.int64, length) != IGNORED


def _numbers(group: _Checked, key: str, i: int, length: int) -> np.ndarray | None:
    """Return an optional field of sequence ``i``, (length,) float32, or None if it has none."""
    values = group.values[key][i] if key in group.present else None
    if values is None or (isinstance(values, Sequence | np.ndarray) and len(values) == 0):
        return None
    return array_of(group.values, key, i, group.where, np.float32, length)


def _end(group: _Checked, i: int, first: int, length: int) -> int | Reason:
    """Return the position where the response ends or is cut, or the reason why the row's length drops it."""
    limits = group.limits
    if length <= limits.max_length:
        return length
    if limits.overlong == "error":
        raise ConfigurationError(
            f"{group.where}: sequence {i} has {length} tokens, {first} of them prompt, data.max_prompt_length + "
            f"data.max_response_length is {limits.max_length}; raise one, or set trainer.atropos.overlong to drop or "
            "truncate"
        )
    if first >= limits.max_length:
        return Reason.OVERLONG_PROMPT
    return Reason.OVERLONG_RESPONSE if limits.overlong == "drop" else limits.max_length


def _valid_logprobs(
    group: _Checked, key: str, i: int, values: np.ndarray | None, trained: np.ndarray
) -> np.ndarray | None:
    """Return ``values``, or None if a trained token's value is null or positive (environments write 1.0 for none)."""
    if values is None:
        return None
    kept = np.where(trained, values[: len(trained)], np.float32(0))
    missing = [t for t in np.flatnonzero(np.isnan(kept)) if group.values[key][i][t] is None]
    kept[missing] = 0
    require_finite(kept, key, i, group.where)
    return None if missing or (kept > 0).any() else values


def _zero_advantage(group: _Checked, i: int) -> bool:
    """Return whether the overrides of the group or of the sequence set its advantage to zero."""
    of_row = group.values["overrides"][i] if "overrides" in group.present else None
    zero = False
    for name, given in (("group_overrides", group.overrides), (f"overrides[{i}]", of_row)):
        if not isinstance(given, Mapping | None):
            raise RefusedGroup(Reason.MALFORMED, f"{group.where}: {name} is {given!r}, not a mapping")
        value = (given or {}).get("set_advantage_to_zero", False)
        if value not in (True, False, None):
            raise RefusedGroup(
                Reason.MALFORMED, f"{group.where}: {name} has set_advantage_to_zero {value!r}; give true or false"
            )
        zero = zero or bool(value)
    return zero


def _masked(values: np.ndarray | None, first: int, end: int, mask: np.ndarray) -> np.ndarray | None:
    """Return the response part, with 0 at untrained positions (which hold sentinels such as 1.0)."""
    return None if values is None else np.where(mask, values[first:end], np.float32(0))


def _raw_score(overrides: Mapping[str, Any], row: int, rows: int, where: str) -> float | None:
    """Return a row's raw score from ``group_overrides.raw_scores``, a list over rows; None if it is not given."""
    values = overrides.get("raw_scores")
    if values is None:
        return None
    if not isinstance(values, Sequence) or len(values) != rows:
        raise RefusedGroup(Reason.MALFORMED, f"{where}: raw_scores is {values!r}, not a list over {rows} sequences")
    if not isinstance(values[row], int | float) or not abs(values[row]) <= _FLOAT32_MAX:
        raise RefusedGroup(
            Reason.MALFORMED, f"{where}: raw_scores[{row}] is {values[row]!r}; it must be a finite number"
        )
    return float(values[row])


def _versions(overrides: Mapping[str, Any], row: int, where: str) -> tuple[int | None, int | None]:
    """Return a row's (oldest, newest) weight version, from the lists ``group_overrides.policy_version_{min,max}``."""

    def version(key: str) -> int | None:
        values = overrides.get(key)
        value = values[row] if isinstance(values, Sequence) and len(values) > row else None
        if value is not None and type(value) is not int:
            raise RefusedGroup(Reason.MALFORMED, f"{where}: {key}[{row}] is {value!r}, not a weight version")
        return value

    oldest, newest = version("policy_version_min"), version("policy_version_max")
    if oldest is not None and newest is not None and oldest > newest:
        raise RefusedGroup(
            Reason.MALFORMED, f"{where}: policy_version_min[{row}] is {oldest}, policy_version_max[{row}] only {newest}"
        )
    return oldest, newest


def _sampling(group: Group, overrides: Mapping[str, Any], row: int, where: str) -> Sampled:
    """Return a row's parameters from ``group_overrides.sampling_params``, else the group's ``generation_params``."""
    values = overrides.get("sampling_params")
    if values is not None and (not isinstance(values, Sequence) or len(values) != len(group["tokens"])):
        raise RefusedGroup(
            Reason.MALFORMED,
            f"{where}: sampling_params is {values!r}, not a list over {len(group['tokens'])} sequences",
        )
    given = None if values is None else values[row]
    try:
        if given is not None:
            if isinstance(given, str) or not isinstance(given, Sequence) or not given:
                raise ValueError(f"{given!r} is no list of mappings")
            return tuple(dict.fromkeys(map(SamplingParams.from_mapping, given)))
        declared = group.get("generation_params")
        if isinstance(declared, Mapping) and declared.get("temperature") is not None:
            return (SamplingParams.from_declaration(declared),)
    except (TypeError, ValueError) as error:
        key = "generation_params" if given is None else f"sampling_params[{row}]"
        raise RefusedGroup(Reason.MALFORMED, f"{where}: {key}: {error}") from error
    return None


def read_groups(
    groups: Sequence[Group], limits: RowLimits, versions: VersionLimits | None = None
) -> tuple[list[Row], ConversionReport]:
    """Return a batch's rows, in the API's order, and a report. Refused groups are logged and counted in sequences."""
    report = ConversionReport()
    rows: list[Row] = []
    for index, group in enumerate(groups):
        tokens = group.get("tokens") if isinstance(group, Mapping) else None
        size = max(1, len(tokens)) if isinstance(tokens, Sequence) else 1  # a group without sequences counts as 1
        report.group_sizes.append(size)
        try:
            rows.extend(read_group(group, index, limits, report, versions))
        except RefusedGroup as refused:
            report.drop(group, refused.reason, size)
            report.messages.append(str(refused))
            logger.error("refused %s", refused)
    for reason in sorted(_FIXES.keys() & report.dropped.keys()):
        logger.error(
            "dropped %d sequences as %s: the policy has version %d, trainer.atropos.max_staleness=%s; %s",
            *(report.dropped[reason], reason, versions.policy_version, versions.max_staleness, _FIXES[reason]),
        )
    report.rows = len(rows)
    return rows, report
