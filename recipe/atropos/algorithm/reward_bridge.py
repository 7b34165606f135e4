r"""The universal reward bridge: a YAML block that shapes any environment's scores, without changes to the environment.

    reward_bridge:
      format_markers:                  # what an answer must, or must not, contain
        - {pattern: '<think>', weight: 0.1, ordered: true}
        - {pattern: '</think>', weight: 0.1, ordered: true, count: once}
        - {pattern: '(?i)as an ai', regex: true, presence: forbidden, weight: 0.2}
        - '<answer>'                   # {pattern: '<answer>', weight: 0.1}
      answer_present: {pattern: '\\boxed\{([^}]*)\}', regex: true, weight: 0.3}
      length_bounty: {target: 200, slope: 0.001, cap: 0.1}
      soft_overlong: {max_length: 20480, cache: 4096, weight: 0.2}
      clip: [-0.3, 0.5]
      fade: {from_step: 50, to_step: 100}
      send_equal_raw: true
      right_margin: 1.0

The bridge judges each trajectory that an environment scored, all of its rows together. Its text is the decoded trained
tokens, without special tokens; it excludes what the environment wrote between turns, and joins turns with a newline.
Its length is the number of its trained tokens, including special tokens. The steps, in order:

1. ``format_markers``: each adds ``weight`` if its pattern occurs or, with ``presence: forbidden``, subtracts it.
   ``count``: ``any`` (at least one occurrence), ``once`` (exactly one), ``each`` (``weight`` for every one).
   ``ordered`` markers form a chain in the order of the list: an occurrence counts only if it begins at or after the
   end of the previous ordered marker's first counted occurrence, and none counts after a marker that earned nothing.
2. ``answer_present`` adds ``weight`` if there is an answer: more than whitespace in the first group of the regular
   expression (in the whole match, if it has no group), or after the last occurrence of a literal pattern.
3. ``length_bounty`` adds ``slope * (length - target)``, at least ``-cap`` and at most ``cap``.
4. ``soft_overlong`` adds DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) times ``weight``, 1 by default: 0
   up to ``max_length - cache``, then linearly down to -1 at ``max_length``, and -1 beyond.
5. The sum of these is clipped to ``clip``.
6. ``fade``: it is multiplied by 1 up to the trainer's step ``from_step``, by 0 from ``to_step`` on, linearly in
   between. The step is BaseEnv's ``curr_step``, from the Trajectory API, which counts the batches that it has cut.
7. The environment's score is added; this raw score is kept in ``group_overrides["raw_scores"]``, a list.

Guarantees:

- A right answer outweighs all shaping: the largest difference that a configuration can make between two sequences must
  be less than ``right_margin``, the least difference between the environment's scores of a right and a wrong answer.
  1.0 fits scores of 0 and 1, and of -1 and 1. Intermediate scores may still change ranks; groups in which any do are
  counted, as ``shaping/rank_inversions``.
- ``send_equal_raw: true``: a group of equal raw scores is sent if the shaped ones differ, even if its environment drops
  such groups, as most do. False: it gives no gradient, however its answers differ. It is not sent, or, where the
  environment sends groups of equal scores, sent unshaped.
- Evaluation is never shaped: only what goes to the Trajectory API is.
- No score becomes 0 because it could not be judged. Per-token advantages, which the trainer uses instead of scores, end
  the environment with a message; a group is not sent, and is counted, if a regular expression takes too long on its
  text, or if its scores are not numbers.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import regex
import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from recipe.atropos.errors import AtroposError
from recipe.atropos.utils.patterns import matches

KEY = "reward_bridge"
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Pattern = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
Step = Annotated[int, Field(ge=0)]


class RewardBridgeError(AtroposError, ValueError):
    """An invalid configuration, or an environment that the bridge cannot shape; the message names the fix."""


@dataclass(frozen=True, config=_STRICT)
class Marker:
    pattern: Pattern
    weight: Positive = 0.1
    regex: bool = False
    presence: Literal["required", "forbidden"] = "required"
    count: Literal["any", "once", "each"] = "any"
    ordered: bool = False

    def __post_init__(self) -> None:
        _compiled(self.pattern, self.regex)
        if self.presence == "forbidden" and (self.ordered or self.count == "once"):
            wrong = "ordered: true" if self.ordered else "count: once"
            raise ValueError(f"{wrong} means nothing where pattern {self.pattern!r} is forbidden; leave it out")

    def find(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of the occurrences that may count, in order; none if ``count: once`` finds several."""
        spans = [match.span() for match in matches(_compiled(self.pattern, self.regex), text)]
        return [] if self.count == "once" and len(spans) != 1 else spans

    def earned(self, occurrences: int) -> float:
        if not occurrences:
            return 0.0
        signed = self.weight if self.presence == "required" else -self.weight
        return signed * occurrences if self.count == "each" else signed

    @property
    def bounds(self) -> list[float]:
        return sorted([0.0, self.earned(1) if self.count != "each" else math.copysign(math.inf, self.earned(1))])


@dataclass(frozen=True, config=_STRICT)
class AnswerPresent:
    pattern: Pattern
    weight: Positive
    regex: bool = False

    def __post_init__(self) -> None:
        _compiled(self.pattern, self.regex)

    def earned(self, text: str) -> float:
        found = matches(_compiled(self.pattern, self.regex), text)
        if self.regex:
            answers = [match[1] if match.re.groups else match[0] for match in found]
        else:
            answers = [text[match.end() :] for match in found[-1:]]
        return self.weight if any(answer and answer.strip() for answer in answers) else 0.0

    @property
    def bounds(self) -> list[float]:
        return [0.0, self.weight]


@dataclass(frozen=True, config=_STRICT)
class LengthBounty:
    """Score for length: ``target`` in trained tokens, ``slope`` in score per token, ``cap`` in score."""

    target: Annotated[int, Field(ge=0)]
    slope: float
    cap: Positive

    def __post_init__(self) -> None:
        if not self.slope:
            raise ValueError("slope=0 does nothing; give score a token, negative for short answers, or leave it out")

    def earned(self, length: int) -> float:
        return max(-self.cap, min(self.cap, self.slope * (length - self.target)))

    @property
    def bounds(self) -> list[float]:
        return sorted([self.earned(0), math.copysign(self.cap, self.slope)])


@dataclass(frozen=True, config=_STRICT)
class SoftOverlong:
    """DAPO's punishment: ``max_length`` (L_max) and ``cache`` (L_cache) in trained tokens, ``weight`` in score."""

    max_length: Annotated[int, Field(gt=0)]
    cache: Annotated[int, Field(gt=0)]
    weight: Positive = 1.0

    def __post_init__(self) -> None:
        if self.cache > self.max_length:
            raise ValueError(f"cache={self.cache} is more than max_length={self.max_length}; give fewer tokens")

    def earned(self, length: int) -> float:
        return self.weight * max(-1.0, min(0.0, (self.max_length - self.cache - length) / self.cache))

    @property
    def bounds(self) -> list[float]:
        return [-self.weight, 0.0]


@dataclass(frozen=True, config=_STRICT)
class Fade:
    """Linear fade-out of the shaping, in trainer steps."""

    from_step: Step
    to_step: Step

    def __post_init__(self) -> None:
        if self.to_step <= self.from_step:
            raise ValueError(f"to_step={self.to_step} must be above from_step={self.from_step}")

    def weight(self, step: int) -> float:
        return max(0.0, min(1.0, (self.to_step - step) / (self.to_step - self.from_step)))


@dataclass(frozen=True, config=_STRICT)
class RewardBridge:
    """The ``reward_bridge`` block; see the module docstring."""

    format_markers: list[Annotated[Marker, BeforeValidator(lambda m: {"pattern": m} if isinstance(m, str) else m)]] = (
        field(default_factory=list)
    )
    answer_present: AnswerPresent | None = None
    length_bounty: LengthBounty | None = None
    soft_overlong: SoftOverlong | None = None
    clip: tuple[float, float] | None = None
    fade: Fade | None = None
    send_equal_raw: bool = True
    right_margin: Positive = 1.0

    def __post_init__(self) -> None:
        if self.clip and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip={list(self.clip)}: the first must be below the second")
        difference = self.largest_difference
        if difference == 0:
            raise ValueError("shapes nothing; give format_markers, answer_present, length_bounty or soft_overlong")
        if math.isinf(difference):
            raise ValueError("count: each has no bound; give clip: [lowest, highest]")
        if difference >= self.right_margin:
            raise ValueError(
                f"can make a difference of {difference:g} between two answers, and a right one is worth only "
                f"right_margin={self.right_margin:g}: lower the weights or the cap, give a narrower clip, or say by "
                "right_margin how far the environment's scores of right and wrong lie apart, where that is further"
            )

    @property
    def largest_difference(self) -> float:
        """Largest difference between the shaping of any two sequences; inf if it is unbounded."""
        terms = [*self.format_markers, self.answer_present, self.length_bounty, self.soft_overlong]
        lows, highs = zip(*[term.bounds for term in terms if term is not None] or [(0.0, 0.0)], strict=True)
        return self._clipped(sum(highs)) - self._clipped(sum(lows))

    def terms(self, text: str, length: int) -> dict[str, float]:
        """Return each part's score for a sequence, by name: ``marker_0``, ..., before ``clip`` and ``fade``.

        Raises:
            TimeoutError: a regular expression took too long; names it.
        """
        found, chain = {}, 0.0
        for number, marker in enumerate(self.format_markers):
            spans = [span for span in marker.find(text) if not marker.ordered or span[0] >= chain]
            found[f"marker_{number}"] = marker.earned(len(spans))
            if marker.ordered:
                chain = spans[0][1] if spans else math.inf
        for name, judged in (("answer_present", text), ("length_bounty", length), ("soft_overlong", length)):
            if (term := getattr(self, name)) is not None:
                found[name] = term.earned(judged)
        return found

    def weight(self, step: int) -> float:
        """Return the weight of the shaping at a trainer step, from 1 to 0."""
        return 1.0 if self.fade is None else self.fade.weight(step)

    def shaped(self, raw: float, terms: Mapping[str, float], step: int) -> float:
        return raw + self.weight(step) * self._clipped(sum(terms.values()))

    def _clipped(self, value: float) -> float:
        return value if self.clip is None else max(self.clip[0], min(self.clip[1], value))


@cache
def _compiled(pattern: str, is_regex: bool) -> regex.Pattern:
    try:
        return regex.compile(pattern if is_regex else regex.escape(pattern))
    except regex.error as error:
        raise ValueError(
            f"pattern={pattern!r} does not compile: {error}; correct it, or leave out regex to take it literally"
        ) from error


# ---------------------------------------------------------------------- reading the block

_PARTS = {
    "format_markers": Marker,
    "answer_present": AnswerPresent,
    "length_bounty": LengthBounty,
    "soft_overlong": SoftOverlong,
    "fade": Fade,
}


def parse_bridge(block: Any, name: str = KEY) -> RewardBridge:
    """Return the bridge of a block as read from YAML; error messages call the block ``name``.

    Raises:
        RewardBridgeError: names every key that is unknown, missing or has an invalid value.
    """
    try:
        return TypeAdapter(RewardBridge).validate_json(json.dumps(block, default=str))
    except ValidationError as error:
        raise RewardBridgeError("; ".join(_explain(each, name) for each in error.errors())) from error


def read_bridge(path: str | Path) -> RewardBridge:
    """Return the bridge of a YAML file that holds the block, with or without its key, or of the block itself, {...}.

    Raises:
        RewardBridgeError: the file cannot be read, is not YAML, or ``parse_bridge`` rejects it.
    """
    inline = str(path).startswith("{")
    try:
        block = yaml.safe_load(path if inline else Path(path).read_text())
        return parse_bridge(block[KEY] if isinstance(block, Mapping) and list(block) == [KEY] else block)
    except OSError as error:
        raise RewardBridgeError(f"{path}: {error.strerror}; give a YAML file with the block {KEY}") from error
    except yaml.YAMLError as error:
        raise RewardBridgeError(f"{path} is not valid YAML: {error}") from error
    except RewardBridgeError as error:
        raise RewardBridgeError(f"{'in the block' if inline else path}: {error}") from error


def _explain(error: Mapping[str, Any], name: str) -> str:
    place, value = error["loc"], error["input"]
    key = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    names = ", ".join(each.name for each in fields(_PARTS.get(next(iter(place), ""), RewardBridge)))
    texts = {
        "dataclass_type": f"{key}={value!r}: give a mapping of {names}",
        "list_type": f"{key}={value!r}: give a list, [...]",
        "missing": f"{key} is missing",
        "unexpected_keyword_argument": f"{key}={value!r}: no such key; there are {names}",
        "value_error": f"{key}: {error.get('ctx', {}).get('error')}",
    }
    return texts.get(error["type"], f"{key}={value!r}: {error['msg']}")
