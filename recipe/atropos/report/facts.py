"""Tables of the page: the run in figures, what was dropped and why, its configuration, and installed versions."""

import statistics
import time
from collections import Counter
from datetime import timedelta
from typing import Any

from omegaconf import OmegaConf

from recipe.atropos.checkpoint.model_card import model_name
from recipe.atropos.config.compose import compose_config, leaves
from recipe.atropos.config.schema import documented
from recipe.atropos.data.reasons import Reason
from recipe.atropos.inference.installed import installed_versions
from recipe.atropos.report.run_history import SENT, RunHistory, from_to, shown
from recipe.atropos.utils.files import read_json
from recipe.atropos.utils.secret import HIDDEN, is_secret

_MEANINGS = {reason.value: reason.meaning for reason in Reason} | {
    SENT: "sent to the trainer",
    "response_truncated": "too long: the response's beginning is trained on, what was cut off is not",
    "no_logprobs": "without the server's logprobs",
    "own_advantages": "with the environment's own advantages",
    "teacher": "with a teacher's logprobs",
    "zero_advantage": "with advantages set to 0 by the environment",
    "other_temperature": "sampled at another temperature than the trainer computes with",
    "unknown_sampling": "sampled with unknown parameters",
    "truncated_sampling": "sampled with top_p, top_k or min_p, or greedily",
    "penalized_sampling": "sampled with penalties, a logit bias or a grammar",
    "api_unreachable": "the Trajectory API did not take the group in time",
}

_TOTALS = {  # of the summary, and the metric to add up for a run that has none
    "seconds": "timing_s/step",
    "tokens_trained": "atropos/trained_tokens",
    "sequences_trained": "atropos/rows",
    "groups_trained": "atropos/groups",
}


def figures(history: RunHistory) -> list[list[str]]:
    """Return the run in figures, as [name, value]; the same names for every run, so that two can be compared."""
    times, started = history.column("timing_s/step"), history.started
    before, after, _ = history.training_scores
    held: dict[str, str] = {}
    for name, values in history.held_out.items():
        first, best = values[0], max(values, key=lambda value: value.score)
        held[f"held-out score, {name}"] = f"{first.score:.3f} at step {first.step}"
        if len(values) > 1:
            held[f"held-out score, {name}"] = from_to(first.score, values[-1].score)
            held[f"best held-out score, {name}"] = f"{best.score:.3f} at step {best.step}"
    totals = {key: history.summary.get(key) or sum(history.column(metric)) for key, metric in _TOTALS.items()}
    seconds = max(totals["seconds"], 1e-9)
    restarts = sum(each.get("restarts", 0) for each in history.summary.get("environments", {}).values())
    rows = {
        "state": state(history),
        "steps": f"{history.steps} of {history.total_steps}" if history.total_steps else f"{history.steps}",
        "mean training score, first → last fifth": from_to(before, after) if history.lines else "",
        "scores of trained answers, lowest to highest": history.score_range,
        **held,
        "time in training steps": str(timedelta(seconds=round(totals["seconds"]))),
        "median step": f"{statistics.median(times):.2f} s" if times else "",
        "share of the time waiting for batches": (
            f"{sum(history.column('phase_s/wait')) / seconds:.0%}" if history.lines else ""
        ),
        "tokens trained on": f"{totals['tokens_trained']:,.0f}",
        "trained tokens per second": f"{totals['tokens_trained'] / seconds:,.0f}",
        "sequences trained on": f"{totals['sequences_trained']:,.0f}",
        "groups trained on": f"{totals['groups_trained']:,.0f}",
        "restarts of environments": f"{restarts}" if restarts else "",
        "model": model_name(str(history.config.get("actor_rollout_ref.model.path", "unknown"))),
        "started": "" if started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(started)),
    }
    return [[name, value] for name, value in rows.items() if value]


def state(history: RunHistory) -> str:
    if history.finished:
        return "finished"
    if history.host:
        return f"running on {history.host}, as far as its files say"
    return "running" if history.running else "stopped before it was finished"


def dropped(history: RunHistory) -> list[dict[str, Any]]:
    """Return what was not trained on: ``{"where", "reason", "meaning", "count", "share"}``, most frequent first."""
    totals = {name: history.item_totals(name) for name in history.outcomes}
    sources = [(f"environment {name}, groups", items, sum(items.values())) for name, items in totals.items()]
    received = max(1.0, sum(history.column("atropos/received")))
    sources.append(("trainer, rows", history.totals("atropos/dropped/"), received))
    sources.append(("trainer, rows trained on with", history.totals("atropos/rows_with/"), received))
    return [
        _reason(where, outcome, int(n), n / whole)
        for where, counts, whole in sources
        for outcome, n in counts.most_common()
    ]


def _reason(where: str, outcome: str, count: int, share: float) -> dict[str, Any]:
    name = outcome.rpartition("/")[2]
    meaning = f"the environment's code raised {name}" if outcome.startswith("failed/") else _MEANINGS.get(name, "")
    return {"where": where, "reason": outcome, "meaning": meaning, "count": count, "share": share}


def sessions(history: RunHistory) -> list[list[Any]]:
    """Return, for each environment with sessions, its name and the numbers of those that ended, that failed by cause,
    and that were left out, of forks by cause, retries, and turns with calls, and the turns per session.
    """
    return [
        [
            *(name, n["ended"], _by_cause(n, "failed/"), n["left_out"], _by_cause(n, "forks/"), n["retries"]),
            *(n["tool_calls"], n["turns"] / n["ended"]),
        ]
        for name in history.reports
        if (n := history.session_totals(name))["ended"]
    ]


def _by_cause(counts: Counter[str], prefix: str) -> str:
    found = [(name.removeprefix(prefix), n) for name, n in counts.most_common() if name.startswith(prefix) and n]
    return ", ".join(f"{name} {n:,}" for name, n in found) or "0"


def configuration(history: RunHistory) -> list[list[Any]]:
    """Return [key, value, default if it differs else null, whether the recipe documents it]; secrets are hidden."""
    shipped = compose_config([])
    OmegaConf.resolve(shipped)
    defaults, known, found = dict(leaves(OmegaConf.to_container(shipped))), documented(), []
    for key, value in sorted(history.config.items()):
        default = defaults.get(key, "not set")
        given = HIDDEN if is_secret(key) and value else shown(value)
        found.append([key, given, None if value == default else shown(default), key in known])
    return found


def versions(history: RunHistory) -> tuple[dict[str, str], bool]:
    """Return versions by package, and whether the run recorded them; else they are those that are installed here."""
    recorded = read_json(history.run.identity, {}).get("versions")
    return (recorded, True) if recorded else (installed_versions(history.config.get("inference.python")), False)
