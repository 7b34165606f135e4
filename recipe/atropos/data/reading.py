"""Cut scored groups into rows: one sequence each, that the trainer can train on, within the length limit.

``scored_group`` says what a group is; here is what depends on the trainer: lengths, weight versions, vocabulary,
irregular fields, and the teacher's top-k.

Guarantees:

- ``first`` is the first position of a sequence whose mask is not -100; the tokens before it are the prompt.
- A prompt is never cut, so every token is trained in the context in which it was sampled, or not at all.
- A malformed group is refused as a whole, named and counted; a row that cannot be trained on is dropped and counted.
  Nothing is repaired by guessing, and nothing is left out without being counted.
- Each row of a group carries the scores of the rows dropped from the group, since a baseline covers all scored rows.
- Rows of one trajectory all have advantages of the environment, or none has.

A missing or positive logprob (environments write 1.0 for a missing one) only leaves its row without logprobs. A NaN
or infinite logprob comes from a broken engine, so its group is refused, even if another logprob of the row is
missing.

Shapes: R_i response tokens of row i, K the teacher's top-k.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import (
    IGNORED,
    NO_TEACHER,
    ConversionReport,
    DroppedRow,
    Row,
    RowLimits,
    VersionLimits,
    environment_name,
)
from recipe.atropos.data.scored_group import (
    FLOATS,
    LARGEST,
    Group,
    ScoredGroup,
    flat_numbers,
    require_count,
    require_finite,
)
from recipe.atropos.errors import ConfigurationError

logger = logging.getLogger(__name__)

TOP_K_FIELDS = ("distill_token_ids", "distill_logprobs")
_FIXES = {
    "stale": "an environment keeps to it through the adapter",
    "unknown_version": "run the environment through the adapter, or set it to null to train on samples of any age",
    "not_pushed": "a server was restarted, or never got weights; put the servers behind inference.gateway",
    "future_version": "an abandoned policy sampled them: the trainer went back to a checkpoint",
}


def read_groups(
    groups: Sequence[Group], limits: RowLimits, versions: VersionLimits | None = None
) -> tuple[list[Row], ConversionReport]:
    """Return a batch's rows, in the API's order, and a report. Refused groups are logged and counted in sequences.

    Groups that nobody has checked, as mappings, are checked here.

    Raises:
        ConfigurationError: a row is too long and ``limits.overlong`` is "error".
    """
    report = ConversionReport()
    rows: list[Row] = []
    for index, group in enumerate(groups):
        name, env_id, size = _origin(group)
        where = f"group {index} of env {name or ('unknown' if env_id is None else env_id)}"
        environment = environment_name(name, env_id)
        report.group_sizes.append(size)
        report.received += size
        try:
            whole = group if isinstance(group, ScoredGroup) else ScoredGroup.from_mapping(group)
            report.group_sizes[-1] = whole.trajectories
            found, dropped, events = _Reader(whole, where, str(index), limits, versions).read()
        except RefusedGroup as refused:
            report.drop(environment, refused.reason, size)
            report.messages.append(f"{where}: {refused}")
            logger.error("refused %s", report.messages[-1])
            continue
        rows += found
        for reason, sequences in Counter(row.reason for row in dropped).items():
            report.drop(environment, reason, sequences)
        report.events += events  # += removes counts of 0
    if limits.needs_teacher and not report.events["teacher"]:
        for row in rows:
            report.drop(environment_name(row.env_name, row.env_id), Reason.NO_TEACHER, 1)
        rows = []
    for reason in sorted(_FIXES.keys() & report.dropped.keys()):
        logger.error(
            "dropped %d sequences as %s: the policy has version %d, trainer.atropos.max_staleness=%s; %s",
            *(report.dropped[reason], reason, versions.policy_version, versions.max_staleness, _FIXES[reason]),
        )
    report.rows = len(rows)
    return rows, report


def _origin(group: Group) -> tuple[Any, int | None, int]:
    """Return name and id of the environment that sent a group, None if not given, and its number of sequences.

    A group without sequences counts as 1.
    """
    if isinstance(group, ScoredGroup):
        return (group.field("group_overrides") or {}).get("env_name"), group.env_id, len(group.lengths)
    group = group if isinstance(group, Mapping) else {}
    overrides, env_id, tokens = (group.get(name) for name in ("group_overrides", "env_id", "tokens"))
    name = overrides.get("env_name") if isinstance(overrides, Mapping) else None
    size = max(1, len(tokens)) if isinstance(tokens, Sequence) else 1
    return name, env_id if type(env_id) is int else None, size


class _Reader:
    """Reads the rows of a group, whose fields it holds as lists over its sequences.

    Raises:
        RefusedGroup: the trainer cannot use one of the group's values.
    """

    def __init__(self, whole: ScoredGroup, where: str, uid: str, limits: RowLimits, versions: VersionLimits | None):
        self.whole, self.where, self.uid, self.limits, self.versions = whole, where, uid, limits, versions
        vocab_size, self.said = limits.vocab_size, whole.group_overrides
        for i in np.flatnonzero(np.abs(whole.scores) > LARGEST):  # a store of an earlier version has such
            raise RefusedGroup(Reason.NONFINITE_SCORES, f"score {i} is {whole.scores[i]}; at most {LARGEST:g}")
        self.tokens = whole.cut(whole.tokens.astype(np.int64))  # (length,) each
        self.trained = whole.cut(whole.masks != IGNORED)  # (length,) bool each
        for i, ids in enumerate(self.tokens if vocab_size else ()):
            for at in np.flatnonzero((ids < 0) | (ids >= vocab_size)):
                raise RefusedGroup(
                    Reason.FOREIGN_TOKENS,
                    f"token {ids[at]} at position {at} of sequence {i} is outside the policy's vocabulary of "
                    f"{vocab_size}; start the environment with the policy's tokenizer",
                )
        self.floats = {  # (length,) float32 each, NaN for null
            name: [None if row is None else row.astype(np.float32, copy=False) for row in whole.by_sequence(name)]
            for name in FLOATS
        }
        for i, values in enumerate(self.floats["advantages"]):
            if values is not None:
                require_finite(f"advantages[{i}]", values, Reason.NONFINITE_ADVANTAGES, LARGEST)
        numbers = self.said.trajectory
        given = {(number, values is None) for number, values in zip(numbers, self.floats["advantages"], strict=True)}
        if None not in numbers and len(given) > len(set(numbers)):
            raise RefusedGroup(Reason.MALFORMED, "some rows of a trajectory have advantages, others have none")
        teacher = {name: values for name in TOP_K_FIELDS if limits.read_teacher and (values := whole.field(name))}
        for name, values in {**teacher, "overrides": whole.overrides}.items():  # a store may be older than its check
            require_count(name, values, len(whole.lengths))
        if len(teacher) == 1:
            raise RefusedGroup(Reason.UNEQUAL_LENGTHS, "one of distill_token_ids and distill_logprobs is missing")
        self.teacher = [*teacher.values()]
        self.declared = whole.declared_sampling()  # of sequences that do not say what they were sampled with

    def read(self) -> tuple[list[Row], list[DroppedRow], Counter[str]]:
        """Return the rows, those dropped, and counts of events.

        Raises:
            RefusedGroup: a trained token's logprob is not finite, or the teacher's top-k is ragged or not a
                distribution. The message names the sequence and the position.
            ConfigurationError: a row is too long and ``limits.overlong`` is "error".
        """
        found = [self._row(i) for i in range(len(self.tokens))]
        dropped = [row for row in found if isinstance(row, DroppedRow)]
        rows = [replace(row, dropped=tuple(dropped)) for row in found if isinstance(row, Row)]
        events = Counter(
            response_truncated=sum(
                len(row.prompt) + len(row.response) < len(self.tokens[row.sequence]) for row in rows
            ),
            no_logprobs=sum(row.log_probs is None for row in rows),
            own_advantages=sum(row.advantages is not None for row in rows),
            teacher=sum(row.teacher_ids is not None for row in rows),
            zero_advantage=sum(row.zero_advantage for row in rows),
        )
        return rows, dropped, events

    def _row(self, i: int) -> Row | DroppedRow:
        """Return sequence ``i`` as a row or a dropped row."""
        whole, said = self.whole, self.said
        ids, trained, advantages = self.tokens[i], self.trained[i], self.floats["advantages"][i]
        first, oldest, newest = int(trained.argmax()), said.policy_version_min[i], said.policy_version_max[i]
        reason, end = None, len(ids)
        if not trained.any():
            reason = Reason.NO_TRAINED_TOKEN
        elif first == 0:  # its first token has no context to be predicted from
            reason = Reason.NO_PROMPT
        elif self.versions is not None:
            reason = self.versions.refuses(oldest, newest)
        if reason is None and end > self.limits.max_length:
            end, reason = self.limits.max_length, self._too_long(i, first)
        if reason is not None:
            return DroppedRow(float(whole.scores[i]), int(trained.sum()), reason.value, said.trajectory[i])
        mask = trained[first:end]
        log_probs, ref_log_probs = (
            _masked(self._valid_logprobs(key, i, trained[:end]), first, end, mask)
            for key in ("inference_logprobs", "ref_logprobs")
        )
        teacher_ids = teacher_log_probs = None
        if any(values[i] for values in self.teacher):
            values = _teacher_top_k(self.teacher, i, trained, self.limits.vocab_size)
            teacher_ids, teacher_log_probs = (array[first:end] for array in values)
        raw_score, sampling = said.raw_scores[i], said.sampling_params[i]
        return Row(
            prompt=ids[:first],
            response=ids[first:end],
            mask=mask,
            score=float(whole.scores[i]),
            uid=self.uid,
            env_id=whole.env_id,
            env_name=said.env_name,
            versions=(oldest, newest),
            raw_score=None if raw_score is None else float(raw_score),
            sampling=self.declared if sampling is None else tuple(dict.fromkeys(sampling)),
            log_probs=log_probs,
            advantages=_masked(advantages, first, end, mask),
            credit=None if advantages is None else said.credit,
            ref_log_probs=ref_log_probs,
            teacher_ids=teacher_ids,
            teacher_log_probs=teacher_log_probs,
            sequence=i,
            trajectory=said.trajectory[i],
            zero_advantage=bool(said.set_advantage_to_zero or whole.overrides[i].set_advantage_to_zero),
        )

    def _too_long(self, i: int, first: int) -> Reason | None:
        """Return why sequence ``i``, which exceeds the limit, is dropped; None if the end of its response is cut."""
        limits = self.limits
        if limits.overlong == "error":
            raise ConfigurationError(
                f"{self.where}: sequence {i} has {len(self.tokens[i])} tokens, {first} of them prompt, "
                f"data.max_prompt_length + data.max_response_length is {limits.max_length}; raise one, or set "
                "trainer.atropos.overlong to drop or truncate"
            )
        if first >= limits.max_length:
            return Reason.OVERLONG_PROMPT
        return Reason.OVERLONG_RESPONSE if limits.overlong == "drop" else None

    def _valid_logprobs(self, key: str, i: int, trained: np.ndarray) -> np.ndarray | None:
        """Return the values, or None if a trained token's is null or positive (environments write 1.0 for none)."""
        values = self.floats[key][i]
        if values is None:
            return None
        kept = np.where(trained, values[: len(trained)], np.float32(0))
        missing = np.isnan(kept)
        kept[missing] = 0
        require_finite(f"{key}[{i}]", kept, Reason(f"nonfinite_{key}"))
        return None if missing.any() or (kept > 0).any() else values


def _masked(values: np.ndarray | None, first: int, end: int, mask: np.ndarray) -> np.ndarray | None:
    """Return the response part, with 0 at untrained positions (which hold sentinels such as 1.0)."""
    return None if values is None else np.where(mask, values[first:end], np.float32(0))


# ---------------------------------------------------------------------- the teacher's top-k


def _teacher_top_k(
    given: Sequence[Sequence[Any]], row: int, trained: np.ndarray, vocab_size: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, logprobs) of the teacher's top-k by position, both (length, K); only trained positions are filled.

    ``given`` are the values of ``TOP_K_FIELDS`` over sequences: ``distill_token_ids[row][t]`` holds the candidates for
    token t given the tokens before it. What stands at untrained positions does not count.

    Raises:
        RefusedGroup: the top-k is ragged, outside the vocabulary or not a distribution, with sequence and position.
    """
    length = len(trained)
    positions, sizes = np.flatnonzero(trained), []
    for key, sequences in zip(TOP_K_FIELDS, given, strict=True):
        values = sequences[row] or ()
        if not isinstance(values, Sequence) or any(not isinstance(at, Sequence | None) for at in values):
            raise RefusedGroup(Reason.MALFORMED, f"{key}[{row}] is not a list of lists, one for each token")
        if len(values) != length:
            raise RefusedGroup(
                Reason.UNEQUAL_LENGTHS, f"{key}[{row}] has {len(values)} positions, tokens[{row}] has {length}"
            )
        sizes.append(np.array([len(at or ()) for at in values]))
    ids_at, log_probs_at = sizes
    top_k = ids_at[positions[0]]
    bad = np.flatnonzero(trained & ((ids_at != log_probs_at) | (ids_at != top_k)))
    if bad.size or top_k == 0:
        at = bad[0] if bad.size else positions[0]
        raise RefusedGroup(
            Reason.RAGGED_DISTILLATION,
            f"sequence {row} has {ids_at[at]} distill_token_ids and {log_probs_at[at]} distill_logprobs at "
            f"position {at}, and {top_k} at its first trained one; give the same top-k at every trained position",
        )
    ids = np.zeros((length, top_k), dtype=np.int64)
    log_probs = np.full((length, top_k), NO_TEACHER)
    for out, key, sequences in zip((ids, log_probs), TOP_K_FIELDS, given, strict=True):
        values = [value for t in positions for value in sequences[row][t]]
        out[positions] = flat_numbers(f"{key}[{row}]", values, np.int64 if out is ids else np.float64).reshape(
            -1, top_k
        )
    outside = np.argwhere((ids < 0) | (ids >= vocab_size)) if vocab_size else []
    if len(outside):
        at, k = outside[0]
        raise RefusedGroup(
            Reason.FOREIGN_TOKENS,
            f"distill_token_ids[{row}] is {ids[at, k]} at position {at}, outside the policy's vocabulary of "
            f"{vocab_size}; the teacher must share the policy's tokenizer",
        )
    twice = positions[(np.diff(np.sort(ids[positions], axis=1), axis=1) == 0).any(axis=1)]
    if twice.size:
        at = twice[0]
        raise RefusedGroup(
            Reason.REPEATED_DISTILL_TOKEN,
            f"distill_token_ids[{row}] is {ids[at].tolist()} at position {at}; name each token once",
        )
    mass = np.exp(log_probs.astype(np.float64)).sum(axis=1)
    bad = np.flatnonzero(~np.isfinite(log_probs).all(axis=1) | (mass > 1.01))
    if bad.size:
        raise RefusedGroup(
            Reason.INVALID_DISTILL_LOGPROBS,
            f"distill_logprobs[{row}] is {log_probs[bad[0]].tolist()} at position {bad[0]}; they must be "
            "finite logarithms of probabilities that sum to at most 1",
        )
    return ids, log_probs
