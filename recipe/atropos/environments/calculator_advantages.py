"""The calculator with an advantage for every token.

    python -m recipe.atropos.environments.calculator_advantages serve|evaluate [flags]

As in ``gsm8k_advantages``, but a step is a tool call: worth -1 if the tool replies with an error, 0 if it replies with
a value, and 1 if that value is also a result in the worked solution.
"""

from collections.abc import Collection, Iterator
from fractions import Fraction

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.environments.calculator import CalculatorEnv
from recipe.atropos.environments.calculator_tool import CALL, CalculatorError, calculate
from recipe.atropos.environments.gsm8k_advantages import GradedSpan, TokenAdvantages


class CalculatorAdvantagesEnv(TokenAdvantages, CalculatorEnv):
    """Multi-turn math problems with a tool, scored token by token."""

    name = "calculator_advantages"

    def steps(self, text: str, results: Collection[Fraction]) -> Iterator[GradedSpan]:
        for match in CALL.finditer(text):
            try:
                grade = float(Fraction(calculate(match[1])) in results)
            except CalculatorError:
                grade = -1.0
            yield match.start(), match.end(), grade


if __name__ == "__main__":
    adapt(CalculatorAdvantagesEnv).cli()
