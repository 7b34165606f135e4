"""Results of the doctor's checks."""

from collections.abc import Callable
from dataclasses import dataclass

from recipe.atropos.errors import AtroposError


class Note(str):
    """What a check returns that has found nothing wrong, but something that a user may want to change."""


Check = Callable[[], str]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. ``message``: what was found or, if not ``ok``, what is wrong and the fix."""

    ok: bool
    message: str
    note: bool = False


def result_of(check: Check) -> CheckResult:
    """Run a check, which raises an AtroposError for what is wrong."""
    try:
        found = check()
    except AtroposError as error:
        return CheckResult(False, str(error))
    return CheckResult(True, str(found), isinstance(found, Note))
