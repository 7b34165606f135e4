"""Hashes of token sequences and of all their beginnings."""

from collections.abc import Sequence

import numpy as np

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # any odd number that is not small


def key_of(ids: Sequence[int] | np.ndarray) -> int:
    """Return a hash of a sequence of tokens."""
    return int(keys_of(ids)[-1])


_powers = np.ones(1, np.uint64)  # powers of _FACTOR, as many as needed so far


def keys_of(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return hashes of the first 0, 1, ... of ``ids``, (len(ids) + 1,) uint64."""
    global _powers
    powers = _powers  # another thread may set others
    if len(ids) > len(powers):
        powers = _powers = np.multiply.accumulate(np.concatenate(([np.uint64(1)], np.full(2 * len(ids), _FACTOR))))
    terms = (np.asarray(ids, np.int64) + 1).astype(np.uint64)
    return np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms * powers[: len(ids)], dtype=np.uint64)))
