"""A calculator that a policy calls in plain text: ``<call>412 + 97</call>`` is answered by ``509``.

- ``answer`` takes any text and never raises: a call that cannot be computed is answered by "error: ..." and the reason.
- No code is executed: an expression is numbers, + - * / and parentheses, and its length, at most ``LONGEST``
  characters, bounds the time; results beyond ``LARGEST`` are rejected.
- An answer never repeats the policy's text, so none of it, such as a special token, returns to the policy under
  another role.
"""

import ast
import operator
import re
from fractions import Fraction

OPEN, CLOSE = "<call>", "</call>"
LONGEST = 100  # maximum characters of an expression
LARGEST = 10**15  # maximum absolute value of a result

CALL = re.compile(rf"{OPEN}((?:(?!{OPEN}).)*?){CLOSE}", re.DOTALL)
_ALLOWED = re.compile(r"[\d\s.,()+*/-]*", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class CalculatorError(ValueError):
    """Error for an expression that cannot be computed; the policy reads its message."""


def answer(text: str) -> str | None:
    """Return a line for each call in ``text``, its result or error, and one for stray tags; None without either."""
    lines = [calculated(expression) for expression in CALL.findall(text)]
    rest = CALL.sub("", text)
    if OPEN in rest or CLOSE in rest:
        lines.append(f"error: write {OPEN}expression{CLOSE}")
    return "\n".join(lines) if lines else None


def calculated(expression: str) -> str:
    """Return the value of ``expression``, or "error: ..."."""
    try:
        return calculate(expression)
    except CalculatorError as error:
        return f"error: {error}"


def calculate(expression: str) -> str:
    """Return the value of ``expression``: a whole number, or a decimal number of at most 10 significant digits.

    Raises:
        CalculatorError: it is not an expression, is too long, divides by zero, or its value is too large.
    """
    if len(expression) > LONGEST:
        raise CalculatorError("too long")
    if not _ALLOWED.fullmatch(expression):
        raise CalculatorError("only numbers, + - * / and ( )")
    try:
        value = _value(ast.parse(_THOUSANDS.sub("", expression).strip(), mode="eval").body)
    except SyntaxError as error:
        raise CalculatorError("not an expression") from error
    except ZeroDivisionError as error:
        raise CalculatorError("division by zero") from error
    if abs(value) > LARGEST:
        raise CalculatorError("too large")
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise CalculatorError("only numbers, + - * / and ( )")
