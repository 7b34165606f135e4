"""The advantages of a scored group's tokens, by the rules of ``rules``.

``add_credit`` works on any ``ScoredDataGroup`` of atroposlib, in any ``BaseEnv``, with or without this recipe's
trainer: it writes the group's ``advantages``. The launcher does the same for an unmodified environment by
``environment.credit``. What it reads of the group, beside tokens, masks and scores, is in ``group_overrides``:

- ``turn_values``: for each sequence the environment's check after each of its turns, in units of the score; null after
  an episode's last one, if it has none but the score;
- ``turn_states``: for each sequence what it calls the state before each turn; without it, the tokens before it;
- ``raw_scores``: the environment's own, where a reward bridge has shaped the scores; read by ``outcome_gate``;
- ``trajectory``: sequences of one number are one episode, whose turns are those of all of them, in order;
- ``turn_numbers``: for each sequence the place of each of its turns in its episode, where that is another order;
- ``branches``: for each sequence null, or [of which sequence, after how many of its turns] it goes on; their turns come
  first in it, and are not trained again.

A turn is a run of trained tokens. A token that is not trained has advantage 0. The group then says by which rule it was
given, in ``credit`` of its ``group_overrides``.
"""

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import regex
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recipe.atropos.credit.rules import Decisions, advantages, outcome_advantages
from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.rows import IGNORED, trained_spans
from recipe.atropos.data.scored_group import trajectory_numbers
from recipe.atropos.data.token_keys import keys_of
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.utils.importing import named_function
from recipe.atropos.utils.patterns import matches
from recipe.atropos.utils.tasks import guarded, in_own_thread

_SECONDS = 60.0  # that the values of a group's turns may take


class CreditError(ConfigurationError):
    """What the environment gives cannot be credited; the message names it."""


class Teacher(BaseModel):
    """Who else judges each token; the keys of ``environment.credit.teacher``: another model, or the same policy that is
    told more. The server is SGLang, with the policy's tokenizer; it judges at temperature 1, as the policy must sample.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str | None = Field(
        None, pattern=r"^https?://[^\s@]+$", description="The server's address; null: the policy's own server"
    )
    api_key_env: str | None = Field(None, description="The variable that holds that server's key, if it has one")
    hint: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="MODULE:function(item) -> text that the teacher reads before a row's own prompt, as the solution",
    )
    scale: float = Field(1.0, gt=0, description="Factor of log(teacher's probability / policy's) of a sampled token")

    def function(self) -> Callable[[Any], str] | None:
        """Return the function that ``hint`` names. Raises ConfigurationError if there is none."""
        return None if self.hint is None else named_function(self.hint, "environment.credit.teacher.hint")


class Credit(BaseModel):
    """How credit is given; the keys of ``environment.credit``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spans: str = Field(
        "turns",
        min_length=1,
        description="turns; or parts of them, which need values: tool_calls, answer (what is before it, and it), "
        "markers of a format, or a regular expression over text and special tokens: each match ends a decision",
    )
    values: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="MODULE:function(item, text) -> what was reached by the text of an episode so far, in units of the "
        "score; null: the environment's own turn_values, if it gives some",
    )
    method: Literal["progress", "gigpo", "vineppo", "mt_grpo"] = Field(
        "progress",
        description="progress, the kit's own, or a paper's formula, unscaled: vineppo takes values for V, mt_grpo for "
        "turns' own rewards; gigpo compares equal turn_states",
    )
    weight: float = Field(1.0, ge=0, description="Of gigpo's step part, its omega, or mt_grpo's turn part")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount of what follows by each decision")
    lam: float = Field(0.5, ge=0, le=1, description="Weight of what follows: 0 trusts the values, 1 the outcome alone")
    mix: float = Field(0.0, ge=0, le=1, description="Share of outcome GRPO")
    shrink: float = Field(
        0.0,
        ge=0,
        description="Turn tree without values: V of a turn is shrunk to V before it as by so many leaves of that worth",
    )
    outcome_gate: bool = Field(
        False, description="No gradient from groups whose scores, before any reward bridge, are equal"
    )
    teacher: Teacher | None = Field(
        None,
        description="On-policy distillation: a token's advantage is log(teacher's probability / policy's), minus a "
        "reverse KL's estimate by one sample; base_url, api_key_env, hint, scale",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> "Credit":
        unread = self.model_fields_set & _UNREAD[self.kind] | ({"shrink"} if self.shrink and self.values else set())
        asked = self.teacher
        for wrong, message in (
            (unread, f"{self.kind} leaves no effect to {', '.join(sorted(unread))}; leave it out"),
            (
                self.spans != "turns" and self.values is None,
                f"spans={self.spans}: parts of turns need values, a function; without, each has its turn's",
            ),
            (
                asked and not (asked.base_url or asked.hint),
                "teacher: the policy's own server knows no more; give hint or base_url, or both",
            ),
            (asked and asked.api_key_env and not asked.base_url, "teacher.api_key_env is for base_url; give both"),
        ):
            if wrong:
                raise ValueError(message)
        return self

    @property
    def kind(self) -> str:
        return "teacher" if self.teacher else self.method

    @classmethod
    def parse(cls, given: Any, key: str) -> "Credit":
        """Return the settings of a mapping. Raises ConfigurationError, which names ``key`` and the fix."""
        try:
            credit = cls.model_validate(given)
            regex.compile(credit.spans)
        except ValidationError as error:
            [problem, *_] = error.errors()
            where = ".".join(map(str, (key, *problem["loc"])))
            raise ConfigurationError(f"{where}={problem['input']}: {problem['msg']}") from error
        except regex.error as error:
            raise ConfigurationError(f"{key}.spans={given['spans']}: {error}; give turns or a pattern") from error
        return credit

    @property
    def rule(self) -> str:
        """What a reader of advantages needs to know: the spans, lambda, and what differs from the defaults."""
        shown = {} if self.kind != "progress" else {"spans": self.spans, "lam": self.lam}
        shown |= self.model_dump(exclude_defaults=True)
        return " ".join(f"{name}={value}" for name, value in shown.items())

    def function(self) -> Callable[[Any, str], float] | None:
        """Return the function that ``values`` names. Raises ConfigurationError if there is none."""
        return None if self.values is None else named_function(self.values, "environment.credit.values")


_SPANS = {
    "tool_calls": r"</tool_call>|<\|tool_call_end\|>|<\|eom_id\|>",  # Hermes and Qwen, Kimi, Llama 3
    "answer": r"(?=<answer>|\\boxed\b|####)",
    "markers": r"</?(?:think|answer|tool_call)>|\[/?THINK\]",
}
_UNREAD: dict[str, set[str]] = {  # keys and overrides that each leaves without effect
    "progress": {"weight"},
    "gigpo": {"spans", "lam", "shrink", "values", "turn_values", "branches"},
    "vineppo": {"lam", "shrink", "weight", "turn_states", "branches"},
    "mt_grpo": {"lam", "shrink", "gamma", "turn_states", "branches"},
}
_UNREAD["teacher"] = {"method", *set().union(*_UNREAD.values())}


_OVER_TURNS = {"turn_values", "turn_states", "turn_numbers"}  # overrides with a value for each turn
OF_TURNS = _OVER_TURNS | {"branches"}  # overrides that count turns


class Decision(NamedTuple):
    """A decision's trained tokens [start, end) of a sequence; ``turn`` counts the sequence's turns."""

    sequence: int
    turn: int
    start: int
    end: int


def add_credit(
    group: dict[str, Any],
    credit: Credit,
    tokenizer: Any = None,
    item: Any = None,
    taught: Sequence[Sequence[float]] | None = None,
) -> None:
    """Write the ``advantages`` of a group, a list of floats for each sequence, one for each token, and their rule.

    ``tokenizer`` is needed for ``spans`` other than turns, and for ``values``, which is given ``item`` and an episode's
    text from the end of the prompt to the next decision, what the environment said after this one included; of an
    episode of several sequences that of each, joined by a newline.

    With ``credit.teacher``, ``taught`` has the teacher's logprob of each token of each sequence, at the temperature of
    the group's ``inference_logprobs``; ``adapter.teacher`` asks for them.

    Raises:
        CreditError: the group has advantages already, a field of it has not one value for each turn, a value is not
            finite, the function of ``credit.values`` raises, or ``credit.teacher`` is without ``taught``, or with what
            only values and turns have an effect on.
        RefusedGroup: ``credit.method`` needs values, and an episode of several decisions has none.
    """
    if has_advantages(group):
        raise CreditError("the environment sends advantages of its own; leave environment.credit out")
    _check_turns(group)
    _check_read(group, credit, taught)
    found = list(_decisions(group, credit, tokenizer))
    group["group_overrides"] = _overrides(group) | {"credit": credit.rule}
    raw = _overrides(group).get("raw_scores") or group["scores"]
    if not found or (credit.outcome_gate and len(set(raw)) == 1):
        group["advantages"] = [[0.0] * len(tokens) for tokens in group["tokens"]]
        return
    if places := _overrides(group).get("turn_numbers"):
        found.sort(key=lambda one: places[one.sequence][one.turn])
    parents = _parents(found, group)
    outcomes = np.full(len(found), np.nan)
    for i in set(range(len(found))) - {*parents.tolist()}:
        outcomes[i] = group["scores"][found[i].sequence]
    named, tokens = _overrides(group).get("turn_states"), group["tokens"]
    keys = [] if named else [keys_of(row) for row in tokens]
    states = [str(named[s][turn]) if named else int(keys[s][start]) for s, turn, start, _ in found]
    values = _values(group, found, outcomes, credit, tokenizer, item)
    if values is None and credit.method in ("vineppo", "mt_grpo") and (parents >= 0).any():
        raise RefusedGroup(Reason.MALFORMED, f"{credit.method}: give values, or turn_values in group_overrides")
    decisions = Decisions(parents, outcomes, values, states)
    options = credit.model_dump(include={"gamma", "lam", "mix", "shrink", "method", "weight"})
    given = credit.mix * outcome_advantages(decisions) if credit.teacher else advantages(decisions, **options)
    rows = [np.zeros(len(tokens)) for tokens in group["tokens"]]
    for one, value in zip(found, given, strict=True):
        rows[one.sequence][one.start : one.end] = value
    if credit.teacher and taught:
        for row, masks, *logprobs in zip(rows, group["masks"], taught, group["inference_logprobs"], strict=True):
            teacher, own = (np.array(given or [1.0] * len(row), float) for given in logprobs)
            known = (np.array(masks) != IGNORED) & (own <= 0) & ~np.isnan(teacher)  # else it was not sampled
            row[known] += (1 - credit.mix) * credit.teacher.scale * (teacher - own)[known]
    elif values is None:
        group["group_overrides"]["credit"] += ", without values"
    group["advantages"] = [row.tolist() for row in rows]


async def give_credit(
    group: dict[str, Any],
    credit: Credit,
    tokenizer: Any,
    item: Any,
    taught: Sequence[Sequence[float]] | None = None,
) -> None:
    """Call ``add_credit`` in a thread of its own, as a function of ``credit.values`` may take long. Raises as that;
    RefusedGroup, too, if it does not return in time.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            await guarded(in_own_thread(add_credit, group, credit, tokenizer, item, taught))
    except TimeoutError:
        raise RefusedGroup(Reason.NO_GROUP, f"environment.credit.values: no values within {_SECONDS:g} s") from None


def _check_read(group: dict[str, Any], credit: Credit, taught: Any) -> None:
    """Raise CreditError for what a rule needs and the group lacks, and for what would have no effect."""
    overrides, asked = _overrides(group), credit.teacher is not None
    unread = _UNREAD[credit.kind] | ({"turn_values"} if credit.shrink else set())
    found = [name for name in sorted(OF_TURNS & unread) if any(overrides.get(name) or ())]
    sampled = {each["temperature"] for row in overrides.get("sampling_params") or () for each in row or ()}
    for wrong, message in (
        (found, f"group_overrides has {', '.join(found)}, which would have no effect"),
        (asked and not taught, "it is asked for environments that the launcher starts; here nobody gave its logprobs"),
        (asked and not group.get("inference_logprobs"), "the group has no inference_logprobs of the policy"),
        (
            asked and sampled - {1.0},
            f"it judges at temperature 1, the policy sampled at {sorted(sampled)}: set it to 1",
        ),
    ):
        if wrong:
            raise CreditError(f"environment.credit, {credit.kind}: {message}")


def has_advantages(group: dict[str, Any]) -> bool:
    """Return whether a group brings advantages of its own."""
    return any(row is not None and np.size(row) for row in group.get("advantages") or ())  # also one for all tokens


def turns_of(group: dict[str, Any]) -> list[int]:
    """Return how many turns each sequence has."""
    return [len(list(trained_spans(masks))) for masks in group["masks"]]


def _overrides(group: dict[str, Any]) -> dict[str, Any]:
    return group.get("group_overrides") or {}


def _decisions(group: dict[str, Any], credit: Credit, tokenizer: Any) -> Iterator[Decision]:
    """Yield the decisions, each sequence's in order, those of an episode together."""
    numbers = trajectory_numbers(_overrides(group), len(group["scores"]))
    for sequence in sorted(range(len(numbers)), key=lambda i: numbers.index(numbers[i])):
        tokens, (_, shared) = group["tokens"][sequence], _branch(group, sequence) or (0, 0)
        for turn, (start, end) in enumerate(trained_spans(group["masks"][sequence]), shared):
            for first, last in _cut(tokens, start, end, credit.spans, tokenizer):
                yield Decision(sequence, turn, first, last)


def _cut(tokens: Sequence[int], start: int, end: int, spans: str, tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Yield the parts [start, end) of a turn: each ends with a match of ``spans``, the last with the turn.

    Raises:
        RefusedGroup: the pattern takes too long on the turn's text.
    """
    if spans != "turns":
        first, turn = start, tokens[start:end]
        try:
            found = matches(regex.compile(_SPANS.get(spans, spans)), decoded(tokenizer, turn, special=True))
        except TimeoutError as error:
            raise RefusedGroup(Reason.MARKER_TIMEOUT, f"environment.credit.spans: {error}") from error
        for done in _covering(tokenizer, turn, [match.end() for match in found]):
            if start < first + done < end:
                yield start, first + done
                start = first + done
    yield start, end


def _covering(tokenizer: Any, tokens: Sequence[int], ends: Sequence[int]) -> Iterator[int]:
    """Yield for each of ``ends``, ascending numbers of characters, how many of the first tokens cover as many.

    Only what is near is decoded, from a token on that is whole by itself: a character may have up to four.
    """
    begin = done = covered = 0

    def length(n: int) -> int:  # within a character, a run of bytes may be no text at all
        longest = 0
        for last in range(n, max(begin, n - 4), -1):
            text = decoded(tokenizer, tokens[begin:last], special=True)
            longest = max(longest, len(text.rstrip("\ufffd")))
            if not text.endswith("\ufffd"):
                break
        return longest

    for end in ends:
        before, step = covered - length(done), 1
        while done + step < len(tokens) and before + length(done + step) < end:
            step *= 2
        found = bisect_left(range(len(tokens)), end - before, done, min(done + step, len(tokens)), key=length)
        covered = before + length(found)
        own = (n for n in range(found - 1, done - 1, -1) if "\ufffd" not in decoded(tokenizer, tokens[n : n + 1], True))
        begin, done = next(own, begin), found
        yield done


def _parents(found: Sequence[Decision], group: dict[str, Any]) -> np.ndarray:
    """Return the index of the decision before each, -1 for an episode's first, (D,)."""
    numbers = trajectory_numbers(_overrides(group), len(group["scores"]))
    last: dict[int, int] = {}  # of each episode
    parents = np.full(len(found), -1)
    for i, one in enumerate(found):
        episode = numbers[one.sequence]
        if episode in last:
            parents[i] = last[episode]
        elif branch := _branch(group, one.sequence):
            parents[i] = _after_turn(found[:i], *branch, group)
        last[episode] = i
    return parents


def _branch(group: dict[str, Any], sequence: int) -> tuple[int, int] | None:
    """Return the sequence that another one goes on with, and after how many of its turns."""
    branches = _overrides(group).get("branches")
    try:
        if branches is None or branches[sequence] is None:
            return None
        source, turns = branches[sequence]
        if not 0 <= source < sequence:  # so there is no circle
            raise ValueError(f"{source} is no earlier sequence")
    except (IndexError, TypeError, ValueError) as error:
        raise CreditError(f"group_overrides.branches={branches}: sequence {sequence}: {error}") from error
    return source, turns


def _after_turn(found: Sequence[Decision], sequence: int, turns: int, group: dict[str, Any]) -> int:
    """Return the index of the decision with which a sequence's first ``turns`` turns end."""
    while (branch := _branch(group, sequence)) and branch[1] >= turns:
        sequence = branch[0]
    ends = {one.turn: i for i, one in enumerate(found) if one.sequence == sequence}
    if turns - 1 not in ends or max(ends) < turns:
        raise CreditError(f"group_overrides.branches: sequence {sequence} comes later, or ends within {turns} turns")
    return ends[turns - 1]


def _values(
    group: dict[str, Any],
    found: Sequence[Decision],
    outcomes: np.ndarray,
    credit: Credit,
    tokenizer: Any,
    item: Any,
) -> np.ndarray | None:
    """Return what was reached after each decision that is not an episode's last, (D,); None if nobody says it.

    For ``mt_grpo`` it is the decision's own reward, of the last one too, 0 if that is None.
    """
    function, last = credit.function(), ~np.isnan(outcomes)
    if function is None and _overrides(group).get("turn_values") is None:
        return None
    values = np.zeros(len(found))
    numbers, said = trajectory_numbers(_overrides(group), len(group["scores"])), defaultdict[int, dict[int, str]](dict)
    texts = {} if function is None else _texts(group, found, tokenizer)
    for i in range(len(found)) if credit.method == "mt_grpo" else np.flatnonzero(~last):
        one, source, text = found[i], "group_overrides.turn_values", ""
        if function is not None:
            of_episode = said[numbers[one.sequence]]
            of_episode[one.sequence] = texts[i]
            text = "\n".join(of_episode.values())
            source = f"environment.credit.values for the text {text[-80:]!r}"
        try:
            value = function(item, text) if function else _overrides(group)["turn_values"][one.sequence][one.turn]
            values[i] = 0.0 if value is None and last[i] else value
        except Exception as error:
            raise CreditError(f"{source}: {error!r}") from error
    if not np.isfinite(values).all():
        raise CreditError(f"values of turns are {values.tolist()}; each must be a finite number")
    return values


def _texts(group: dict[str, Any], found: Sequence[Decision], tokenizer: Any) -> dict[int, str]:
    """Return the text of each decision's sequence from the end of the prompt to the next decision.

    Only what each adds is decoded, if these parts are the whole text when they are joined: not where a character's
    tokens are in two of them, nor by a tokenizer that leaves out the space before a text's first word.
    """
    texts: dict[int, str] = {}
    for sequence in {one.sequence for one in found}:
        own, tokens = [i for i, one in enumerate(found) if one.sequence == sequence], group["tokens"][sequence]
        begin, ends = _prompt(group, sequence), [*(found[i].start for i in own[1:]), len(tokens)]
        parts = [decoded(tokenizer, tokens[start:end]) for start, end in pairwise([begin, *ends])]
        if "".join(parts) == decoded(tokenizer, tokens[begin:]):
            texts |= zip(own, accumulate(parts), strict=True)
        else:
            texts |= {i: decoded(tokenizer, tokens[begin:end]) for i, end in zip(own, ends, strict=True)}
    return texts


def _prompt(group: dict[str, Any], sequence: int) -> int:
    """Return the length of the prompt before an episode's first turn, in a sequence."""
    while branch := _branch(group, sequence):
        sequence = branch[0]
    return next(trained_spans(group["masks"][sequence]))[0]


def _check_turns(group: dict[str, Any]) -> None:
    """Raise CreditError if a list over turns, those of a branch's source included, is longer or shorter than these."""
    for sequence, own in enumerate(turns_of(group)):
        turns = own + (_branch(group, sequence) or (0, 0))[1]
        for name in _OVER_TURNS & _overrides(group).keys():
            given = _overrides(group)[name]
            try:
                fits = given is None or len(given[sequence]) == turns
            except (LookupError, TypeError):
                fits = False
            if not fits:
                raise CreditError(
                    f"group_overrides.{name}: sequence {sequence} has {turns} turns; give a list over sequences of "
                    "lists with a value for each turn"
                )


def decoded(tokenizer: Any, tokens: Sequence[int], special: bool = False) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
