"""Why an environment cannot go on."""


class EnvironmentFailure(RuntimeError):
    """Ends the environment; the message says what was wrong, with its value, and what to do."""
