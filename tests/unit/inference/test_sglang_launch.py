"""The command that starts an SGLang server, what it is given on a CPU, its flags, and the client."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from recipe.atropos.inference.client import Capabilities, InferenceError, SGLangClient
from recipe.atropos.inference.server import (
    CPU_SHIM,
    PYTHON_VARIABLE,
    LaunchError,
    SGLangLaunch,
    check_flags,
    check_launch,
    sglang_command,
    sglang_python,
    wrong_flags,
)
from recipe.atropos.utils.files import read_json, write_json


@pytest.mark.timeout(30)
def test_a_missing_interpreter_is_an_error_at_once(tmp_path):
    for python, message in (("/nowhere/bin/python", "does not run"), (sys.executable, "no package sglang")):
        with pytest.raises(LaunchError, match=f"{message}.*make sglang-env"):
            check_launch(SGLangLaunch(str(tmp_path), python=python))


def test_an_interpreter_is_named_from_any_folder(monkeypatch, tmp_path):
    """Services are not started in the launcher's; by the environment, if the configuration names none."""
    monkeypatch.setenv(PYTHON_VARIABLE, "/some/python")
    assert (sglang_python(), sglang_python("/other/python")) == ("/some/python", "/other/python")
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


# ---------------------------------------------------------------- its flags, by its own parser; here a table of a few

FLAGS = {
    "--tp-size": [None, "int", None],
    "--max-total-tokens": [None, "int", None],
    "--max-loras-per-batch": [None, "int", None],
    "--schedule-conservativeness": [None, "float", None],
    "--attention-backend": [None, None, ["torch_native", "fa3"]],
    "--disable-radix-cache": [0, None, None],
    "--cuda-graph-bs": ["+", "int", None],
    "--lora-paths": ["*", None, None],
}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_total_tokns": 3}, "max_total_tokns=3: SGLang 1 has no such flag; did you mean max_total_tokens?"),
        (
            {"max": "x"},
            "max=x: SGLang 1 has several flags that begin so; did you mean max_total_tokens or max_loras_per_batch?",
        ),
        ({"max_total": "x"}, "max_total=x: SGLang 1 takes a whole number"),
        ({"no_such_flag": 1}, "no_such_flag=1: SGLang 1 has no such flag"),
        ({"tensor-parallel-size": "x"}, "tp_size=x: SGLang 1 takes a whole number"),
        ({"schedule_conservativeness": "x"}, "schedule_conservativeness=x: SGLang 1 takes a number"),
        ({"attention_backend": "foo"}, "attention_backend=foo: SGLang 1 takes one of torch_native, fa3"),
        ({"disable_radix_cache": 1}, "disable_radix_cache=1: this flag of SGLang 1 takes no value; give true or false"),
        ({"max_total_tokens": True}, "max_total_tokens=True: this flag of SGLang 1 takes a value"),
        ({"cuda_graph_bs": [1, "x"]}, "cuda_graph_bs=[1, 'x']: SGLang 1 takes a whole number"),
    ],
)
def test_flags_that_the_server_would_refuse_are_named(given, told):
    assert list(wrong_flags(given, FLAGS, "1")) == [f"inference.args.{told}"]


def test_flags_that_the_server_takes_pass():
    given = {"tp": 2, "attention-backend": "fa3", "disable_radix_cache": True, "lora_paths": True, "cuda_graph_bs": [1]}
    given |= {"max_total_tokens": None, "schedule": 1}  # one that is left out, and one that argparse completes
    assert not list(wrong_flags(given, FLAGS, "1"))
    with pytest.raises(LaunchError, match="inference.args.tp_size=x: give a whole number"):
        SGLangLaunch("m", extra_args={"tp": "x"})


def test_flags_are_read_anew_before_one_is_refused(tmp_path, monkeypatch):
    """An SGLang that is installed for development has new flags under the same version."""
    python, cache = tmp_path / "python", tmp_path / "cache"
    python.write_text("""#!/bin/sh
case "$2" in
*ServerArgs*) echo a warning; echo '{"--new": [null, "int", null]}';;
*) echo '{"sglang": "1", "cuda": null, "Python.h": null}';;
esac
""")
    python.chmod(0o755)
    monkeypatch.setenv("ATROPOS_CACHE", str(cache))
    cache.mkdir()
    write_json(cache / "sglang-flags-1.json", FLAGS)
    launch = SGLangLaunch("m", python=str(python), port=1, device="cpu")
    check_flags(launch, {"tp_size": 1})
    assert read_json(cache / "sglang-flags-1.json") == FLAGS
    check_flags(launch, {"new": 1})
    assert read_json(cache / "sglang-flags-1.json") == {"--new": [None, "int", None]}
    with pytest.raises(LaunchError, match="^inference.args.tp_size=1: .* no such flag\ninference.args.x=1: .*flag$"):
        check_flags(launch, {"tp_size": 1, "x": 1})


# ---------------------------------------------------------------- the client, without a server


@pytest.mark.timeout(30)
def test_an_absent_server_is_an_error_that_names_it():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        async def body():
            client = SGLangClient(url)
            assert not await client.health()
            with pytest.raises(InferenceError, match=f"{url}/model_info: cannot connect"):
                await client.model_info()

        asyncio.run(body())


@pytest.mark.parametrize(
    ("endpoints", "modes", "wanted", "safe"),
    [
        ({"/begin_weight_update"}, {"abort", "retract"}, "auto", "retract"),
        ({"/begin_weight_update"}, {"abort", "retract"}, "in_place", "has no pause mode 'in_place'"),
        (set(), {"abort", "retract"}, "auto", "abort"),
        (set(), {"abort", "retract"}, "abort", "abort"),
        (set(), {"abort", "retract"}, "retract", "cannot flush its KV cache while retracted requests wait"),
        (set(), set(), "auto", "has no pause mode 'abort'"),
    ],
)
def test_the_safe_pause_mode_is_what_was_asked_for_or_an_error(endpoints, modes, wanted, safe):
    capabilities = Capabilities("0", frozenset(endpoints), frozenset(modes))
    if safe in modes:
        assert capabilities.safe_pause_mode(wanted) == safe
    else:
        with pytest.raises(ValueError, match=safe):
            capabilities.safe_pause_mode(wanted)
