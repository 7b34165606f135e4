"""What looks into the environment of SGLang: the doctor, the patches of its sources, and those that replace its parts.

docs/compatibility.md lists the latter, on a CPU; a test fails once SGLang does without one, which then goes with it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patches import apply_to
from recipe.atropos import launch_services
from recipe.atropos.__main__ import main
from recipe.atropos.inference.server import CPU_SHIM, sglang_python


def test_doctor_tells_versions_and_what_is_missing(capsys):
    assert main(["doctor", "trainer.device=cpu"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ok trainer torch" in told and "ok sglang torch" in told and "verl 0." in told
    assert main(["doctor", "trainer.device=cpu", f"inference.python={sys.executable}"]) == 1
    assert f"FAILED sglang {sys.executable} has no sglang" in " ".join(capsys.readouterr().out.split())


def test_the_installed_sglang_needs_none():
    status, output = apply_to(sglang_python(), "--check")
    assert status == 0 and output.count("not needed, its code has changed") == 2, output


def test_flags_are_checked_by_the_installed_sglang(capsys, tmp_path):
    """Before anything starts; the server would end half a minute later with a page of its usage."""
    given = ["--preset", "demo", "--dry-run", f"--run-dir={tmp_path / 'run'}", "inference.args.max_total_tokns=1"]
    assert launch_services.main(given) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "inference.args.max_total_tokns=1: SGLang 0." in told and "did you mean max_total_tokens?" in told


def run(code, **environment):
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run([sglang_python(), "-c", code], env=environment, capture_output=True, text=True, timeout=280)


def source(file):
    folder = run("from importlib.util import find_spec as f; print(f('sglang').submodule_search_locations[0])").stdout
    return Path(folder.strip(), "srt", file).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("finder", "imported", "error"),
    [
        ("_KernelStub", "sglang.kernels.ops.kvcache.cache_move", "No module named 'sgl_kernel'"),
        ("_TorchvisionSchemas", "torchvision", "operator torchvision::nms does not exist"),
    ],
)
def test_patch_of_sglangs_imports_is_needed(finder, imported, error):
    """Without a finder of the shim, an import fails; with it, it does not."""
    shim = {"PYTHONPATH": str(CPU_SHIM), "SGLANG_USE_CPU_ENGINE": "1"}
    without = f"import sys; sys.meta_path = [each for each in sys.meta_path if type(each).__name__ != {finder!r}]"
    assert error in run(f"{without}; import {imported}", **shim).stderr
    whole = run(f"import {imported}", **shim)
    assert whole.returncode == 0, whole.stderr


@pytest.mark.slow
def test_patch_of_pinned_memory_is_needed():
    """SGLang's LoRA layers pin memory without looking for a device to pin it for, which torch refuses without one."""
    assert "pin_memory=True" in source("lora/layers.py")
    assert "pin_memory=True requires" in run("import torch; torch.zeros(1, pin_memory=True)").stderr


def test_patch_of_sglangs_names_is_needed():
    """Its shared memory for loads tells no process: where SGLang cleans up, it takes all of it for leftovers."""
    pidless = source("utils/stale_shm_cleanup.py").partition("_ORPHAN_PREFIXES = (")[2].partition(")")[0]
    assert '"sglang_loads_"' in pidless
