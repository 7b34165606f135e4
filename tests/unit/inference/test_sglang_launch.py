"""The command that starts an SGLang server, and what it is given on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from recipe.atropos.inference.server import (
    CPU_SHIM,
    PYTHON_VARIABLE,
    LaunchError,
    SGLangLaunch,
    check_launch,
    sglang_command,
    sglang_python,
)


@pytest.mark.timeout(30)
def test_a_missing_interpreter_is_an_error_at_once(tmp_path):
    for python, message in (("/nowhere/bin/python", "does not exist"), (sys.executable, "no package sglang")):
        with pytest.raises(LaunchError, match=f"{message}.*make sglang-env"):
            check_launch(SGLangLaunch(str(tmp_path), python=python))


def test_the_interpreter_is_named_by_the_environment_first(monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, "/some/python")
    assert sglang_python() == "/some/python"
    assert sglang_python("/other/python") == "/other/python"


def test_an_interpreter_is_named_from_any_folder(monkeypatch, tmp_path):
    """Services are not started in the launcher's."""
    monkeypatch.chdir(tmp_path)
    launch = SGLangLaunch("m", python="venv/bin/python", port=5, device="cpu")
    assert sglang_command(launch)[0][0] == f"{tmp_path}/venv/bin/python"
    assert sglang_python("python3") == "python3"


def test_the_command_on_a_cpu_and_on_a_gpu():
    cpu, cpu_env = sglang_command(SGLangLaunch("m", python="py", port=5, device="cpu", api_key="k"))
    assert cpu[0] == "py" and cpu[2] == "sglang.launch_server"
    assert cpu[cpu.index("--attention-backend") + 1] == "torch_native" and "--api-key" not in cpu
    assert cpu_env == {
        "ATROPOS_SECRET_FLAGS": '["--api-key", "k"]',
        "PYTHONPATH": str(CPU_SHIM),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "CUDA_VISIBLE_DEVICES": "",
        "SGL_FORCE_SHUTDOWN": "1",
    }
    _, ranks_env = sglang_command(SGLangLaunch("m", python="py", device="cpu", extra_args={"tp": 3}))
    assert [core.isdecimal() for core in ranks_env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")] == [True] * 3
    extra = {"log_level": "warning", "trust-remote-code": True, "enable-metrics": False, "cuda-graph-bs": [1, 2]}
    gpu, gpu_env = sglang_command(SGLangLaunch("m", python="py", port=5, device="cuda", extra_args=extra))
    assert "torch_native" not in gpu and "--mem-fraction-static" not in gpu and "--api-key" not in gpu
    assert gpu[-6:] == ["--log-level", "warning", "--trust-remote-code", "--cuda-graph-bs", "1", "2"]
    assert not gpu_env["PYTHONPATH"]  # the trainer's path is not SGLang's


def printed(code, asked, folder):
    """What a program prints with the shim before ``folder`` on its path; ``asked``: as for SGLang on a CPU, or not."""
    env = {**os.environ, "PYTHONPATH": f"{CPU_SHIM}{os.pathsep}{folder}", "SGLANG_USE_CPU_ENGINE": asked}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.timeout(30)
def test_the_cpu_shim_acts_only_when_asked_and_hides_no_other(tmp_path):
    """It imports nothing at start, its stub raises only when called, and a shadowed sitecustomize still runs."""
    (tmp_path / "sitecustomize.py").write_text("print('shadowed')")
    code = (
        "import sys; print('torch' in sys.modules)\n"
        "try:\n    from sgl_kernel.moe import topk\n    print(topk.some.name is not None)\n    topk(1)\n"
        "except (ImportError, NotImplementedError) as error: print(error)"
    )
    for asked, last in (("1", "sgl_kernel.moe.topk was called"), ("0", "No module named 'sgl_kernel'")):
        lines = printed(code, asked, tmp_path).splitlines()
        assert lines[:2] == ["shadowed", "False"]
        assert lines[-1].startswith(last)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("asked", "pinned"), [("1", [False, False, False]), ("0", [True, True, False])])
def test_cpu_shim_lets_no_module_of_sglang_pin_memory(tmp_path, asked, pinned):
    """The rest of a module stays as it is, with its line numbers; other packages are left alone."""
    for package in ("sglang/srt", "other"):
        (tmp_path / package).mkdir(parents=True)
        source = (
            "def asked(pin_memory): return pin_memory\nclass Whole(str):\n    def pin_memory(self): return True\n"
            "first, second = asked(pin_memory=True), Whole()\\\n.pin_memory()\nlast = lambda: None\n"
        )
        (tmp_path / package / "__init__.py").write_text(source)
        (tmp_path / package / "deep").mkdir()
        (tmp_path / package / "deep" / "__init__.py").write_text(source.replace("True", "bool(0)"))
        (tmp_path / package / "module.py").write_text(source)
    code = (
        "import sglang.srt.module as m, sglang.srt.deep as d, other.module as o\n"
        "assert o.first is o.second is True and m.last.__code__.co_firstlineno == 6\n"
        "assert m.last.__code__.co_filename == m.__file__\n"
        "print(m.first, m.second is True, d.first)"
    )
    assert printed(code, asked, tmp_path).split() == [str(value) for value in pinned]
