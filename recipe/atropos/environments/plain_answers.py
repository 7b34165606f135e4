"""Patch of reasoning-gym 0.1.23: the scorers of nine tasks read the policy's text, and do not run it.

They call ``eval``, or sympy's ``parse_expr``, which calls it: any code would run in the environment's process, and
``9**9**9`` would never return (https://github.com/open-thought/reasoning-gym). Here ``eval`` takes literals, and
``parse_expr`` what ``parse_plain`` does; any other answer has the score of one that cannot be read.
"""

import ast
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import sympy

_LONGEST, _STEEPEST, _OF_CALL = 2000, 64, 3  # characters; degrees
_NESTING = {"log", "ln", "sqrt", "Abs", "Integral"}  # which others may be within: sin(exp(10**9)) takes for ever
_FUNCTIONS = {*"sin cos tan sec csc cot asin acos atan exp sinh cosh tanh".split(), *_NESTING}


def read_answers_plainly() -> None:
    """Replace what reasoning-gym's scorers read answers with; again has no effect."""
    from reasoning_gym.factory import DATASETS

    kept = SimpleNamespace(**{**vars(sympy), "parse_expr": parse_plain})
    plain = {"eval": ast.literal_eval, "parse_expr": parse_plain, "sympy": kept, "sp": kept}
    for scorer in [task.score_answer for task, _ in DATASETS.values()]:
        scorer.__globals__.update({name: plain[name] for name in plain.keys() & {*scorer.__code__.co_names}})


def parse_plain(text: str, local_dict: dict[str, Any] | None = None) -> Any:
    """Return sympy's expression of a text of numbers, names, signs, + - * / and powers; where names are given, also of
    elementary functions. A degree, that of a polynomial, bounds what it takes to work it out.

    Raises:
        ValueError, SyntaxError: it is anything else, or too long or steep.
    """
    read = ast.parse(text[: _LONGEST + 1].strip(), mode="eval").body
    if len(text) > _LONGEST or _degree(read, _FUNCTIONS if local_dict else set()) > _STEEPEST:
        raise ValueError(f"the answer has more than {_LONGEST} characters, or a degree above {_STEEPEST}")
    return sympy.parse_expr(ast.unparse(read), local_dict=local_dict)  # exactly what was checked


def _degree(node: ast.AST, functions: set[str]) -> int:
    """Return an expression's degree, of a number that of 10. Raises ValueError if it is not plain."""
    inner = functions - {"Integral"}  # which is worked out unless its derivative is taken at once
    match node:
        case ast.Name():
            return 1
        case ast.Constant(int() | float() as value):
            return 1 + abs(int(math.log10(abs(value) or 1)))
        case ast.UnaryOp(ast.UAdd() | ast.USub(), one):
            return _degree(one, functions)
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return max(_degree(left, functions), _degree(right, functions))
        case ast.BinOp(left, ast.Mult() | ast.Div(), right):
            varies = any(isinstance(part, ast.Name) for part in ast.walk(left))
            return _degree(left, inner) + _degree(right, inner if varies else functions)
        case ast.BinOp(left, ast.Pow(), right):
            power = Fraction(ast.unparse(right).replace(" ", ""))
            return _degree(left, inner) * max(abs(power.numerator), power.denominator)
        case ast.Call(ast.Name(name), [_, *_] as given, []) if name in functions:
            return _OF_CALL * max(_degree(one, inner if name in _NESTING else set()) for one in given)
    raise ValueError(f"the answer has a {type(node).__name__}, which is not read")
