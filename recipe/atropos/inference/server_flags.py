"""Check of the user's flags of ``sglang.launch_server`` against the parser of the SGLang that is installed.

Importing SGLang takes seconds, so its flags are kept in the cache, by version. They are read anew before a flag is
refused, since an SGLang that is installed for development changes without its version.
"""

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from recipe.atropos.errors import LaunchError
from recipe.atropos.inference.server import SGLangLaunch, sglang_command, sglang_flags
from recipe.atropos.utils.files import cache_root, read_json, write_json
from recipe.atropos.utils.machine import run_program, versions_in

_SECONDS = 120.0
_DUMP = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
kind = lambda action: action.type.__name__ if action.type in (int, float) else None
choices = lambda action: action.choices and [str(choice) for choice in action.choices]
print(json.dumps({flag: [a.nargs, kind(a), choices(a)] for a in parser._actions for flag in a.option_strings}))
"""
_KINDS = {"int": (int, "a whole number"), "float": (float, "a number")}


def check_flags(launch: SGLangLaunch, given: Mapping[str, Any]) -> None:
    """Check ``inference.args``; ``launch`` is a server that gets them.

    Raises:
        LaunchError: with a line for each flag that the server would refuse.
    """
    command, variables = sglang_command(launch)
    version = versions_in(command[0], ("sglang",))["sglang"]
    cached = cache_root() / f"sglang-flags-{version}.json"
    known = read_json(cached)
    if known and not list(wrong_flags(given, known, version)):
        return
    try:
        printed = run_program(command[0], "-c", _DUMP, timeout=_SECONDS, **variables)
    except LaunchError:  # as where SGLang cannot be imported without a GPU; the server itself will tell
        return
    known = json.loads(printed.splitlines()[-1])
    with contextlib.suppress(OSError):  # the cache only saves time
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_json(cached, known)
    if wrong := list(wrong_flags(given, known, version)):
        raise LaunchError("\n".join(wrong))


def wrong_flags(given: Mapping[str, Any], flags: Mapping[str, list], version: str) -> Iterator[str]:
    """Yield what is wrong with each flag. ``flags``: nargs, kind of number and choices, by ``--flag``."""
    for name, value in sglang_flags(given).items():
        option, told, sglang = f"--{name.replace('_', '-')}", f"inference.args.{name}={value}", f"SGLang {version}"
        if option not in flags:
            if not any(flag.startswith(option) for flag in flags):  # argparse completes
                near = difflib.get_close_matches(option, flags, n=1)
                meant = f"; did you mean {near[0][2:].replace('-', '_')}?" if near else ""
                yield f"{told}: {sglang} has no such flag{meant}"
            continue
        nargs, kind, choices = flags[option]
        if nargs == 0 and not isinstance(value, bool | None):
            yield f"{told}: this flag of {sglang} takes no value; give true or false"
        elif nargs in (None, "+") and value is True:
            yield f"{told}: this flag of {sglang} takes a value"
        elif value is not None and not isinstance(value, bool):
            for each in value if isinstance(value, list | tuple) else [value]:
                if choices and str(each) not in choices:
                    yield f"{told}: {sglang} takes one of {', '.join(choices)}"
                elif kind and not _is(_KINDS[kind][0], each):
                    yield f"{told}: {sglang} takes {_KINDS[kind][1]}"


def _is(kind: type, value: Any) -> bool:
    try:
        kind(str(value))
    except ValueError:
        return False
    return True
