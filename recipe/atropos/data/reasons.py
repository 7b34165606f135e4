"""Why groups and sequences are not trained on: the names under which the adapter and the trainer count them.

The adapter counts groups that it does not send as ``not_sent/REASON``; the trainer counts sequences that it drops as
``dropped/REASON``.
"""

from enum import StrEnum

from recipe.atropos.errors import AtroposError


class Reason(StrEnum):
    """One vocabulary on both sides; ``meaning`` is what the report and docs/data-format.md (``table``) say of it."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> "Reason":
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    # The format of a group, which is refused as a whole.
    MALFORMED = "malformed", "not a group, a field of another type, or a missing number"
    EMPTY_GROUP = "empty_group", "a group without answers, or with an answer without tokens"
    UNEQUAL_LENGTHS = "unequal_lengths", "fields of different lengths within a group or a sequence"
    NONFINITE_SCORES = "nonfinite_scores", "a score that is missing, NaN, or larger than 1e15"
    NONFINITE_ADVANTAGES = "nonfinite_advantages", "an advantage that is missing, NaN, or larger than 1e15"
    NONFINITE_INFERENCE_LOGPROBS = (
        "nonfinite_inference_logprobs",
        "a logprob that is NaN or infinite: the server's numbers are broken",
    )
    NONFINITE_REF_LOGPROBS = "nonfinite_ref_logprobs", "a reference logprob that is NaN or infinite"
    FOREIGN_TOKENS = "foreign_tokens", "a token outside the vocabulary: from another tokenizer"
    RAGGED_DISTILLATION = "ragged_distillation", "a teacher's top-k of unequal lengths"
    REPEATED_DISTILL_TOKEN = "repeated_distill_token", "a teacher's top-k that names a token twice"
    INVALID_DISTILL_LOGPROBS = "invalid_distill_logprobs", "a teacher's logprobs that are not a distribution"

    # A group's size in sequences, by which the Trajectory API refuses it.
    LARGER_THAN_BATCH = (
        "larger_than_batch",
        "more sequences than the trainer's batch has; the Trajectory API refuses it",
    )
    DOES_NOT_FILL_BATCH = (
        "does_not_fill_batch",
        "a size that does not divide the batch of a stock trainer, and never fills it",
    )

    # A sequence; the adapter refuses a group in which all of them are without a trained token.
    NO_TRAINED_TOKEN = "no_trained_token", "no token to train on"
    NO_PROMPT = "no_prompt", "the first token is one to train on"
    OVERLONG_PROMPT = (
        "overlong_prompt",
        "its prompt alone is longer than data.max_prompt_length + data.max_response_length",
    )
    OVERLONG_RESPONSE = "overlong_response", "longer than data.max_prompt_length + data.max_response_length"

    NO_TEACHER = "no_teacher", "no teacher in its batch, with distillation alone"

    # The weight versions that sampled a sequence.
    FUTURE_VERSION = "future_version", "sampled by weights of an abandoned branch of the training"
    NOT_PUSHED = "not_pushed", "sampled by weights that no trainer pushed"
    STALE = "stale", "sampled by weights older than trainer.atropos.max_staleness"
    UNKNOWN_VERSION = "unknown_version", "sampled by unknown weights, and max_staleness is set"

    # What an environment made, before it is sent.
    NO_GROUP = "no_group", "the environment made no group"
    MISSING_TRAJECTORIES = "missing_trajectories", "the environment made no group, or an incomplete one"
    WRONG_SIZE = "wrong_size", "another number of answers than group_size"
    TOO_LONG = "too_long", "longer than the trainer takes"
    EQUAL_SCORES = "equal_scores", "all answers of the group have the same score: there is no advantage"
    NOT_SAMPLED = "not_sampled", "no server sampled any of its tokens"
    PARTIAL_REPLY = "partial_reply", "only the end of each reply, as by a chat template that removes thinking"
    MARKER_TIMEOUT = "marker_timeout", "a pattern of the reward bridge or of credit.spans took too long"


def table() -> str:
    """Return the rows of the table in ``docs/data-format.md``."""
    return "".join(f"| `{reason}` | {reason.meaning} |\n" for reason in Reason)


class RefusedGroup(AtroposError, ValueError):
    """A group that cannot be trained on; ``reason``, a plain string, is the name under which it is counted."""

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason = reason.value
