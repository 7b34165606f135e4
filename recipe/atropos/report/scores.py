"""What the scores of a run say: held-out and training scores, and whether they changed beyond their noise."""

import numpy as np

from recipe.atropos.report.run_history import RunHistory

_LEAST = 0.02  # change of a held-out score whose number of items is unknown


def gains(history: RunHistory) -> dict[str, float]:
    """Return the change of each held-out score from first to last, 0 where so few items make it by chance.

    Two standard errors of the difference of two shares; environments with one evaluation are left out.
    """
    found = {}
    for name, values in history.held_out.items():
        if len(values) > 1:
            (_, before, of, _), (_, after, items, _) = values[0], values[-1]
            noise = _LEAST
            if of and items and 0 <= min(before, after) and max(before, after) <= 1:
                noise = 2 * float(np.sqrt(before * (1 - before) / of + after * (1 - after) / items))
            found[name] = after - before if abs(after - before) > noise else 0.0
    return found


def from_to(before: float, after: float) -> str:
    """Return two scores as text: three decimals, more where two different ones would look the same."""
    digits = next((n for n in range(3, 9) if f"{before:.{n}f}" != f"{after:.{n}f}"), 3)
    return f"{before:.{digits}f} → {after:.{digits}f}".replace("-", "−")


def score_range(history: RunHistory) -> tuple[float, float] | None:
    """Return the lowest and the highest score of a trained row, as shaped, if they were recorded."""
    low, high = history.column("critic/score/min"), history.column("critic/score/max")
    return (min(low), max(high)) if low and high else None


def extent(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}".replace("-", "−")


def training_scores(history: RunHistory) -> tuple[float, float, float]:
    """Return the mean score of the first and of the last fifth of the steps, and two standard errors of the change.

    Scores are raw: from before a reward bridge shaped them.
    """
    scores = np.array(history.column("atropos/mean_raw_score") or history.column("atropos/mean_score"))
    if not len(scores):
        return 0.0, 0.0, float("inf")
    part = max(1, len(scores) // 5)
    first, last = scores[:part], scores[-part:]
    noise = 2 * float(np.sqrt((first.var() + last.var()) / part)) if part > 1 else float("inf")
    return float(first.mean()), float(last.mean()), noise
