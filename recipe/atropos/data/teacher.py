"""Read a teacher's top-k from a scored group's distillation fields."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import NO_TEACHER
from recipe.atropos.data.scored_group import flat_numbers

TOP_K_FIELDS = ("distill_token_ids", "distill_logprobs")


def teacher_top_k(
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
