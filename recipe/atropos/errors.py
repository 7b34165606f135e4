"""The root of this recipe's errors.

An ``AtroposError`` says by itself what is wrong, with the offending value and the fix, so an entry point prints its
message on one line and exits with a status other than 0. Any other exception is a defect, and keeps its traceback.
"""


class AtroposError(Exception):
    """An expected failure: its message is all that a user needs."""


class ConfigurationError(AtroposError, ValueError):
    """A value in the configuration that cannot work; the message says which, and what to give instead."""
