"""Parse a scored group's fields into arrays, strictly.

If one is malformed, the group is refused, and the error names field, sequence and position.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import NO_TEACHER, Group


def _flat(values: Any, integers: bool) -> np.ndarray:
    """Return a flat list or array as int64 or float64, using ``array``'s strict, fast conversion of lists; None in
    floats becomes NaN.
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in ("iu" if integers else "iuf"):
            raise TypeError(f"an array of {values.dtype} with shape {values.shape}")
        return values.astype(np.int64 if integers else np.float64)
    try:
        return np.frombuffer(array("q" if integers else "d", values), dtype=np.int64 if integers else np.float64)
    except TypeError:
        if integers or None not in values:
            raise
        return _flat([math.nan if value is None else value for value in values], integers)


def array_of(group: Group, key: str, row: int, where: str, dtype: type, length: int) -> np.ndarray:
    """Return row ``row`` of a parallel field as a (length,) array; refuse the group unless it is a flat numeric list.

    Integers are never parsed from strings or rounded from fractions.
    """
    values, integers = group[key][row], np.issubdtype(dtype, np.integer)
    try:
        flat = _flat(values, integers)
    except (TypeError, ValueError, OverflowError) as error:
        what = "whole numbers" if integers else "numbers"
        raise RefusedGroup(Reason.MALFORMED, f"{where}: {key}[{row}] is not a flat list of {what} ({error})") from error
    if len(flat) != length:
        raise RefusedGroup(
            Reason.UNEQUAL_LENGTHS, f"{where}: {key}[{row}] has length {len(flat)}, tokens[{row}] has {length}"
        )
    return flat.astype(dtype, copy=False)


def require_finite(values: np.ndarray, key: str, row: int, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise RefusedGroup(
            Reason(f"nonfinite_{key}"),
            f"{where}: {key}[{row}] is {values[bad[0]]} at position {bad[0]}; it must be finite",
        )


def teacher_top_k(
    group: Group, row: int, where: str, trained: np.ndarray, vocab_size: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, logprobs) of the teacher's top-k by position, both (length, K); only trained positions are filled.

    ``distill_token_ids[row][t]`` holds the candidates for token t given the tokens before it. Untrained positions
    may be empty, as the first position always is.
    """
    length = len(trained)
    positions, sizes = np.flatnonzero(trained), []
    for key in ("distill_token_ids", "distill_logprobs"):
        values = group[key][row] or ()
        if not isinstance(values, Sequence) or any(not isinstance(at, Sequence | None) for at in values):
            raise RefusedGroup(Reason.MALFORMED, f"{where}: {key}[{row}] is not a list of lists, one for each token")
        if len(values) != length:
            raise RefusedGroup(
                Reason.UNEQUAL_LENGTHS, f"{where}: {key}[{row}] has {len(values)} positions, tokens[{row}] has {length}"
            )
        sizes.append(np.array([len(at or ()) for at in values]))
    ids_at, log_probs_at = sizes
    top_k = ids_at[positions[0]]
    bad = np.flatnonzero((ids_at != log_probs_at) | ((ids_at != top_k) & (trained | (ids_at > 0))))
    if bad.size or top_k == 0:
        at = bad[0] if bad.size else positions[0]
        raise RefusedGroup(
            Reason.RAGGED_DISTILLATION,
            f"{where}: sequence {row} has {ids_at[at]} distill_token_ids and {log_probs_at[at]} distill_logprobs at "
            f"position {at}, and {top_k} at its first trained one; give the same top-k at every trained position",
        )
    ids = np.zeros((length, top_k), dtype=np.int64)
    log_probs = np.full((length, top_k), NO_TEACHER)
    for out, key in ((ids, "distill_token_ids"), (log_probs, "distill_logprobs")):
        try:
            flat = _flat([value for t in positions for value in group[key][row][t]], out is ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise RefusedGroup(Reason.MALFORMED, f"{where}: {key}[{row}] holds what is no number ({error})") from error
        out[positions] = flat.reshape(-1, top_k)
    outside = np.argwhere((ids < 0) | (ids >= vocab_size)) if vocab_size else []
    if len(outside):
        at, k = outside[0]
        raise RefusedGroup(
            Reason.FOREIGN_TOKENS,
            f"{where}: distill_token_ids[{row}] is {ids[at, k]} at position {at}, outside the policy's vocabulary of "
            f"{vocab_size}; the teacher must share the policy's tokenizer",
        )
    twice = positions[(np.diff(np.sort(ids[positions], axis=1), axis=1) == 0).any(axis=1)]
    if twice.size:
        at = twice[0]
        raise RefusedGroup(
            Reason.REPEATED_DISTILL_TOKEN,
            f"{where}: distill_token_ids[{row}] is {ids[at].tolist()} at position {at}; name each token once",
        )
    mass = np.exp(log_probs.astype(np.float64)).sum(axis=1)
    bad = np.flatnonzero(~np.isfinite(log_probs).all(axis=1) | (mass > 1.01))
    if bad.size:
        raise RefusedGroup(
            Reason.INVALID_DISTILL_LOGPROBS,
            f"{where}: distill_logprobs[{row}] is {log_probs[bad[0]].tolist()} at position {bad[0]}; they must be "
            "finite logarithms of probabilities that sum to at most 1",
        )
    return ids, log_probs
