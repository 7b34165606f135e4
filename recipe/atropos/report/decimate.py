"""Long series made short enough for a page, without hiding a spike."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
POINTS = 400  # of a curve; a screen has hardly more pixels for one


def buckets(n: int, limit: int = POINTS) -> list[slice]:
    """Return at most ``limit`` slices of about equal length that cover range(n) in order."""
    edges = np.linspace(0, n, min(n, limit) + 1).round().astype(int).tolist()
    return [slice(begin, end) for begin, end in zip(edges, edges[1:], strict=False)]


def spread(items: Sequence[T], limit: int) -> list[T]:
    """Return at most ``limit`` of the items, evenly spread, the first and the last included."""
    places = np.linspace(0, len(items) - 1, min(len(items), limit)).round().astype(int)
    return [items[place] for place in np.unique(places)]


def decimated(xs: Sequence[float], ys: Sequence[float | None], limit: int = POINTS) -> dict[str, Any]:
    """Return a series as ``{"x", "y"}``, with ``"low"`` and ``"high"`` of each bucket if it had to be shortened.

    ``y`` is the mean of its bucket and ``x`` its last; missing and infinite values are None.
    """
    values = np.array([np.nan if y is None else y for y in ys], dtype=float)
    values[~np.isfinite(values)] = np.nan
    if len(values) <= limit:
        return {"x": list(xs), "y": [_short(y) for y in values]}
    found: dict[str, list[Any]] = {"x": [], "y": [], "low": [], "high": []}
    for part in buckets(len(values), limit):
        known = values[part][~np.isnan(values[part])]
        found["x"].append(xs[part.stop - 1])
        for name, reduce in (("y", np.mean), ("low", np.min), ("high", np.max)):
            found[name].append(_short(reduce(known)) if len(known) else None)
    return found


def _short(value: float) -> float | None:
    """Return a number with 5 significant digits, None for NaN."""
    return None if np.isnan(value) else float(f"{value:.5g}")
