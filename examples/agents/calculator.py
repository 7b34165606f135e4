"""The calculator of these programs: ``calculate("12 - 7")`` is ``"5"``."""

import operator
import re

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}


def calculate(expression: object) -> str:
    """Return the result of an operation on two whole numbers, such as 12 - 7; "error" for anything else."""
    found = re.fullmatch(r" *(\d{1,9}) *([-+*]) *(\d{1,9}) *", str(expression))
    return str(_OPERATORS[found[2]](int(found[1]), int(found[3]))) if found else "error"
