"""Why groups and sequences are not trained on: the names under which the adapter and the trainer count them.

The adapter counts groups that it does not send as ``not_sent/REASON``; the trainer counts sequences that it drops as
``dropped/REASON``.
"""

from enum import StrEnum

from recipe.atropos.errors import AtroposError


class Reason(StrEnum):
    """One vocabulary on both sides; docs/data-format.md lists it."""

    # The format of a group, which is refused as a whole.
    MALFORMED = "malformed"
    EMPTY_GROUP = "empty_group"
    UNEQUAL_LENGTHS = "unequal_lengths"
    NONFINITE_SCORES = "nonfinite_scores"
    NONFINITE_ADVANTAGES = "nonfinite_advantages"
    NONFINITE_INFERENCE_LOGPROBS = "nonfinite_inference_logprobs"
    NONFINITE_REF_LOGPROBS = "nonfinite_ref_logprobs"
    FOREIGN_TOKENS = "foreign_tokens"
    RAGGED_DISTILLATION = "ragged_distillation"
    REPEATED_DISTILL_TOKEN = "repeated_distill_token"
    INVALID_DISTILL_LOGPROBS = "invalid_distill_logprobs"

    # A group's size in sequences, by which the Trajectory API refuses it.
    LARGER_THAN_BATCH = "larger_than_batch"
    DOES_NOT_FILL_BATCH = "does_not_fill_batch"

    # A sequence; the adapter refuses a group in which all of them are without a trained token.
    NO_TRAINED_TOKEN = "no_trained_token"
    NO_PROMPT = "no_prompt"
    OVERLONG_PROMPT = "overlong_prompt"
    OVERLONG_RESPONSE = "overlong_response"

    # The weight versions that sampled a sequence.
    FUTURE_VERSION = "future_version"
    NOT_PUSHED = "not_pushed"
    STALE = "stale"
    UNKNOWN_VERSION = "unknown_version"

    # What an environment made, before it is sent.
    NO_GROUP = "no_group"
    MISSING_TRAJECTORIES = "missing_trajectories"
    WRONG_SIZE = "wrong_size"
    TOO_LONG = "too_long"
    EQUAL_SCORES = "equal_scores"
    NOT_SAMPLED = "not_sampled"
    PARTIAL_REPLY = "partial_reply"
    MARKER_TIMEOUT = "marker_timeout"


class RefusedGroup(AtroposError, ValueError):
    """A group that cannot be trained on; ``reason``, a plain string, is the name under which it is counted."""

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason = reason.value
