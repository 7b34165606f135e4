"""Results of the doctor's checks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from recipe.atropos.errors import AtroposError, LaunchError


class Note(str):
    """What a check returns that has found nothing wrong, but something that a user may want to change."""


class NotChecked(LaunchError):
    """Another check has failed on which this one depends."""


Check = Callable[[], str]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. ``message``: what was found or, if it failed, what is wrong and the fix."""

    state: Literal["ok", "note", "skipped", "FAILED"]
    message: str

    @property
    def ok(self) -> bool:
        return self.state != "FAILED"


def result_of(check: Check) -> CheckResult:
    """Run a check, which raises an AtroposError for what is wrong."""
    try:
        found = check()
    except AtroposError as error:
        return CheckResult("skipped" if isinstance(error, NotChecked) else "FAILED", str(error))
    return CheckResult("note" if isinstance(found, Note) else "ok", str(found))
