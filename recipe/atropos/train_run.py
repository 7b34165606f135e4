"""The trainer as the launcher starts it: ``python -m recipe.atropos.train_run FOLDER``.

The run's ``config.yaml`` alone counts; secrets are in the environment.
"""

import sys
from pathlib import Path

from recipe.atropos.config.compose import load_complete
from recipe.atropos.errors import one_line_errors
from recipe.atropos.main import train
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.private_process import take_secret_flags


def main(folder: Path) -> None:
    with one_line_errors():
        config = load_complete(RunDir(folder).config, take_secret_flags())
    train(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
