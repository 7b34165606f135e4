"""What keeps two environments from working on a machine's GPUs is told before the start, with the fix."""

import os
import sys

import pytest

from helpers.gpu import load_decided
from recipe.atropos.errors import ConfigurationError, LaunchError
from recipe.atropos.inference.server import SGLangLaunch, sglang_command
from recipe.atropos.launcher import gpu_environment
from recipe.atropos.launcher.gpu_environment import check_gpu_environment

DISTRIBUTED = "trainer.atropos.weight_sync.transport=distributed"
HANDLES = "trainer.atropos.weight_sync.transport=tensor"
TOOLS = ("gcc", "c++", "nvcc", "ninja")
OTHERS = ("cc", "clang", "g++")
GOOD = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "nvidia-nccl-cu13": "2.30.7",
    "sglang-kernel": "0.4",
    "Python.h": "/Python.h",
}


@pytest.fixture
def check(machine, monkeypatch):
    """Call it with what differs of trainer and server, the driver, and further settings."""

    which = gpu_environment.shutil.which

    def run(*overrides, trainer=None, server=None, driver="580.65.06", tools=TOOLS, nvcc="13.0"):
        machine(2)
        found = {"trainer-python": GOOD | (trainer or {}), "server-python": GOOD | (server or {})}
        monkeypatch.setattr(gpu_environment.sys, "executable", "trainer-python")
        monkeypatch.setattr(gpu_environment, "run_program", lambda *_: f"Cuda compilation tools, release {nvcc}, V1")
        monkeypatch.setattr(gpu_environment, "nvidia_smi", lambda *_: [[driver]] * 2 if driver else [])
        monkeypatch.setattr(
            gpu_environment,
            "versions_in",
            lambda python, packages: {name: found[python].get(name) for name in (*packages, "cuda", "Python.h")},
        )
        for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        programs = {name: name if name in tools else None for name in (*TOOLS, *OTHERS)}
        monkeypatch.setattr(
            gpu_environment.shutil,
            "which",
            lambda name, **given: programs[name] if name in programs else which(name, **given),
        )
        options = ["inference.colocated=false", "inference.python=server-python", *overrides]
        return check_gpu_environment(load_decided("actor_rollout_ref.model.path=m", *options))

    return run


@pytest.mark.parametrize(
    ("overrides", "found", "told"),
    [
        ([], {"trainer": {"cuda": None}}, r"the trainer has torch 2.13.0 without CUDA \(trainer-python\): install its"),
        ([], {"server": {"torch": None}}, r"SGLang has torch None without CUDA \(server-python\)"),
        (
            [],
            {"trainer": {"nvidia-nccl-cu13": "2.29.7"}},
            "SGLang 2.30.7; trainer-python .* --no-deps nvidia-nccl-cu13==2",
        ),
        ([DISTRIBUTED], {"server": {"nvidia-nccl-cu13": "2.31.0"}}, "SGLang 2.31.0; "),
        ([], {"server": {"sglang-kernel": None}}, "without its CUDA kernels: server-python -m pip install -r req"),
        ([], {"server": {"Python.h": None}}, r"^server-python has no Python.h, .*python3-dev"),
        ([], {"tools": ("gcc", "c++", "ninja")}, "^there is no nvcc in PATH or /usr/local/cuda, .* set CUDA_HOME"),
        ([], {"nvcc": "12.8"}, "^nvcc is of CUDA 12.8, and SGLang's torch .server-python. of 13.0, .* set CUDA_HOME"),
        ([], {"server": {"cuda": "12.8"}}, "^nvcc is of CUDA 13.0, and SGLang's torch .server-python. of 12.8"),
        (
            [HANDLES],
            {"server": {"torch": "2.11.0+cu130"}},
            "torch 2.11.0.cu130 of SGLang .* opens none of the trainer's torch 2.13.0: .*=disk",
        ),
        (["inference.colocated=true"], {"server": {"torch": "2.12.1"}}, "torch 2.12.1 of SGLang"),
        ([], {"tools": ("gcc", "g++", "nvcc", "ninja")}, "^there is no C.. compiler "),
        ([], {"tools": ("cc", "c++", "nvcc", "ninja")}, "^there is no C compiler "),
        ([], {"tools": ("gcc", "c++", "nvcc")}, "^SGLang compiles kernels with ninja, .* -m pip install ninja"),
    ],
    ids=("trainer server nccl distributed kernels header nvcc old-nvcc new-nvcc handles colocated c++ c ninja").split(),
)
def test_gpu_environments_that_do_not_fit_are_told(check, overrides, found, told):
    with pytest.raises(ConfigurationError, match=told):
        check(*overrides, **found)


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], {}),
        ([], {"driver": None}),  # nvidia-smi does not say
        ([DISTRIBUTED], {"server": {"nvidia-nccl-cu13": None}}),  # NCCL of the system's
        ([], {"server": {"cuda": "12.8", "nvidia-nccl-cu12": "2.30.7"}, "nvcc": "12.4"}),
        ([], {"driver": "535.1", "trainer": {"cuda": "12.8"}, "server": {"cuda": "12.8"}, "nvcc": "12.8"}),
        ([], {"nvcc": "13.1"}),
        ([HANDLES], {"server": {"torch": "2.14.1"}}),
        ([HANDLES], {"trainer": {"torch": "2.12.0"}, "server": {"torch": "2.11.0"}}),
        ([], {"server": {"torch": "2.11.0"}}),  # over NCCL
        (["trainer.atropos.weight_sync.transport=disk"], {"server": {"torch": "2.11.0"}}),
        (["inference.colocated=true"], {"trainer": {"nvidia-nccl-cu13": "2.29.7"}}),
        (["trainer.atropos.weight_sync.transport=disk"], {"trainer": {"nvidia-nccl-cu13": "2.29.7"}}),
        (
            [DISTRIBUTED, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=false"],
            {"trainer": {"nvidia-nccl-cu13": "2.29.7"}},  # adapter-only LoRA sync does not go over NCCL
        ),
        (["trainer.device=cpu"], {"trainer": {"cuda": None}, "server": {"cuda": None}}),
    ],
)
def test_gpu_environments_that_fit_are_let_through(check, overrides, found):
    assert check(*overrides, **found) == []


def test_gpu_environments_with_an_old_driver_are_told(check):
    """NVIDIA's compatibility package may let it work."""
    told = check(driver="570.86.10")
    assert len(told) == 2 and "CUDA 13.0, which needs an NVIDIA driver from 580 on" in told[0] and "570.86" in told[0]


def test_gpu_environments_look_for_compilers_as_sglang_does(check, monkeypatch, tmp_path):
    """CUDA_HOME goes before PATH, $CC before gcc; a server finds what is beside its interpreter."""
    monkeypatch.setattr(gpu_environment, "server_path", lambda python: "a path")
    asked = []
    check(tools=TOOLS)
    monkeypatch.setattr(gpu_environment.shutil, "which", lambda name, **at: asked.append((name, at)) or name)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "my-cc")
    assert not any(wrong for wrong, _ in gpu_environment._missing_tools("server-python"))
    assert ("nvcc", {"path": f"{tmp_path}/bin"}) in asked and ("ninja", {"path": "a path"}) in asked
    assert asked[0] == ("my-cc", {"path": "a path"})


def test_gpu_server_finds_programs_beside_its_interpreter(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    launch = SGLangLaunch("model", python=str(python), device="cuda", port=1)
    assert sglang_command(launch)[1]["PATH"] == f"{python.parent}{os.pathsep}{os.environ['PATH']}"


def test_gpu_environments_with_an_nvcc_that_fails_are_told(check, monkeypatch):
    check()

    def fail(*_):
        raise LaunchError("nvcc does not run (no such file)")

    monkeypatch.setattr(gpu_environment, "run_program", fail)
    with pytest.raises(ConfigurationError, match="^nvcc does not run .no such file.: repair the CUDA toolkit"):
        check_gpu_environment(load_decided("actor_rollout_ref.model.path=m", "inference.python=server-python"))
