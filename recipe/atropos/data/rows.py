"""Scored groups of the Trajectory API -> rows: one sequence each, read, checked and cut.

Guarantees:

- For one sequence, ``first`` is the first position whose mask is not -100: what comes before is the prompt.
- A group that cannot be understood is refused whole, named and counted; a row that cannot be trained on is dropped and
  counted. Nothing is repaired by guessing, and nothing leaves without a count.
- The rows of a group know the scores of those that were dropped from it: a baseline is over all scored rows.

A logprob that is missing or positive (environments write 1.0 where they have none) only leaves its row without
logprobs; one that is NaN or infinite comes from an engine that is broken, so its group is refused, also where another
logprob of the row is missing.

Shapes: R_i tokens of a response, K a teacher's top-k.
"""

import logging
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from recipe.atropos.data.sampling import Sampled, SamplingParams
from recipe.atropos.errors import AtroposError, ConfigurationError

logger = logging.getLogger(__name__)

IGNORED = -100  # the mask of a token that is not trained on (atroposlib, as in torch's cross-entropy)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
NO_TEACHER = np.float32(-1e4)  # logprob of a teacher's token that is not there: its probability is exactly 0 in float32

Group = Mapping[str, Any]  # one ScoredData of the API: parallel lists over sequences


class RefusedGroup(AtroposError, ValueError):
    """A group that breaks the format; ``reason`` is its name in the counts."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class RowLimits:
    """How rows are cut and filled. Lengths in tokens.

    ``overlong`` is what happens to a response longer than ``max_response_length``: "truncate" keeps its beginning,
    "drop" leaves the row out, "error" raises. A longer prompt keeps its end. ``vocab_size``, where given, refuses
    groups that were made with another tokenizer. ``read_teacher`` false passes over the distillation fields.
    """

    max_prompt_length: int
    max_response_length: int
    pad_token_id: int
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    vocab_size: int | None = None
    read_teacher: bool = True

    def __post_init__(self) -> None:
        if self.overlong not in ("truncate", "drop", "error"):
            raise ValueError(f"trainer.atropos.overlong={self.overlong!r}: choose truncate, drop or error")
        if self.max_prompt_length < 1 or self.max_response_length < 1:
            raise ValueError(f"lengths must be positive: {self.max_prompt_length=}, {self.max_response_length=}")


@dataclass(frozen=True)
class VersionLimits:
    """Which weights may have sampled a row, when a policy with ``policy_version`` updates behind it is to be trained.

    A row is at most ``max_staleness`` updates older, by the oldest of its trained tokens; None: of any age.
    """

    policy_version: int
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        bound = self.max_staleness
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
            raise ValueError(f"trainer.atropos.max_staleness={bound!r}: give a whole number of updates >= 0, or null")

    def refuses(self, oldest: int | None, newest: int | None) -> str | None:
        """Why a row with these versions cannot be trained on, as it is counted; None if it can.

        - ``future_version``: newer than the policy, so of a branch that was given up; whatever ``max_staleness`` is,
          and by the oldest version alone where the newest is unknown.
        - ``not_pushed``: by weights that no trainer pushed, those that a server was started with; likewise.
        - ``stale``: too old.
        - ``unknown_version``: what cannot be shown to be within a bound is not trained on.
        """
        if any(version is not None and version > self.policy_version for version in (oldest, newest)):
            return "future_version"
        if oldest is not None and oldest < 0:
            return "not_pushed"
        if self.max_staleness is None:
            return None
        if oldest is None:
            return "unknown_version"
        return "stale" if self.policy_version - oldest > self.max_staleness else None


_MENDS = {
    "stale": "an environment keeps to it by the mixin Paced and the variable ATROPOS_MAX_STALENESS",
    "unknown_version": "put the mixin WeightVersions before BaseEnv, or set it to null to train on samples of any age",
    "not_pushed": "a server was started again, or never given weights; let servers stand behind inference.gateway",
    "future_version": "a policy sampled them that is no more: the trainer went back to a checkpoint",
}


@dataclass
class ConversionReport:
    """What became of a batch's sequences.

    ``group_sizes`` are the sequences that each group was sent with. ``dropped`` counts those that are not in the batch,
    by reason; ``events`` the rows that are in it, altered or lacking something: prompt_truncated, response_truncated,
    no_logprobs, zero_advantage. ``messages`` are for people.
    """

    group_sizes: list[int] = field(default_factory=list)
    rows: int = 0
    padding_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_by_environment: dict[str, Counter[str]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    @property
    def received(self) -> int:
        """Sequences."""
        return sum(self.group_sizes)

    def drop(self, group: Group, reason: str, sequences: int) -> None:
        """Count sequences of a group that are not in the batch."""
        name = environment_name(*_environment(group))
        self.dropped[reason] += sequences
        self.dropped_by_environment.setdefault(name, Counter())[reason] += sequences

    def metrics(self) -> dict[str, float]:
        """As trainer metrics under ``atropos/``, and drops under ``atropos/ENV/`` too."""
        counts = {"received": self.received, "rows": self.rows, "padding_rows": self.padding_rows}
        counts |= {f"dropped/{reason}": n for reason, n in self.dropped.items()}
        for name, reasons in self.dropped_by_environment.items():
            counts |= {f"{name}/dropped/{reason}": n for reason, n in reasons.items()}
        counts |= {f"rows_with/{event}": n for event, n in self.events.items()}
        return {f"atropos/{key}": float(n) for key, n in counts.items()}


class DroppedRow(NamedTuple):
    """What a group's baseline needs of a scored row that is not trained on."""

    score: float
    trained_tokens: int  # that it had as it was sent, before any cut
    reason: str  # as in ``ConversionReport.dropped``


@dataclass
class Row:
    """One sequence, split at ``first``. Every array over the response has the same length R_i >= 1.

    ``log_probs`` is None where a trained token lacks a valid one; ``advantages``, ``ref_log_probs`` and the teacher's
    top-k are None where the environment sent none. ``versions`` is (oldest, newest) weight version among the trained
    tokens, None if unknown. ``raw_score`` is the score before a reward bridge shaped it, None where none did.
    ``sampling``: the distinct parameters that its trained tokens were sampled with, None if unknown.
    ``dropped`` are the rows that were dropped from the same group.
    """

    prompt: np.ndarray  # (P_i,) int64
    response: np.ndarray  # (R_i,) int64
    mask: np.ndarray  # (R_i,) bool, True where trained on
    score: float
    uid: str
    env_id: int | None = None
    env_name: str | None = None
    versions: tuple[int | None, int | None] = (None, None)
    raw_score: float | None = None
    sampling: Sampled = None
    log_probs: np.ndarray | None = None  # (R_i,) float32
    advantages: np.ndarray | None = None  # (R_i,) float32
    ref_log_probs: np.ndarray | None = None  # (R_i,) float32
    teacher_ids: np.ndarray | None = None  # (R_i, K) int64: the teacher's most likely tokens in this token's place
    teacher_log_probs: np.ndarray | None = None  # (R_i, K) float32, NO_TEACHER where not trained on
    zero_advantage: bool = False
    dropped: tuple[DroppedRow, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.prompt) >= 1 and self.mask.any(), "a row has a prompt and at least one trained token"
        for name in ("mask", "log_probs", "advantages", "ref_log_probs", "teacher_ids", "teacher_log_probs"):
            values = getattr(self, name)
            assert values is None or len(values) == len(self.response), name


def environment_name(name: str | None, env_id: int | None) -> str:
    """What metrics call an environment: its name, else ``env_ID``, else ``unknown``."""
    return str(name).replace("/", "_") if name is not None else "unknown" if env_id is None else f"env_{env_id}"


def _environment(group: Any) -> tuple[Any, Any]:
    """(name, id) of the environment that sent a group, None where it does not say."""
    if not isinstance(group, Mapping):
        return None, None
    overrides = group.get("group_overrides")
    return overrides.get("env_name") if isinstance(overrides, Mapping) else None, group.get("env_id")


def group_name(group: Group, index: int) -> str:
    """How messages call a group: its place in the batch and its environment."""
    name, env_id = _environment(group)
    return f"group {index} of env {name or ('unknown' if env_id is None else env_id)}"


def _flat(values: Any, integers: bool) -> np.ndarray:
    """A flat list as int64 or float64, by the standard library's strict and fast conversion; null is NaN."""
    try:
        return np.frombuffer(array("q" if integers else "d", values), dtype=np.int64 if integers else np.float64)
    except TypeError:
        if integers or None not in values:
            raise
        return _flat([math.nan if value is None else value for value in values], integers)


def _array(group: Group, key: str, row: int, where: str, dtype: type, length: int) -> np.ndarray:
    """Row ``row`` of a parallel field as an array of ``length``; refuses what is not a flat list of such numbers.

    Integers are not parsed from text or rounded from fractions.
    """
    values, integers = group[key][row], np.issubdtype(dtype, np.integer)
    try:
        flat = _flat(values, integers)
    except (TypeError, ValueError, OverflowError) as error:
        what = "whole numbers" if integers else "numbers"
        raise RefusedGroup("malformed", f"{where}: {key}[{row}] is not a flat list of {what} ({error})") from error
    if len(flat) != length:
        raise RefusedGroup(
            "unequal_lengths", f"{where}: {key}[{row}] has length {len(flat)}, tokens[{row}] has {length}"
        )
    return flat.astype(dtype, copy=False)


def _require_finite(values: np.ndarray, key: str, row: int, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise RefusedGroup(
            f"nonfinite_{key}", f"{where}: {key}[{row}] is {values[bad[0]]} at position {bad[0]}; it must be finite"
        )


def _teacher(
    group: Group, row: int, where: str, trained: np.ndarray, vocab_size: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, logprobs) of the teacher's top-k at each position, both (length, K); only trained positions are filled.

    ``distill_token_ids[row][t]`` are the candidates for token t given the tokens before it. Positions that are not
    trained on may be empty, as the first one always is.
    """
    length = len(trained)
    positions, sizes = np.flatnonzero(trained), []
    for key in ("distill_token_ids", "distill_logprobs"):
        values = group[key][row] or ()
        if not isinstance(values, Sequence) or any(not isinstance(at, Sequence | None) for at in values):
            raise RefusedGroup("malformed", f"{where}: {key}[{row}] is not a list of lists, one for each token")
        if len(values) != length:
            raise RefusedGroup(
                "unequal_lengths", f"{where}: {key}[{row}] has {len(values)} positions, tokens[{row}] has {length}"
            )
        sizes.append(np.array([len(at or ()) for at in values]))
    ids_at, log_probs_at = sizes
    top_k = ids_at[positions[0]]
    bad = np.flatnonzero((ids_at != log_probs_at) | ((ids_at != top_k) & (trained | (ids_at > 0))))
    if bad.size or top_k == 0:
        at = bad[0] if bad.size else positions[0]
        raise RefusedGroup(
            "ragged_distillation",
            f"{where}: sequence {row} has {ids_at[at]} distill_token_ids and {log_probs_at[at]} distill_logprobs at "
            f"position {at}, and {top_k} at its first trained one; give the same top-k at every trained position",
        )
    ids = np.zeros((length, top_k), dtype=np.int64)
    log_probs = np.full((length, top_k), NO_TEACHER)
    for out, key in ((ids, "distill_token_ids"), (log_probs, "distill_logprobs")):
        try:
            flat = _flat([value for t in positions for value in group[key][row][t]], out is ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise RefusedGroup("malformed", f"{where}: {key}[{row}] holds what is no number ({error})") from error
        out[positions] = flat.reshape(-1, top_k)
    outside = np.argwhere((ids < 0) | (ids >= vocab_size)) if vocab_size else np.empty((0, 2), int)
    if outside.size:
        at, k = outside[0]
        raise RefusedGroup(
            "foreign_tokens",
            f"{where}: distill_token_ids[{row}] is {ids[at, k]} at position {at}, outside the policy's vocabulary of "
            f"{vocab_size}; the teacher must share the policy's tokenizer",
        )
    twice = positions[(np.diff(np.sort(ids[positions], axis=1), axis=1) == 0).any(axis=1)]
    if twice.size:
        at = twice[0]
        raise RefusedGroup(
            "repeated_distill_token",
            f"{where}: distill_token_ids[{row}] is {ids[at].tolist()} at position {at}; name each token once",
        )
    mass = np.exp(log_probs.astype(np.float64)).sum(axis=1)
    bad = np.flatnonzero(~np.isfinite(log_probs).all(axis=1) | (mass > 1.01))
    if bad.size:
        raise RefusedGroup(
            "invalid_distill_logprobs",
            f"{where}: distill_logprobs[{row}] is {log_probs[bad[0]].tolist()} at position {bad[0]}; they must be "
            "finite logarithms of probabilities that sum to at most 1",
        )
    return ids, log_probs


def read_group(
    group: Group, index: int, limits: RowLimits, report: ConversionReport, versions: VersionLimits | None = None
) -> list[Row]:
    """The rows of one group, cut to ``limits``; fills ``report.dropped`` and ``report.events``.

    Raises:
        RefusedGroup: lengths differ within the group; a score, an advantage or the logprob of a trained token is not
            finite; a token is outside the vocabulary; the teacher's top-k is ragged or no distribution. The message
            names the group, the environment, the sequence and the position.
        ConfigurationError: a response is too long and ``limits.overlong`` is "error".
    """
    where = group_name(group, index)
    if not isinstance(group, Mapping):
        raise RefusedGroup("malformed", f"{where}: it is {str(group)[:80]!r}, not a mapping of lists over sequences")
    overrides = group.get("group_overrides") or {}
    if not isinstance(overrides, Mapping):
        raise RefusedGroup("malformed", f"{where}: group_overrides is {overrides!r}, not a mapping")
    tokens, scores = group.get("tokens") or [], group.get("scores")
    if not isinstance(tokens, Sequence):
        raise RefusedGroup("malformed", f"{where}: tokens is {tokens!r}, not a list over sequences")
    if not tokens:
        raise RefusedGroup("empty_group", f"{where}: no sequences")
    for i, sequence in enumerate(tokens):
        if not isinstance(sequence, Sequence):
            raise RefusedGroup("malformed", f"{where}: tokens[{i}] is {sequence!r}, not a list of token ids")
    if not isinstance(scores, Sequence) or len(scores) != len(tokens):
        found = len(scores) if isinstance(scores, Sequence) else scores
        raise RefusedGroup("unequal_lengths", f"{where}: {found} scores for {len(tokens)} sequences")
    optional = {}
    per_sequence = ("masks", "inference_logprobs", "advantages", "ref_logprobs", "overrides")
    teacher_keys = ("distill_token_ids", "distill_logprobs") if limits.read_teacher else ()
    for key in (*per_sequence, *teacher_keys):
        values = group.get(key)
        if values and not isinstance(values, Sequence):
            raise RefusedGroup("malformed", f"{where}: {key} is a {type(values).__name__}, not a list over sequences")
        if values and len(values) != len(tokens):
            raise RefusedGroup("unequal_lengths", f"{where}: {len(values)} {key} for {len(tokens)} sequences")
        optional[key] = bool(values)
    if not optional["masks"]:
        raise RefusedGroup("unequal_lengths", f"{where}: no masks for {len(tokens)} sequences")
    if len({optional[key] for key in teacher_keys}) > 1:
        raise RefusedGroup("unequal_lengths", f"{where}: one of distill_token_ids and distill_logprobs is missing")
    has_teacher = any(optional[key] for key in teacher_keys)

    rows: list[Row] = []
    dropped, events = Counter(), Counter()
    dropped_rows: list[DroppedRow] = []

    def drop(reason: str, score: float, trained: np.ndarray) -> None:
        dropped[reason] += 1
        dropped_rows.append(DroppedRow(float(score), int(trained.sum()), reason))

    for i, score in enumerate(scores):
        if not isinstance(score, int | float) or not abs(score) <= _FLOAT32_MAX:
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
            present = optional[key] and group[key][i] is not None and group[key][i] != []
            arrays[key] = _array(group, key, i, where, np.float32, length) if present else None
        if arrays["advantages"] is not None:
            _require_finite(arrays["advantages"], "advantages", i, where)

        if not trained.any():
            drop("no_trained_token", score, trained)
            continue
        first = int(trained.argmax())
        if first == 0:  # its first token has no context to be predicted from
            drop("no_prompt", score, trained)
            continue
        oldest, newest = _versions(overrides, i, where)
        if versions is not None and (reason := versions.refuses(oldest, newest)):
            drop(reason, score, trained)
            continue
        end = length
        if length - first > limits.max_response_length:
            if limits.overlong == "error":
                raise ConfigurationError(
                    f"{where}: response {i} has {length - first} tokens, data.max_response_length is "
                    f"{limits.max_response_length}; raise it, or set trainer.atropos.overlong to truncate or drop"
                )
            if limits.overlong == "drop":
                drop("overlong_response", score, trained)
                continue
            events["response_truncated"] += 1
            end = first + limits.max_response_length
        if first > limits.max_prompt_length:
            events["prompt_truncated"] += 1

        mask = trained[first:end]
        for key in ("inference_logprobs", "ref_logprobs"):
            values = arrays[key]
            if values is None:
                continue
            kept = np.where(trained[:end], values[:end], np.float32(0))
            missing = [t for t in np.flatnonzero(np.isnan(kept)) if group[key][i][t] is None]
            kept[missing] = 0
            _require_finite(kept, key, i, where)
            if missing or (kept > 0).any():  # null, or the 1.0 that environments write where they have none
                arrays[key] = None
        log_probs = _masked(arrays["inference_logprobs"], first, end, mask)
        events["no_logprobs"] += log_probs is None
        events["own_advantages"] += arrays["advantages"] is not None
        teacher_ids = teacher_log_probs = None
        if any(group[key][i] for key in teacher_keys if has_teacher):
            values = _teacher(group, i, where, trained, limits.vocab_size)
            teacher_ids, teacher_log_probs = (array[first:end] for array in values)
        events["teacher"] += teacher_ids is not None
        row_overrides = group["overrides"][i] if optional["overrides"] else None
        zero = False
        for name, given in (("group_overrides", overrides), (f"overrides[{i}]", row_overrides)):
            if not isinstance(given, Mapping | None):
                raise RefusedGroup("malformed", f"{where}: {name} is {given!r}, not a mapping")
            value = (given or {}).get("set_advantage_to_zero", False)
            if value not in (True, False, None):
                raise RefusedGroup(
                    "malformed", f"{where}: {name} has set_advantage_to_zero {value!r}; give true or false"
                )
            zero = zero or bool(value)
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
                versions=(oldest, newest),
                raw_score=_raw_score(overrides, i, len(tokens), where),
                sampling=_sampling(group, overrides, i, where),
                log_probs=log_probs,
                advantages=_masked(arrays["advantages"], first, end, mask),
                ref_log_probs=_masked(arrays["ref_logprobs"], first, end, mask),
                teacher_ids=teacher_ids,
                teacher_log_probs=teacher_log_probs,
                zero_advantage=zero,
            )
        )
    for row in rows:
        row.dropped = tuple(dropped_rows)
    for reason, sequences in dropped.items():
        report.drop(group, reason, sequences)
    report.events += events  # leaves out what is 0
    return rows


def _masked(values: np.ndarray | None, first: int, end: int, mask: np.ndarray) -> np.ndarray | None:
    """The response part, 0 where not trained on (there stand sentinels such as 1.0)."""
    return None if values is None else np.where(mask, values[first:end], np.float32(0))


def _raw_score(overrides: Mapping[str, Any], row: int, rows: int, where: str) -> float | None:
    """Of a row, from ``group_overrides.raw_scores``, a list over rows."""
    values = overrides.get("raw_scores")
    if values is None:
        return None
    if not isinstance(values, Sequence) or len(values) != rows:
        raise RefusedGroup("malformed", f"{where}: raw_scores is {values!r}, not a list over {rows} sequences")
    if not isinstance(values[row], int | float) or not abs(values[row]) <= _FLOAT32_MAX:
        raise RefusedGroup("malformed", f"{where}: raw_scores[{row}] is {values[row]!r}; it must be a finite number")
    return float(values[row])


def _versions(overrides: Mapping[str, Any], row: int, where: str) -> tuple[int | None, int | None]:
    """(oldest, newest) weight version of a row from ``group_overrides.policy_version_{min,max}``, lists over rows."""

    def version(key: str) -> int | None:
        values = overrides.get(key)
        value = values[row] if isinstance(values, Sequence) and len(values) > row else None
        if value is not None and type(value) is not int:
            raise RefusedGroup("malformed", f"{where}: {key}[{row}] is {value!r}, not a weight version")
        return value

    oldest, newest = version("policy_version_min"), version("policy_version_max")
    if oldest is not None and newest is not None and oldest > newest:
        raise RefusedGroup(
            "malformed", f"{where}: policy_version_min[{row}] is {oldest}, policy_version_max[{row}] only {newest}"
        )
    return oldest, newest


def _sampling(group: Group, overrides: Mapping[str, Any], row: int, where: str) -> Sampled:
    """Of a row, from ``group_overrides.sampling_params``, else from the group's ``generation_params``."""
    values = overrides.get("sampling_params")
    if values is not None and (not isinstance(values, Sequence) or len(values) != len(group["tokens"])):
        raise RefusedGroup(
            "malformed", f"{where}: sampling_params is {values!r}, not a list over {len(group['tokens'])} sequences"
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
        raise RefusedGroup("malformed", f"{where}: {key}: {error}") from error
    return None


def read_groups(
    groups: Sequence[Group], limits: RowLimits, versions: VersionLimits | None = None
) -> tuple[list[Row], ConversionReport]:
    """All rows of a batch in the API's order. A refused group is logged with its name and counted by sequences."""
    report = ConversionReport()
    rows: list[Row] = []
    for index, group in enumerate(groups):
        tokens = group.get("tokens") if isinstance(group, Mapping) else None
        size = max(1, len(tokens)) if isinstance(tokens, Sequence) else 1  # what has no sequences counts as one
        report.group_sizes.append(size)
        try:
            rows.extend(read_group(group, index, limits, report, versions))
        except RefusedGroup as refused:
            report.drop(group, refused.reason, size)
            report.messages.append(str(refused))
            logger.error("refused %s", refused)
    for reason in sorted(_MENDS.keys() & report.dropped.keys()):
        logger.error(
            "dropped %d sequences as %s: the policy has version %d, trainer.atropos.max_staleness=%s; %s",
            *(report.dropped[reason], reason, versions.policy_version, versions.max_staleness, _MENDS[reason]),
        )
    report.rows = len(rows)
    return rows, report
