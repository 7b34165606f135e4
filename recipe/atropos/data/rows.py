"""Data classes: a row to train on, a dropped row, their limits, and the report of a batch's conversion.

Shapes: R_i response tokens of row i, K the teacher's top-k.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from recipe.atropos.data.reasons import Reason
from recipe.atropos.data.sampling import Sampled

IGNORED = -100  # the mask of a token that is not trained on (atroposlib, as in torch's cross-entropy)
NO_TEACHER = np.float32(-1e4)  # logprob of a missing teacher token: its probability is exactly 0 in float32


@dataclass(frozen=True)
class RowLimits:
    """How long rows may be: ``max_length`` is the tokens of prompt and response together.

    A row within it is kept whole. ``overlong`` says what happens to a longer one: "drop" drops it, "truncate" cuts the
    end of its response, "error" raises. A prompt is never cut: its row would be trained in a context in which it was
    not sampled. If ``vocab_size`` is given, groups with tokens outside it (from another tokenizer) are refused.
    ``read_teacher=False`` ignores the distillation fields; ``needs_teacher``: without them nothing is learned.
    """

    max_length: int
    pad_token_id: int
    overlong: Literal["drop", "truncate", "error"] = "drop"
    vocab_size: int | None = None
    read_teacher: bool = True
    needs_teacher: bool = False

    @classmethod
    def from_config(cls, config: Any, pad_token_id: int, vocab_size: int | None) -> "RowLimits":
        """Build from the full configuration; ``vocab_size`` is the model's, which may exceed its tokenizer's."""
        atropos = config.trainer.atropos
        return cls(
            config.data.max_prompt_length + config.data.max_response_length,
            pad_token_id,
            overlong=atropos.overlong,
            vocab_size=vocab_size,
            read_teacher=atropos.distillation.loss_coef > 0,
            needs_teacher=not atropos.distillation.use_policy_loss,
        )


@dataclass(frozen=True)
class VersionLimits:
    """Which weight versions may have sampled the rows that train the policy at version ``policy_version``.

    The oldest of a row's trained tokens may be at most ``max_staleness`` updates older than the policy; None: any age.
    """

    policy_version: int
    max_staleness: int | None = None

    def refuses(self, oldest: int | None, newest: int | None) -> Reason | None:
        """Return the counted reason why a row with these versions cannot be trained on, or None if it can.

        - ``future_version``: newer than the policy, so from an abandoned branch of the training; for any
          ``max_staleness``, and by the oldest version alone if the newest is unknown.
        - ``not_pushed``: from a server's initial weights, which no trainer pushed; for any ``max_staleness``.
        - ``stale``: too old.
        - ``unknown_version``: ``max_staleness`` is set, and the row cannot be shown to meet it.
        """
        if any(version is not None and version > self.policy_version for version in (oldest, newest)):
            return Reason.FUTURE_VERSION
        if oldest is not None and oldest < 0:
            return Reason.NOT_PUSHED
        if self.max_staleness is None:
            return None
        if oldest is None:
            return Reason.UNKNOWN_VERSION
        return Reason.STALE if self.policy_version - oldest > self.max_staleness else None


@dataclass
class ConversionReport:
    """What happened to a batch's sequences.

    ``group_sizes`` holds the number of trajectories that each group was sent with, ``received`` counts the sequences.
    ``dropped`` counts the sequences left out of the batch, by reason; ``events`` counts rows in it: response_truncated,
    no_logprobs, own_advantages, teacher, zero_advantage. ``messages`` are human-readable.
    """

    group_sizes: list[int] = field(default_factory=list)
    received: int = 0
    rows: int = 0
    padding_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_by_environment: dict[str, Counter[str]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def drop(self, environment: str, reason: str, sequences: int) -> None:
        """Count dropped sequences of a group; ``environment`` is its ``environment_name``."""
        self.dropped[reason] += sequences
        self.dropped_by_environment.setdefault(environment, Counter())[reason] += sequences

    def metrics(self) -> dict[str, float]:
        """Return trainer metrics under ``atropos/``, with drops also under ``atropos/ENV/``."""
        by_environment = self.dropped_by_environment.items()
        counts = {
            "received": self.received,
            "rows": self.rows,
            "padding_rows": self.padding_rows,
            **{f"dropped/{reason}": n for reason, n in self.dropped.items()},
            **{f"{name}/dropped/{reason}": n for name, reasons in by_environment for reason, n in reasons.items()},
            **{f"rows_with/{event}": n for event, n in self.events.items()},
        }
        return {f"atropos/{key}": float(n) for key, n in counts.items()}


def describe_drops(lost: Mapping[str, Counter[str]]) -> str:
    """Return the numbers of dropped sequences by environment and reason as text."""
    parts = (f"{name}: {', '.join(f'{reason} {n}' for reason, n in lost[name].most_common())}" for name in lost)
    return "; ".join(parts) or "no sequence came"


class DroppedRow(NamedTuple):
    """What a group's baseline needs to know about a scored row that is not trained on."""

    score: float
    trained_tokens: int  # as sent, before any truncation
    reason: str  # as in ``ConversionReport.dropped``
    trajectory: int | None = None  # as of a ``Row``


@dataclass
class Row:
    """One sequence, split into prompt and response. All arrays over the response have the same length R_i >= 1.

    ``log_probs`` is None if a trained token lacks a valid one; ``advantages``, ``ref_log_probs`` and the teacher's
    top-k are None if the environment sent none. ``versions`` is the (oldest, newest) weight version among the trained
    tokens, None if unknown. ``raw_score`` is the score before a reward bridge shaped it, None if none did.
    ``credit`` is the rule that made ``advantages``, None if the environment did not say one.
    ``sampling`` holds the distinct parameters that its trained tokens were sampled with, None if unknown.
    ``dropped`` holds the rows that were dropped from the same group.

    Rows of a group with the same number ``trajectory`` are of one trajectory, in the order of their ``sequence``; None
    if the row is a trajectory of its own.
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
    credit: str | None = None
    ref_log_probs: np.ndarray | None = None  # (R_i,) float32
    teacher_ids: np.ndarray | None = None  # (R_i, K) int64: the teacher's most likely tokens at this position
    teacher_log_probs: np.ndarray | None = None  # (R_i, K) float32, NO_TEACHER where not trained on
    zero_advantage: bool = False
    dropped: tuple[DroppedRow, ...] = ()
    sequence: int = 0  # its number in the group
    trajectory: int | None = None

    def __post_init__(self) -> None:
        assert len(self.prompt) >= 1 and self.mask.any(), "a row has a prompt and at least one trained token"
        for name in ("mask", "log_probs", "advantages", "ref_log_probs", "teacher_ids", "teacher_log_probs"):
            values = getattr(self, name)
            assert values is None or len(values) == len(self.response), name


ENV_IDS_PER_RUN = 1000  # ids of a run's environments begin at a multiple of it, so that no two runs share them


def environment_name(name: str | None, env_id: int | None) -> str:
    """Return an environment's name in metrics: its own name, else ``env_N``, the N-th of its run, else ``unknown``."""
    if name is not None:
        return str(name).replace("/", "_")
    return "unknown" if env_id is None else f"env_{env_id % ENV_IDS_PER_RUN}"


def trained_spans(masks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each run of positions that are trained on."""
    end = 0
    for trained, run in groupby(masks, lambda mask: mask != IGNORED):
        start, end = end, end + len(list(run))
        if trained:
            yield start, end


def one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Return the ids with a single BOS token if both chat template and tokenizer added one."""
    return ids[1:] if len(ids) >= 2 and ids[0] == tokenizer.bos_token_id == ids[1] else list(ids)
