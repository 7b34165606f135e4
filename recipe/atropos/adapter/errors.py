"""Why an environment cannot go on."""

from recipe.atropos.errors import AtroposError


class EnvironmentFailure(AtroposError, RuntimeError):
    """Ends the environment; the message says what was wrong, with its value, and what to do."""
