"""The adapter's command line in a process of its own, many times, with the imports done once."""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path

_ADAPTER = "recipe.atropos.utils.env_adapter"
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([_ADAPTER, "transformers.models.auto.tokenization_auto"])


def run_adapter(folder: Path, *arguments: str, module: str = _ADAPTER, timeout: float = 60, **variables: str):
    """(exit status, output) of ``python -m MODULE ARGUMENTS``, run in ``folder``."""
    log = folder / "adapter.log"
    process = _processes.Process(target=_run, args=(folder, log, module, arguments, variables))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"still running after {timeout} s: {log.read_text()}")
    return process.exitcode, log.read_text()


def _run(folder, log, module, arguments, variables):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.chdir(folder)
    os.environ.update(variables)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
