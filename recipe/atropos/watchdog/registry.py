"""What an alarm is: ``@alarm`` gives a rule's function the name, the texts, the cause and the chart of what it finds.

A new alarm is one decorated function, in any file of ``rules/``: it can be named in ``watchdog.stop_on``, and stands in
the table of ``docs/alarms.md``, in the console and in the report. A function that tells several causes apart has a
decorator for each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from recipe.atropos.watchdog.history import History

# Keys of the configuration that matter to several alarms.
LR, CLIP = "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.clip_grad"
TEMPERATURE, STALENESS = "actor_rollout_ref.rollout.temperature", "trainer.atropos.max_staleness"
RESPONSE, PROMPT, GROUP_SIZE = "data.max_response_length", "data.max_prompt_length", "environment.group_size"


@dataclass(frozen=True)
class Finding:
    """A cause that the history shows now: ``seen`` has the numbers; ``since`` is when that began, in seconds since
    1970, and ``since_step`` the step. ``of_steps``: steps show it, so that only steps can show its end.
    """

    alarm: str
    seen: str
    since: float
    since_step: int | None = None
    environment: str | None = None
    of_steps: bool = False


class InStep(NamedTuple):
    """What the trainer sees in a single step: ``metric`` above ``limit`` (of ``trainer.atropos.logprob_tolerance`` and
    ``trainer.atropos.sampling_mismatch``), or not finite; ``seen``: the words for its value.
    """

    metric: str
    seen: str = "{value:.0f} rows"
    limit: Callable[[float, str], float] = lambda tolerance, mode: 0.0


class Alarm(NamedTuple):
    """What an alarm means, and what to try: both hold whenever it is raised.

    ``settings``: keys of the configuration that matter to it, whose values the report quotes; ``chart``: the chart or
    section of the report where it shows; ``cause``: its place among the alarms, causes before their symptoms: the
    report's verdict names the first that is raised.
    """

    means: str
    advice: str = ""
    settings: tuple[str, ...] = ()
    chart: str | None = None
    cause: int = 1000
    in_step: InStep | None = None


Rule = Callable[[History, float], Iterator[Finding]]  # of the history and the time, in seconds since 1970
ALARMS: dict[str, Alarm] = {}
RULES: dict[str, Rule] = {}  # by alarm


def alarm(
    name: str,
    *,
    means: str,
    advice: str,
    settings: tuple[str, ...] = (),
    chart: str | None = None,
    cause: int = 1000,
    in_step: InStep | None = None,
) -> Callable[[Rule], Rule]:
    """Decorate the function that finds alarm ``name``; see ``Alarm`` for the arguments."""

    def register(rule: Rule) -> Rule:
        ALARMS[name], RULES[name] = Alarm(means, advice, settings, chart, cause, in_step), rule
        return rule

    return register


def seen_in_step(name: str, value: float | None, tolerance: float) -> str:
    """Return what a step showed; ``value`` is None where it is not finite, which JSON cannot hold."""
    declared = ALARMS[name].in_step
    return declared.seen.format(value=float("nan") if value is None else value, tolerance=tolerance) if declared else ""
