"""Pictures of a run, from its ``metrics.jsonl`` and ``summary.json``."""

from pathlib import Path

import numpy as np
import orjson
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipe.atropos.run_record import read_metrics


def plot_reward(directory: str | Path, window: int = 5) -> Path:
    """Write ``reward.png``: mean score of each step's sequences, its mean over ``window`` steps, held-out accuracy.

    The score is the environment's, before a reward bridge shaped it.
    """
    directory = Path(directory)
    lines = read_metrics(directory)
    summary_path = directory / "summary.json"
    summary = orjson.loads(summary_path.read_bytes()) if summary_path.exists() else {}
    steps = np.array([line["step"] for line in lines])
    scores = np.array([line.get("atropos/mean_raw_score", line["atropos/mean_score"]) for line in lines])

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, scores, color="#9aa5b1", linewidth=1, label="mean score of a step's sequences")
    if len(scores) >= window:
        smooth = np.convolve(scores, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color="#1f6feb", linewidth=2, label=f"its mean over {window} steps")
    axes.set(xlabel="update", ylabel="score of sampled answers (-1 wrong, +1 right)", title=directory.name)
    axes.grid(alpha=0.3)
    before, after = summary.get("heldout_accuracy_before"), summary.get("heldout_accuracy_after")
    if before is not None and after is not None and len(steps):
        right = axes.twinx()
        right.plot([0, steps[-1]], [before, after], "o", color="#d1242f", label="held-out accuracy, greedy")
        right.set(ylabel=f"right of {summary.get('heldout_problems', 0):.0f} held-out problems", ylim=(0, 1.08))
        for x, y in ((0, before), (steps[-1], after)):
            right.annotate(f"{y:.0%}", (x, y), textcoords="offset points", xytext=(0, 8), ha="center", color="#d1242f")
        right.legend(loc="lower right")
    axes.legend(loc="upper left")
    path = directory / "reward.png"
    figure.savefig(path, dpi=120)
    return path
