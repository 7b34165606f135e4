"""One sequence as it is trained on, why one is not, and what became of a batch.

Shapes: R_i tokens of a response, K a teacher's top-k.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from recipe.atropos.data.sampling import Sampled
from recipe.atropos.errors import AtroposError

IGNORED = -100  # the mask of a token that is not trained on (atroposlib, as in torch's cross-entropy)
NO_TEACHER = np.float32(-1e4)  # logprob of a teacher's token that is not there: its probability is exactly 0 in float32

Group = Mapping[str, Any]  # one ScoredData of the API: parallel lists over sequences


class RefusedGroup(AtroposError, ValueError):
    """A group that breaks the format; ``reason`` is its name in the counts."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class RowLimits:
    """How rows are cut and filled. Lengths in tokens.

    ``overlong`` is what happens to a response longer than ``max_response_length``: "truncate" keeps its beginning,
    "drop" leaves the row out, "error" raises. A longer prompt keeps its end. ``vocab_size``, where given, refuses
    groups that were made with another tokenizer. ``read_teacher`` false passes over the distillation fields.
    """

    max_prompt_length: int
    max_response_length: int
    pad_token_id: int
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    vocab_size: int | None = None
    read_teacher: bool = True

    @classmethod
    def from_config(cls, config: Any, pad_token_id: int, vocab_size: int | None) -> "RowLimits":
        """Of the whole configuration; ``vocab_size`` is the model's, which may have more tokens than its tokenizer."""
        atropos = config.trainer.atropos
        return cls(
            config.data.max_prompt_length,
            config.data.max_response_length,
            pad_token_id,
            overlong=atropos.overlong,
            vocab_size=vocab_size,
            read_teacher=atropos.distillation.loss_coef > 0,
        )

    def __post_init__(self) -> None:
        if self.overlong not in ("truncate", "drop", "error"):
            raise ValueError(f"trainer.atropos.overlong={self.overlong!r}: choose truncate, drop or error")
        if self.max_prompt_length < 1 or self.max_response_length < 1:
            raise ValueError(f"lengths must be positive: {self.max_prompt_length=}, {self.max_response_length=}")


@dataclass(frozen=True)
class VersionLimits:
    """Which weights may have sampled a row, when a policy with ``policy_version`` updates behind it is to be trained.

    A row is at most ``max_staleness`` updates older, by the oldest of its trained tokens; None: of any age.
    """

    policy_version: int
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        bound = self.max_staleness
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
            raise ValueError(f"trainer.atropos.max_staleness={bound!r}: give a whole number of updates >= 0, or null")

    def refuses(self, oldest: int | None, newest: int | None) -> str | None:
        """Why a row with these versions cannot be trained on, as it is counted; None if it can.

        - ``future_version``: newer than the policy, so of a branch that was given up; whatever ``max_staleness`` is,
          and by the oldest version alone where the newest is unknown.
        - ``not_pushed``: by weights that no trainer pushed, those that a server was started with; likewise.
        - ``stale``: too old.
        - ``unknown_version``: what cannot be shown to be within a bound is not trained on.
        """
        if any(version is not None and version > self.policy_version for version in (oldest, newest)):
            return "future_version"
        if oldest is not None and oldest < 0:
            return "not_pushed"
        if self.max_staleness is None:
            return None
        if oldest is None:
            return "unknown_version"
        return "stale" if self.policy_version - oldest > self.max_staleness else None


@dataclass
class ConversionReport:
    """What became of a batch's sequences.

    ``group_sizes`` are the sequences that each group was sent with. ``dropped`` counts those that are not in the batch,
    by reason; ``events`` the rows that are in it, altered or lacking something: prompt_truncated, response_truncated,
    no_logprobs, zero_advantage. ``messages`` are for people.
    """

    group_sizes: list[int] = field(default_factory=list)
    rows: int = 0
    padding_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_by_environment: dict[str, Counter[str]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    @property
    def received(self) -> int:
        """Sequences."""
        return sum(self.group_sizes)

    def drop(self, group: Group, reason: str, sequences: int) -> None:
        """Count sequences of a group that are not in the batch."""
        name = environment_name(*_environment(group))
        self.dropped[reason] += sequences
        self.dropped_by_environment.setdefault(name, Counter())[reason] += sequences

    def metrics(self) -> dict[str, float]:
        """As trainer metrics under ``atropos/``, and drops under ``atropos/ENV/`` too."""
        counts = {"received": self.received, "rows": self.rows, "padding_rows": self.padding_rows}
        counts |= {f"dropped/{reason}": n for reason, n in self.dropped.items()}
        for name, reasons in self.dropped_by_environment.items():
            counts |= {f"{name}/dropped/{reason}": n for reason, n in reasons.items()}
        counts |= {f"rows_with/{event}": n for event, n in self.events.items()}
        return {f"atropos/{key}": float(n) for key, n in counts.items()}


class DroppedRow(NamedTuple):
    """What a group's baseline needs of a scored row that is not trained on."""

    score: float
    trained_tokens: int  # that it had as it was sent, before any cut
    reason: str  # as in ``ConversionReport.dropped``


@dataclass
class Row:
    """One sequence, split at ``first``. Every array over the response has the same length R_i >= 1.

    ``log_probs`` is None where a trained token lacks a valid one; ``advantages``, ``ref_log_probs`` and the teacher's
    top-k are None where the environment sent none. ``versions`` is (oldest, newest) weight version among the trained
    tokens, None if unknown. ``raw_score`` is the score before a reward bridge shaped it, None where none did.
    ``sampling``: the distinct parameters that its trained tokens were sampled with, None if unknown.
    ``dropped`` are the rows that were dropped from the same group.
    """

    prompt: np.ndarray  # (P_i,) int64
    response: np.ndarray  # (R_i,) int64
    mask: np.ndarray  # (R_i,) bool, True where trained on
    score: float
    uid: str
    env_id: int | None = None
    env_name: str | None = None
    versions: tuple[int | None, int | None] = (None, None)
    raw_score: float | None = None
    sampling: Sampled = None
    log_probs: np.ndarray | None = None  # (R_i,) float32
    advantages: np.ndarray | None = None  # (R_i,) float32
    ref_log_probs: np.ndarray | None = None  # (R_i,) float32
    teacher_ids: np.ndarray | None = None  # (R_i, K) int64: the teacher's most likely tokens in this token's place
    teacher_log_probs: np.ndarray | None = None  # (R_i, K) float32, NO_TEACHER where not trained on
    zero_advantage: bool = False
    dropped: tuple[DroppedRow, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.prompt) >= 1 and self.mask.any(), "a row has a prompt and at least one trained token"
        for name in ("mask", "log_probs", "advantages", "ref_log_probs", "teacher_ids", "teacher_log_probs"):
            values = getattr(self, name)
            assert values is None or len(values) == len(self.response), name


def environment_name(name: str | None, env_id: int | None) -> str:
    """What metrics call an environment: its name, else ``env_ID``, else ``unknown``."""
    return str(name).replace("/", "_") if name is not None else "unknown" if env_id is None else f"env_{env_id}"


def _environment(group: Any) -> tuple[Any, Any]:
    """(name, id) of the environment that sent a group, None where it does not say."""
    if not isinstance(group, Mapping):
        return None, None
    overrides = group.get("group_overrides")
    return overrides.get("env_name") if isinstance(overrides, Mapping) else None, group.get("env_id")


def group_name(group: Group, index: int) -> str:
    """How messages call a group: its place in the batch and its environment."""
    name, env_id = _environment(group)
    return f"group {index} of env {name or ('unknown' if env_id is None else env_id)}"
