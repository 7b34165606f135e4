"""Command line of the Trajectory API: ``python -m recipe.atropos.trajectory_api --port P --data-dir D`` serves.

Its commands list, show, export and import work on a data folder; all but import also while its server runs.
"""

import argparse
import logging
import sys
from pathlib import Path

from recipe.atropos.errors import one_line_errors
from recipe.atropos.trajectory_api import records
from recipe.atropos.trajectory_api.database import SYNCHRONOUS
from recipe.atropos.trajectory_api.service import Settings
from recipe.atropos.trajectory_api.serving import read_secret, serve

PROGRAM = "python -m recipe.atropos.trajectory_api"
_COMMANDS = {"list": records.list_all, "show": records.show, "export": records.export, "import": records.import_}


def _serve(arguments: list[str]) -> None:
    default = Settings(Path())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Serve the groups of environments as batches. Other commands: list, show, export, import.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a secret")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the store; created if it is missing")
    parser.add_argument("--secret-file", help="file of mode 0600 with the secret; default: $ATROPOS_API_KEY")
    parser.add_argument(
        "--durability",
        choices=[*SYNCHRONOUS],
        default=default.durability,
        help="normal (default): stored groups survive a kill of the server; full: of the machine too; none: neither",
    )
    parser.add_argument(
        "--retention",
        choices=["all", "committed"],
        default=default.retention,
        help="committed: delete the batches that are in a durable checkpoint; default: all",
    )
    parser.add_argument(
        "--queue-tokens",
        type=int,
        default=default.queue_tokens,
        help="tokens in the queue above which posts are answered late; default: %(default)s",
    )
    parser.add_argument(
        "--hold-seconds",
        type=float,
        default=default.hold_seconds,
        help="longest delay of such an answer, in seconds; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = Settings(
        options.data_dir, options.durability, options.retention, options.queue_tokens, options.hold_seconds
    )
    serve(settings, options.host, options.port, read_secret(options.secret_file))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    with one_line_errors():
        if arguments and arguments[0] in _COMMANDS:
            name = arguments[0]
            parser = argparse.ArgumentParser(prog=f"{PROGRAM} {name}", description=_COMMANDS[name].__doc__)
            parser.add_argument("data_dir", type=Path)
            if name == "show":
                parser.add_argument("number", type=int, help="of the batch")
            if name in ("export", "import"):
                parser.add_argument("file", type=Path, help="of JSON lines, one batch each")
            with one_line_errors(OSError):  # of the files that are given
                _COMMANDS[name](**vars(parser.parse_args(arguments[1:])))
        else:
            _serve(arguments)


if __name__ == "__main__":
    main()
