"""``python -m recipe.atropos COMMAND``, which is also the console script ``verl-atropos``."""

import argparse
import importlib
import sqlite3
import sys
from collections.abc import Sequence

from omegaconf.errors import OmegaConfBaseException

from recipe.atropos.errors import one_line_errors, output_may_be_closed

COMMANDS = {
    "train": ("launch_services", "start all services, train, evaluate, export; resume an unfinished run"),
    "status": ("terminal.status", "show the state of a run"),
    "attach": ("terminal.attach", "show the live view of a run that goes on elsewhere"),
    "logs": ("commands.read_logs", "print a service's log, or follow it (-f)"),
    "stop": ("commands.stop_run", "end a run as Ctrl-C does"),
    "export": ("commands.export_model", "write a checkpoint's model as a folder in Hugging Face format"),
    "report": ("commands.report", "write an HTML page about a run: verdict, alarms, curves, samples; or about two"),
    "inspect": (
        "commands.inspect",
        "print one trajectory of a recorded step, token by token, or a session, turn by turn",
    ),
    "replay": ("commands.replay", "train on recorded batches again, without servers, and compare the weights"),
    "plan": ("commands.plan", "print the memory that a configuration needs of each GPU, and what does not fit"),
    "credit": (
        "commands.credit",
        "predict what advantages for each turn save, or measure it on a recorded step (--run)",
    ),
    "verify-env": ("commands.verify_env", "roll out one group with a real server, and show what each side saw"),
    "cluster": ("commands.cluster", "check the nodes of a Ray cluster, or print a job for SLURM, SkyPilot or KubeRay"),
    "doctor": ("commands.doctor", "check this machine's installation, without starting anything"),
}
_USAGE = "usage: verl-atropos COMMAND [options]; COMMAND --help lists a command's options\n\n" + "\n".join(
    f"  {name:<12}{about}" for name, (_, about) in COMMANDS.items()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the command's exit status; 2 if there is no such command."""
    name, *words = list(sys.argv[1:] if argv is None else argv) or [""]
    # What a command meets in a user's files is an expected failure; in a training it may be a bug.
    expected = () if name == "train" else (OSError, OmegaConfBaseException, sqlite3.Error)
    with one_line_errors(*expected), output_may_be_closed():
        if name in ("-h", "--help", "help"):
            print(_USAGE)
            return 0
        if name not in COMMANDS:
            print(f"{name}: no such command\n{_USAGE}" if name else _USAGE, file=sys.stderr)
            return 2
        where, about = COMMANDS[name]
        module = importlib.import_module(f"recipe.atropos.{where}")
        if not hasattr(module, "add_arguments"):  # it has a parser of its own
            return module.main(words)
        parser = argparse.ArgumentParser(prog=f"verl-atropos {name}", description=about)
        module.add_arguments(parser)
        return module.main(parser.parse_intermixed_args(words))
    return 0  # nobody reads what it prints


if __name__ == "__main__":
    sys.exit(main())
