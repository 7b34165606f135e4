"""Launch of SGLang servers, on GPUs and CPUs.

Guarantees: SGLang runs in its own interpreter, and nothing of it is imported here; a mistake in the launch (model
folder, interpreter or port) is an error before anything starts; a server that fails shows the last lines of its log.
"""

import contextlib
import difflib
import functools
import importlib.util
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recipe.atropos.config.models import check_model, looks_local
from recipe.atropos.errors import LaunchError
from recipe.atropos.utils import private_process
from recipe.atropos.utils.files import cache_root, read_json, write_json
from recipe.atropos.utils.gpus import WITHOUT_GPUS, nccl_variables, visible_gpus, without_expandable_segments
from recipe.atropos.utils.hosts import reachable
from recipe.atropos.utils.machine import run_program, versions_in
from recipe.atropos.utils.process import Service, port_is_free, start_service
from recipe.atropos.utils.secret import secret_variables, split_secret_flags
from recipe.atropos.utils.sockets import holder

PYTHON_VARIABLE = "ATROPOS_SGLANG_PYTHON"
_INSTALL = (
    "make SGLang's environment (on a CPU `make sglang-env`; for pip see docs/quick-start.md#installing-with-pip), "
    f"or set inference.python or {PYTHON_VARIABLE} to an interpreter that has SGLang"
)
CPU_SHIM = Path(__file__).resolve().parent / "cpu_shim"

# KV cache on a CPU, in tokens: by default SGLang takes a share of the machine's memory, which other services need.
_CPU_MAX_TOTAL_TOKENS = 32768
_CPU_MEM_FRACTION = 0.3
_KEPT_BYTES = 4 << 30  # freed memory that a server on a CPU keeps, at most
# Otherwise SGLang first waits for its requests: forever on 0.5.12, which never drops those that had n > 1, so it would
# outlive a killed launcher.
_END_ON_SIGTERM = {"SGL_FORCE_SHUTDOWN": "1"}
_PROBE_SECONDS = 60.0  # for the interpreter to answer
_SAVER = "torch-memory-saver"
# Other names that SGLang accepts: argparse completes prefixes (read in SGLang 0.5.23, arg_groups/fields/parallel.py).
_ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "model": "model_path",
}
_PARALLEL = ("tp_size", "dp_size")
_OWN_FLAGS = ("model_path", "host", "port", "device", "dtype", "api_key")


@dataclass(frozen=True)
class SGLangLaunch:
    """Settings of one SGLang server. None means SGLang's own default, except as noted below.

    Attributes:
        model_path: local folder, or a name on the Hugging Face hub.
        python: interpreter with SGLang; None: see `sglang_python`.
        port: 0 where no server is started, as to count its GPUs.
        device: "auto" is "cuda" if this process may use a GPU, else "cpu".
        dtype: "float32" makes a CPU server's logprobs match transformers to 2e-5.
        api_key: guards every endpoint but /health. It appears neither in the command line nor in the server's log.
        mem_fraction_static: None is 0.3 on a CPU.
        extra_args: further flags of `sglang.launch_server`, by name: True gives a bare flag, None and False give none,
            a list several values, a dict JSON. They override the flags set here, such as ``max_total_tokens``.
    """

    model_path: str
    python: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: str = "auto"
    api_key: str | None = None
    mem_fraction_static: float | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra_args", sglang_flags(self.extra_args))
        if clash := sorted(set(_OWN_FLAGS) & set(self.extra_args)):
            raise LaunchError(f"inference.args holds {clash}: set inference.{clash[0]} itself")
        for name in (*_PARALLEL, "pp_size"):
            if (size := self.extra_args.get(name)) is not None and not str(size).isdigit():
                raise LaunchError(f"inference.args.{name}={size}: give a whole number")
        if int(stages := self.extra_args.get("pp_size") or 1) != 1:
            raise LaunchError(
                f"inference.args.pp_size={stages}: such a server goes on generating while it is paused; give tp_size"
            )

    @property
    def gpus(self) -> int:
        """Number of GPUs that the server takes: one per rank."""
        names = _PARALLEL[:1] if self.extra_args.get("enable_dp_attention") else _PARALLEL
        return math.prod(int(self.extra_args.get(name) or 1) for name in names)

    @property
    def releases_memory(self) -> bool:
        return bool(self.extra_args.get("enable_memory_saver")) and uses_gpu(self)

    @property
    def url(self) -> str:
        return f"http://{reachable(self.host)}:{self.port}"


def sglang_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags of `sglang.launch_server` under their field names, however they are spelled.

    Raises:
        LaunchError: a flag is given twice.
    """
    flags: dict[str, Any] = {}
    for spelled, value in given.items():
        name = spelled.replace("-", "_")
        name = _ALIASES.get(name, name)
        if name in flags:
            raise LaunchError(f"inference.args gives {name} twice, once as {spelled}: leave one of them out")
        flags[name] = value
    return flags


def sglang_python(named: str | None = None) -> str:
    """Return ``named``, else $ATROPOS_SGLANG_PYTHON, the project's `.venv-sglang` or this interpreter if it has SGLang.

    A path is made absolute, since services run in other folders; a name is left to PATH.

    Raises:
        LaunchError: none of the four is available.
    """
    if given := named or os.environ.get(PYTHON_VARIABLE):
        return os.path.abspath(given) if os.sep in given else given
    beside = Path(__file__).resolve().parents[3] / ".venv-sglang" / "bin" / "python"
    if beside.exists():
        return str(beside)
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    raise LaunchError(f"no interpreter has SGLang: {_INSTALL}")


@functools.cache
def declares_flag(python: str, flag: str) -> bool:
    """Return whether that interpreter's SGLang has a flag, by its sources, since --help takes half a minute.

    Raises:
        LaunchError: the interpreter does not run.
    """
    sources = packages_of(python) / "sglang" / "srt"
    files = [*sources.glob("server_args.py"), *sources.glob("arg_groups/fields/*.py")]
    return any(f"\n    {flag}:" in file.read_text() for file in files)


def server_path(python: str) -> str:
    """Return a server's $PATH, its interpreter's folder first: SGLang runs tools from there, such as ninja, by name."""
    return os.pathsep.join([os.path.dirname(shutil.which(python) or python), os.environ.get("PATH", os.defpath)])


def uses_gpu(launch: SGLangLaunch) -> bool:
    return launch.device == "cuda" or (launch.device == "auto" and visible_gpus() > 0)


def sglang_command(launch: SGLangLaunch) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment variables to add to the launcher's own."""
    local = Path(launch.model_path).expanduser()
    device = "cuda" if uses_gpu(launch) else "cpu"
    flags: dict[str, Any] = {
        "model-path": str(local.resolve()) if local.is_dir() else launch.model_path,
        "host": launch.host,
        "port": launch.port,
        "device": device,
        "dtype": launch.dtype,
        "api-key": launch.api_key,
        "mem-fraction-static": launch.mem_fraction_static,
        "sleep-on-idle": True,  # else the idle scheduler burns a core
    }
    # The launcher's PYTHONPATH is for another environment; an empty value counts as unset.
    python = sglang_python(launch.python)
    environment = {
        "PATH": server_path(python),
        "PYTHONPATH": "",
        "SGLANG_USE_CPU_ENGINE": "0",
        **nccl_variables(),
        **_END_ON_SIGTERM,
    }
    if launch.releases_memory:
        # SGLang would size the KV cache after the graphs, and leave no room for the buckets of a push.
        environment |= saver_variables(python) | {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "0"}
    if device == "cpu":
        flags |= {
            "attention-backend": "torch_native",
            "lora-backend": "torch_native",
            "disable-cuda-graph": True,
            "disable-overlap-schedule": True,
            "mem-fraction-static": launch.mem_fraction_static or _CPU_MEM_FRACTION,
            "max-total-tokens": _CPU_MAX_TOTAL_TOKENS,
        }
        environment = {
            "PYTHONPATH": str(CPU_SHIM),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",  # ten times the speed of the default, for small models on shared cores
            # Incoming weights fill memory of huge pages, which glibc keeps for the next bucket instead of unmapping it.
            "THP_MEM_ALLOC_ENABLE": "1",
            "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
            **WITHOUT_GPUS,
            **_END_ON_SIGTERM,
        }
        if launch.gpus > 1:  # a core for each rank; else SGLang refuses more ranks than there are NUMA nodes
            cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(next(cores)) for _ in range(launch.gpus))
    flags |= {name.replace("_", "-"): value for name, value in launch.extra_args.items()}
    public, secret = map(_arguments, split_secret_flags(flags))
    return [python, private_process.__file__, "sglang.launch_server", *public], environment | secret_variables(secret)


def _arguments(flags: Mapping[str, Any]) -> list[str]:
    arguments = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name}")
        if value is not True:
            values = value if isinstance(value, list | tuple) else [value]
            arguments.extend(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)
    return arguments


def check_launch(launch: SGLangLaunch) -> None:
    """Check for mistakes that would make the server fail half a minute later.

    Raises:
        LaunchError, ConfigurationError: naming the value and the fix.
    """
    python = sglang_python(launch.python)
    try:
        found = versions_in(python, ("sglang",), timeout=_PROBE_SECONDS)
    except LaunchError as error:
        raise LaunchError(f"inference.python={error}: {_INSTALL}") from error
    if found["sglang"] is None:
        raise LaunchError(f"inference.python is {python!r}, which has no package sglang: {_INSTALL}")
    if launch.releases_memory:
        check_saver(python)
    if looks_local(launch.model_path):  # a name is left to the hub
        check_model(launch.model_path)
    if not port_is_free(launch.port, launch.host):
        raise LaunchError(
            f"port {launch.port} of {launch.host} is taken{holder(launch.port)}: end the process that listens there, "
            "name another port, or leave inference.port empty to have a free one chosen"
        )


def start_sglang(
    launch: SGLangLaunch, *, log_path: Path | str, name: str = "sglang", env: Mapping[str, str] | None = None
) -> Service:
    """Check the launch, start the server, and return at once.

    ``env`` is added to its environment. Raises as ``check_launch``.
    """
    check_launch(launch)
    command, environment = sglang_command(launch)
    return start_service(name, command, log_path=log_path, env={**(env or {}), **environment}, url=launch.url)


# ---------------------------------------------------------------- the user's flags

# They are checked by the parser of the SGLang that is installed. Importing SGLang takes seconds, so its flags are kept
# in the cache, by version. They are read anew before a flag is refused, since an SGLang that is installed for
# development changes without its version.
_DUMP_SECONDS = 120.0
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
        printed = run_program(command[0], "-c", _DUMP, timeout=_DUMP_SECONDS, **variables)
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
        found = [option] if option in flags else [flag for flag in flags if flag.startswith(option)]
        if len(found) != 1:  # argparse completes, but only to a single flag
            near = [flag[2:].replace("-", "_") for flag in found or difflib.get_close_matches(option, flags, n=1)]
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            yield f"{told}: {sglang} has {'several flags that begin so' if found else 'no such flag'}{meant}"
            continue
        nargs, kind, choices = flags[found[0]]
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


# ---------------------------------------------------------------- torch_memory_saver

# The preloaded library with which a colocated server releases its GPU memory needs CUDA's runtime, which pip installs
# where the dynamic loader does not look. A process that preloads a library with a missing dependency does not start:
# Python exits with status 127, without a line in SGLang's log.


@functools.cache
def saver_variables(python: str) -> dict[str, str]:
    """Return the environment variables that a server of that interpreter needs to release its memory.

    Raises:
        LaunchError: the interpreter does not run.
    """
    folders = sorted({str(path.parent) for path in packages_of(python).glob("nvidia/*/lib/libcudart.so.*")})
    given = os.environ.get("LD_LIBRARY_PATH")
    variables = {"LD_LIBRARY_PATH": os.pathsep.join([*folders, *([given] if given else [])])} if folders else {}
    return variables | without_expandable_segments()  # expandable segments cannot be released


def check_saver(python: str) -> None:
    """Start that interpreter with the library preloaded, as for SGLang.

    Raises:
        LaunchError: the library is not installed, not built for this CUDA version, or does not load.
    """
    packages = packages_of(python)
    versions = versions_in(python, (_SAVER,))
    fix = f"{python} -m pip install torch-memory-saver, or inference.colocated=false with a GPU for each"
    if versions[_SAVER] is None:
        raise LaunchError(f"inference.colocated=true: {python} has no package torch_memory_saver: {fix}")
    if versions["cuda"] is None:
        raise LaunchError(f"inference.colocated=true: {python} has torch for a CPU: install SGLang's CUDA build of it")
    major = versions["cuda"].split(".")[0]
    found = sorted(packages.glob(f"torch_memory_saver_hook_mode_preload_cu{major}.*.so"))
    if not found:
        raise LaunchError(
            f"inference.colocated=true: torch_memory_saver {versions[_SAVER]} of {python} has no library for CUDA "
            f"{versions['cuda']}, which its torch is for: {fix}"
        )
    variables = {**saver_variables(python), "LD_PRELOAD": str(found[0])}
    try:
        run_program(python, "-c", "pass", timeout=_PROBE_SECONDS, **variables)
    except LaunchError as error:
        raise LaunchError(
            f"inference.colocated=true: {python} does not start with {found[0].name} ({error}): install "
            f"nvidia-cuda-runtime for CUDA {major} there, or add the folder of libcudart.so.{major} to LD_LIBRARY_PATH"
        ) from error


@functools.cache
def packages_of(python: str) -> Path:
    """Return the folder of that interpreter's packages."""
    try:
        return Path(run_program(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
    except LaunchError as error:
        raise LaunchError(f"inference.python={error}: name another interpreter") from error
