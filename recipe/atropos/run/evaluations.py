"""Evaluations of the policy: the marker file by which the trainer waits for them, and what their results say.

The launcher evaluates the weights that a trainer holds and writes a line of ``evaluations.jsonl`` for each environment.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recipe.atropos.errors import AtroposError
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.files import read_lines, write_atomic

NONE_YET = -1  # no version has been evaluated

_POLL_SECONDS, _MEANWHILE_SECONDS = 0.1, 2.0  # between two looks for an evaluation, and at what else is to be done


class NotEvaluated(AtroposError, RuntimeError):
    """The launcher did not report in time that the weights were evaluated."""


def needs_evaluation(version: int, every: int | None) -> bool:
    """Return whether the trainer keeps ``version`` until it is evaluated: the first, and then each ``every`` updates.

    The last version is evaluated when the trainer has ended.
    """
    return version == 0 or bool(every and version % every == 0)


def mark_evaluated(path: Path, version: int) -> None:
    """Tell the trainer which ``version`` was evaluated last, in a file whose reader never sees a part of the number.

    Without the launcher, no file is configured, and the trainer does not wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, str(version).encode())


def wait_until_evaluated(
    path: str | Path, version: int, timeout: float, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Wait until ``version``, or a later one, was evaluated; call ``meanwhile`` every few seconds.

    Raises:
        NotEvaluated: it was not evaluated within ``timeout`` seconds.
    """
    begun = looked = time.monotonic()
    while int(Path(path).read_text()) < version:
        now = time.monotonic()
        if now - begun > timeout:
            raise NotEvaluated(
                f"version {version} of the weights was not evaluated within {timeout:g} s; see the launcher's output, "
                "or raise evaluation.timeout"
            )
        if now - looked > _MEANWHILE_SECONDS:
            meanwhile()
            looked = time.monotonic()
        time.sleep(_POLL_SECONDS)


def is_accuracy(metric: str) -> bool:
    """Return whether this metric of an evaluation is a share of correct answers, shown in percent."""
    return metric.endswith(("percent_correct", "accuracy"))


def read_evaluations(directory: str | Path) -> list[dict[str, Any]]:
    """Return all lines of ``evaluations.jsonl``."""
    return read_lines(RunDir(directory).evaluations)


class Evaluation(NamedTuple):
    """An environment's main metric at a step; ``items``: on how many it was measured, if that is known."""

    step: int
    score: float
    items: int | None
    metric: str


def held_out(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Evaluation]]:
    """Return the evaluations of each environment, in order, from lines of ``evaluations.jsonl``.

    Those that failed or have no value for the main metric of the environment's first one are left out.
    """
    found: dict[str, list[Evaluation]] = {}
    for line in lines:
        metrics, known = line.get("metrics", {}), found.get(line["env"])
        metric = known[0].metric if known else line.get("main")
        if metric in metrics:
            evaluation = Evaluation(line["step"], metrics[metric], item_count(metrics), metric)
            found.setdefault(line["env"], []).append(evaluation)
    return found


def item_count(metrics: Mapping[str, float]) -> int | None:
    """Return on how many items an environment measured its metrics, if it says so."""
    found = next((value for name, value in metrics.items() if name.endswith("total")), None)
    return None if found is None else int(found)


def heldout_scores(directory: str | Path) -> dict[int, float]:
    """Return the mean of the environments' main metrics, by step, for steps at which all environments were evaluated.

    "All" means those of the two newest steps, so that one failed evaluation does not make another step the best one.
    """
    values: dict[int, dict[str, float]] = {}
    for env, evaluations in held_out(read_evaluations(directory)).items():
        for step, score, *_ in evaluations:
            values.setdefault(step, {})[env] = score
    needed = {env for step in sorted(values)[-2:] for env in values[step]}
    scores = {step: [found[env] for env in needed] for step, found in values.items() if needed <= found.keys()}
    return {step: sum(found) / len(found) for step, found in scores.items()}
