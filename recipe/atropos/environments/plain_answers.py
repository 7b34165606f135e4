"""Which answers the scorers of reasoning-gym 0.1.23 may be given: those of nine tasks run what they are given.

They call ``eval``, or sympy's ``parse_expr``, which calls it: any code would run in the environment's process, and
``9**9**9`` would never return (https://github.com/open-thought/reasoning-gym).
"""

import ast
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_LONGEST, _STEEPEST, _OF_CALL = 2000, 64, 3  # characters; degrees
_NESTING = {"log", "ln", "sqrt", "Abs", "Integral"}  # which others may be within: sin(exp(10**9)) takes for ever
_FUNCTIONS = {*"sin cos tan sec csc cot asin acos atan exp sinh cosh tanh".split(), *_NESTING}


def is_plain(answer: str, problem: Mapping[str, Any], scorer: Callable[..., float]) -> bool:
    """Return whether ``scorer`` may be given an answer to a problem: it runs none, or this one is the problem's own, or
    harmless: for ``eval`` a literal, or no expression; for ``parse_expr`` an expression of numbers, the names of the
    problem's own answer, signs, + - * / and powers, of an integral also of elementary functions. Its degree, that of a
    polynomial, bounds what it takes to work it out.
    """
    runs, own = {"eval", "parse_expr"} & {*scorer.__code__.co_names}, str(problem["answer"]).strip()
    if not runs or answer.strip() == own:
        return True
    try:
        read = ast.parse(answer.strip(), mode="eval").body
        if "eval" in runs:
            return _is_literal(read)
        names = {"C", *re.findall(r"[^\W\d]\w*", own)}
        functions = _FUNCTIONS if "integrand" in problem["metadata"] else set()
        steepest = max(_STEEPEST, _degree(ast.parse(own, mode="eval").body, names, functions) if own else 0)
        return len(answer) <= max(_LONGEST, 2 * len(own)) and _degree(read, names, functions) <= steepest
    except SyntaxError:
        return "eval" in runs  # which stops at the same
    except (ValueError, ArithmeticError, RecursionError, MemoryError):
        return False


def _is_literal(node: ast.AST) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _degree(node: ast.AST, names: set[str], functions: set[str]) -> int:
    """Return an expression's degree, of a number that of 10. Raises ValueError if it is not plain."""
    inner = functions - {"Integral"}  # which is worked out unless its derivative is taken at once
    match node:
        case ast.Name(name) if name in names:
            return 1
        case ast.Constant(int() | float() as value):
            return 1 + abs(int(math.log10(abs(value) or 1)))
        case ast.UnaryOp(ast.UAdd() | ast.USub(), one):
            return _degree(one, names, functions)
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return max(_degree(left, names, functions), _degree(right, names, functions))
        case ast.BinOp(left, ast.Mult() | ast.Div(), right):
            varies = any(isinstance(part, ast.Name) for part in ast.walk(left))
            return _degree(left, names, inner) + _degree(right, names, inner if varies else functions)
        case ast.BinOp(left, ast.Pow(), right):
            power = Fraction(ast.unparse(right).replace(" ", "").strip("()"))
            return _degree(left, names, inner) * max(abs(power.numerator), power.denominator)
        case ast.Call(ast.Name(name), [_, *_] as given, []) if name in functions:
            return _OF_CALL * max(_degree(one, names, inner if name in _NESTING else set()) for one in given)
    raise ValueError(type(node).__name__)
