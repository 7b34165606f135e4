r"""GSM8K with an advantage for every token: ``python -m recipe.atropos.environments.gsm8k_advantages serve|evaluate``.

An example to copy: an environment that knows which tokens of an answer were good sends ``advantages``, and the trainer
uses them instead of the group's scores. Here the worth of a trained token depends on its kind:

- ``ANSWER``, ``\boxed{...}`` (the last token if nothing is boxed): the score of its sequence;
- ``STEP``, each ``a op b = c`` of the reasoning: -1 if the arithmetic is wrong, 0 if it is right, and 1 if c is also a
  result in the worked solution of the data set;
- ``ELSEWHERE``: the score of its sequence, with a weight near zero.

Guarantees:

- An advantage is the token's worth, standardized over the group's tokens of its kind (mean 0, deviation 1), times the
  weight of the kind. The mean over a group's trained tokens is 0; a kind whose tokens all have the same worth has 0.
- Each advantage belongs to a sampled token: texts are decoded to find positions, and never re-encoded.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import regex
from atroposlib.envs.base import ScoredDataGroup

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.data.rows import IGNORED, trained_spans
from recipe.atropos.environments.calculator_tool import CalculatorError, calculate
from recipe.atropos.environments.gsm8k import GSM8kEnv
from recipe.atropos.environments.word_problems import Row, gold_answer

UNTRAINED, ELSEWHERE, STEP, ANSWER = range(4)
WEIGHTS = {ELSEWHERE: 0.05, STEP: 0.5, ANSWER: 1.0}

GradedSpan = tuple[int, int, float]  # characters [start, end) of a text, and their worth

# Possessive quantifiers keep the time linear in the text; those of `re` match wrongly before Python 3.11.5 (gh-106052).
_NUMBER = r"-?\$?\d++(?:,\d{3})*+(?:\.\d++)?+"
_EXPRESSION = regex.compile(rf"(?:(?<!\()\(++|(?<![\d.,])){_NUMBER}(?:\)*+\s*+[-+*/x×÷]\s*+\(*+{_NUMBER})++\)*+")
_RESULT = regex.compile(rf"\s*=\s*({_NUMBER})")  # in 2 + 3 = 5 * 4 = 20 the first result begins the next expression
_OPERATORS = str.maketrans({"x": "*", "×": "*", "÷": "/", "$": None})
_BOXED = regex.compile(r"\\boxed\s*+(?:\{(?:[^{}\n]|\{[^{}\n]*+\})*+\}?|\S*)")  # if truncated, what there is


def arithmetic_steps(text: str, results: Collection[Fraction]) -> Iterator[GradedSpan]:
    """Yield each ``a op b = c`` in ``text``, graded -1, 0 or 1 as above; c may be rounded to its number of decimals.

    ``results``: from `results_of`.
    """
    for match in _EXPRESSION.finditer(text):
        result = _RESULT.match(text, match.end())
        if result is None:
            continue
        try:
            value = Fraction(calculate(match[0].translate(_OPERATORS)))
        except CalculatorError:
            continue
        shown = result[1].replace("$", "").replace(",", "")
        decimals = len(shown.partition(".")[2])
        right = abs(value - Fraction(shown)) <= (Fraction(1, 2 * 10**decimals) if decimals else 0)
        yield match.start(), result.end(), float(Fraction(shown) in results) if right else -1.0


def results_of(row: Row) -> set[Fraction]:
    """Return the results in the worked solution (``<<12+7=19>>``), and its answer."""
    shown = [*re.findall(r"=([^=<>]+)>>", row["answer"]), gold_answer(row)]
    numbers = (each.replace(",", "").strip() for each in shown)
    return {Fraction(number) for number in numbers if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", number)}


def token_span(tokenizer: Any, tokens: Sequence[int], start: int, end: int) -> slice:
    """Return the slice of ``tokens`` that covers the characters [start, end) of their text."""

    def characters(count: int) -> int:
        return len(decoded(tokenizer, tokens[:count]).removesuffix("\ufffd"))  # the last may be incomplete

    counts = range(len(tokens) + 1)
    first = min(bisect_left(counts, start, key=characters), bisect_right(counts, start, key=characters) - 1)
    return slice(first, bisect_left(counts, end, key=characters))


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def standardized(kinds: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """Return the advantages of a group's tokens: ``kinds`` (T,) int, ``worth`` (T,) float; (T,) float, mean 0."""
    advantages = np.zeros(len(kinds))
    for kind, weight in WEIGHTS.items():
        of_kind = worth[kinds == kind]
        if len(of_kind) and np.ptp(of_kind):
            advantages[kinds == kind] = weight * (of_kind - of_kind.mean()) / of_kind.std()
    return advantages


class TokenAdvantages:
    """Mixin that adds ``advantages`` to the result of ``GSM8kEnv.score``; must precede `GSM8kEnv` in the MRO."""

    def steps(self, text: str, results: Collection[Fraction]) -> Iterable[GradedSpan]:
        """Return the graded steps in one turn of the policy; override it for another form of reasoning."""
        return arithmetic_steps(text, results)

    async def score(self, item: Row, nodes: list[Any]) -> ScoredDataGroup:
        group = await super().score(item, nodes)
        results = results_of(item)
        parts = [self._worth(node, score, results) for node, score in zip(nodes, group["scores"], strict=True)]
        advantages = standardized(*map(np.concatenate, zip(*parts, strict=True)))
        ends = np.cumsum([len(node.tokens) for node in nodes])[:-1]
        group["advantages"] = [part.tolist() for part in np.split(advantages, ends)]
        return group

    def _worth(self, node: Any, score: float, results: Collection[Fraction]) -> tuple[np.ndarray, np.ndarray]:
        """Return kind and worth of every token of a sequence, (T_i,) each."""
        kinds = np.where(np.array(node.masked_tokens) == IGNORED, UNTRAINED, ELSEWHERE)
        worth = np.full(len(kinds), score, dtype=float)

        def mark(start: int, place: slice, kind: int, value: float) -> None:
            kinds[start + place.start : start + place.stop] = kind
            worth[start + place.start : start + place.stop] = value

        for start, end in trained_spans(node.masked_tokens):
            turn = node.tokens[start:end]
            text = decoded(self.tokenizer, turn)
            for first, last, grade in self.steps(text, results):
                mark(start, token_span(self.tokenizer, turn, first, last), STEP, grade)
        boxed = _BOXED.search(text, text.rfind("</think>") + 1)  # in the last turn
        last_token = slice(len(turn) - 1, len(turn))
        answer = token_span(self.tokenizer, turn, *boxed.span()) if boxed else last_token
        mark(start, answer, ANSWER, score)
        return kinds, worth


class GSM8kAdvantagesEnv(TokenAdvantages, GSM8kEnv):
    """Single-turn math problems whose answers are scored token by token."""

    name = "gsm8k_advantages"


if __name__ == "__main__":
    adapt(GSM8kAdvantagesEnv).cli()
