"""Run any Atropos environment, unmodified:

    python -m recipe.atropos.utils.env_adapter serve|evaluate|process --env MODULE:Class|FILE.py[:Class] [its own flags]

or, in code, ``adapt(load_environment(target))``. docs/environments.md lists what the adapter fixes; ``--reward-bridge
FILE.yaml`` shapes the scores (``reward_bridge``), and ``--adapter.NAME`` flags are the adapter's own ``settings``. Exit
status: 0 done, 1 the environment failed, 2 a wrong target or flag, 130 interrupted, 143 terminated.
"""

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from atroposlib.envs.base import BaseEnv

from recipe.atropos.adapter.adapted_env import adapt
from recipe.atropos.adapter.flags import CommandLine, UsageError, take_flag
from recipe.atropos.adapter.loading import EnvironmentTargetError, load_environment
from recipe.atropos.algorithm.reward_bridge import RewardBridgeError, read_bridge
from recipe.atropos.errors import output_may_be_closed
from recipe.atropos.utils.private_process import hide_in_output, take_secret_flags

CHECK = "--check"
"""Flag: exit with status 0 instead of building the environment, or report a wrong target, class or flag."""

_HELP = """\
usage: python -m recipe.atropos.utils.env_adapter serve|evaluate|process --env TARGET [the environment's own flags]

TARGET is MODULE, MODULE:Class, FILE.py or FILE.py:Class, any subclass of atroposlib's BaseEnv; the class is needed
only where there are several. The flags are BaseEnv's (--env.KEY, --openai.KEY, --config FILE); --help after a target
lists them. Here --openai.KEY always counts, a negative number may follow a space, an unknown flag is an error.
--adapter.report=FILE adds lines of counts to a file;
--reward-bridge FILE.yaml, or the block {...} itself, shapes its scores; --check ends before the environment is built,
with its flags checked.
What else differs from running the environment itself: docs/environments.md.
"""


def run(target: str, arguments: list[str], prepare: Callable[[type[BaseEnv]], type[BaseEnv]] = adapt) -> None:
    """Load a target and run its command line with ``arguments``; ``prepare`` maps that class to the one to run."""
    try:
        environment = load_environment(target)
    except EnvironmentTargetError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        wrong_usage(f"--env {error}")
    sys.argv[1:] = arguments
    prepare(environment).cli()  # ends the process


def wrong_usage(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


@output_may_be_closed()
def main() -> None:
    secret_flags = take_secret_flags()
    hide_in_output(secret_flags)
    arguments = [*sys.argv[1:], *secret_flags]
    if CHECK in arguments:
        arguments.remove(CHECK)
        CommandLine.only_checked = True
    try:
        target, bridge_file = take_flag(arguments, "--env"), take_flag(arguments, "--reward-bridge")
        bridge = None if bridge_file is None else read_bridge(bridge_file)
    except UsageError as error:
        wrong_usage(str(error))
    except RewardBridgeError as error:
        wrong_usage(f"--reward-bridge {error}")
    if "--help" in arguments:
        print(_HELP)
    elif target is None:
        wrong_usage(_HELP.splitlines()[0])
    if target is not None:
        run(target, arguments, lambda environment: adapt(environment, bridge))


if __name__ == "__main__":
    main()
