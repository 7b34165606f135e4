"""``python -m recipe.atropos.utils.debug COMMAND``: like ``recipe.atropos COMMAND``; ``show`` means ``inspect``."""

import sys
from collections.abc import Sequence

from recipe.atropos.__main__ import main as run_command


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(["inspect" if given[:1] == ["show"] else word for word in given[:1]] + given[1:])


if __name__ == "__main__":
    sys.exit(main())
