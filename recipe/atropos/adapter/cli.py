"""Any Atropos environment, unmodified:

    python -m recipe.atropos.utils.env_adapter serve|evaluate|process --env MODULE:Class|FILE.py[:Class] [its own flags]

or, in code, ``adapt(load_environment(target))``. What is fixed stands in docs/environments.md, and in the modules of
the mixins; ``--reward-bridge FILE.yaml`` shapes the scores (``reward_bridge``). Exit status: 0 done, 1 the environment
failed, 2 a wrong target or flag, 130 interrupted, 143 terminated.
"""

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from atroposlib.envs.base import BaseEnv

from recipe.atropos.adapter.checked import Checked
from recipe.atropos.adapter.durable import Durable
from recipe.atropos.adapter.evaluate_metrics import Evaluating
from recipe.atropos.adapter.flags import CommandLine, UsageError, take_flag
from recipe.atropos.adapter.lifecycle import Lifecycle
from recipe.atropos.adapter.loading import EnvironmentTargetError, load_environment
from recipe.atropos.adapter.pacing import Paced
from recipe.atropos.adapter.registration import Registered
from recipe.atropos.adapter.reporting import Reporting
from recipe.atropos.adapter.reward_bridge import RewardBridge, RewardBridgeError, read_bridge
from recipe.atropos.adapter.sampled import SampledTokens
from recipe.atropos.adapter.shaping import shaped_by
from recipe.atropos.adapter.teacher import TeacherFixes
from recipe.atropos.adapter.weight_versions import WeightVersions
from recipe.atropos.errors import one_line_errors
from recipe.atropos.utils.private_process import hide_in_output, take_secret_flags

# In front of the environment, in the order in which calls pass through them. The command line and the life of the
# process stand around everything; Reporting before all that count; Checked before SampledTokens, which reads rows of
# one length and plain numbers; Paced last, because it only orders the posts. WeightVersions stamps what leaves,
# wherever it stands. A mixin that changes scores belongs right after Checked, which observes the raw ones.
_MIXINS = (CommandLine, Lifecycle, Reporting, Registered, Evaluating, Checked, SampledTokens, WeightVersions, Paced)
# Behind it, where its own methods find BaseEnv's with super(): what an environment overrides still counts.
_BASES = (Durable,)

CHECK = "--check"
"""Flag: end with status 0 where the environment would be built, or say what is wrong with target, class or flags."""

_HELP = """\
usage: python -m recipe.atropos.utils.env_adapter serve|evaluate|process --env TARGET [the environment's own flags]

TARGET is MODULE, MODULE:Class, FILE.py or FILE.py:Class, any subclass of atroposlib's BaseEnv; the class is needed
only where there are several. The flags are BaseEnv's (--env.KEY, --openai.KEY, --config FILE); --help after a target
lists them. Here --openai.KEY always counts, a negative number may follow a space, an unknown flag is an error.
--reward-bridge FILE.yaml shapes its scores; --check ends before the environment is built, with its flags checked.
What else differs from running the environment itself: docs/environments.md.
"""


def adapt(environment: type[BaseEnv], bridge: RewardBridge | None = None) -> type[BaseEnv]:
    """A subclass of ``environment`` with every fix that it lacks, itself where it lacks none; its name stays.

    With ``bridge`` its scores are shaped before they are sent.
    """
    mixins = list(_MIXINS)
    if hasattr(environment, "teacher_config_init"):
        mixins.append(TeacherFixes)
    if bridge is not None:
        mixins.insert(mixins.index(Checked) + 1, shaped_by(bridge))
    before = tuple(mixin for mixin in mixins if not issubclass(environment, mixin))
    behind = tuple(base for base in _BASES if not issubclass(environment, base))
    if not before and not behind:
        return environment
    body = {"__doc__": environment.__doc__, "__module__": environment.__module__}
    return type(environment.__name__, (*before, environment, *behind), body)


def run(target: str, arguments: list[str], prepare: Callable[[type[BaseEnv]], type[BaseEnv]] = adapt) -> NoReturn:
    """Load a target and be its command line, with ``arguments``; ``prepare`` makes of the class what is run."""
    try:
        environment = load_environment(target)
    except EnvironmentTargetError as error:
        wrong_usage(f"--env {error}")
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        wrong_usage(f"--env {target} cannot be imported: {type(error).__name__}: {error}")
    sys.argv[1:] = arguments
    with one_line_errors():
        prepare(environment).cli()
    sys.exit(0)  # an environment's own cli() may return


def wrong_usage(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


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
