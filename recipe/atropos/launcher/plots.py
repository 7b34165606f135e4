"""Plots of a run, from its ``metrics.jsonl`` and ``evaluations.jsonl``."""

import io
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipe.atropos.run.evaluations import held_out, read_evaluations
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.files import write_atomic

_COLORS = ("#1f6feb", "#bf8700", "#8250df", "#1a7f37", "#bc4c00", "#57606a")
_HELDOUT = "#d1242f"  # color for a single environment


def plot_reward(directory: str | Path, window: int = 5) -> Path:
    """Write ``reward.png``; see ``reward_figure``. Raises DiskFull, leaving an earlier file unchanged."""
    path, picture = RunDir(directory).reward_picture, io.BytesIO()
    reward_figure(directory, window).savefig(picture, dpi=120, format="png")
    write_atomic(path, picture.getvalue())
    return path


@rc_context({"text.parse_math": False})  # a name may hold "$"
def reward_figure(directory: str | Path, window: int = 5) -> Figure:
    """Plot the mean score of each step's sequences, its moving average over ``window`` steps, and the evaluations.

    With several environments, each has one color for its scores and evaluations. Scores are raw, from before reward
    shaping by a reward bridge.
    """
    directory = Path(directory)
    lines = read_metrics(directory)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    keys = sorted({key for line in lines for key in line if key.endswith("/mean_score") and key.count("/") == 2})
    several = {key.split("/")[1]: key for key in keys} if len(keys) > 1 else {}
    colors = dict(zip(several, _COLORS * len(several), strict=False))
    for name, key in several.items():
        _plot_scores(axes, lines, key, window, colors[name], f"score, {name}")
    if not several:
        _plot_scores(axes, lines, "atropos/mean_score", window, _COLORS[0], "mean score of a step's sequences")
    axes.set(xlabel="update", ylabel="score of sampled answers", title=directory.name)
    axes.grid(alpha=0.3)
    _plot_evaluations(axes, directory, colors)
    axes.legend(loc="upper left")
    return figure


def _plot_scores(axes: Axes, lines: list, key: str, window: int, color: str, label: str) -> None:
    raw = key.replace("mean_score", "mean_raw_score")
    steps = np.array([line["step"] for line in lines if key in line])
    scores = np.array([line.get(raw, line[key]) for line in lines if key in line])
    axes.plot(steps, scores, color=color, alpha=0.35, linewidth=1, label=label)
    if len(scores) > window:
        smooth = np.convolve(scores, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color=color, linewidth=2, label=f"its mean over {window} steps")


def _plot_evaluations(axes: Axes, directory: Path, colors: dict[str, str]) -> None:
    curves = {name: found for name, found in held_out(read_evaluations(directory)).items() if len(found) > 1}
    if not curves:
        return
    right = axes.twinx()
    for name, found in curves.items():
        steps, values, _, (metric, *_) = zip(*found, strict=True)
        color = colors.get(name, _HELDOUT)
        label = f"held out, {name}: {metric.removeprefix('eval/')}" if colors else metric.removeprefix("eval/")
        right.plot(steps, values, "o:", color=color, label=label)
        for x, y, *_ in (found[0], found[-1]):
            text = f"{y:.0%}" if 0 <= y <= 1 else f"{y:.3g}"
            right.annotate(text, (x, y), textcoords="offset points", xytext=(0, 8), ha="center", color=color)
    if all(0 <= value <= 1 for found in curves.values() for _, value, *_ in found):
        right.set(ylim=(0, 1.08))
    right.set(ylabel="held-out items")
    right.legend(loc="lower right")
