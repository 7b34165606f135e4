"""What a rule returns: one cause, with what was seen."""

from dataclasses import dataclass

from recipe.atropos.watchdog.alarms import Name


@dataclass(frozen=True)
class Finding:
    """A cause that the history shows now: ``seen`` has the numbers; ``since`` is when that began, in seconds since
    1970, and ``since_step`` the step. ``of_steps``: steps show it, so that only steps can show its end.
    """

    alarm: Name
    seen: str
    since: float
    since_step: int | None = None
    environment: str | None = None
    of_steps: bool = False
