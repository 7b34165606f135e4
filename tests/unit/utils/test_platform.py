"""Which device a run takes, on machines with and without GPUs.

There is no GPU here: an ``nvidia-smi`` that lists some stands for it, as verl too asks that program.
"""

import pytest

from recipe.atropos.config.compose import resolved
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import SGLangLaunch, sglang_command, uses_gpu
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.utils import gpus as device
from recipe.atropos.utils.gpus import platform_variables, visible_gpus

NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
NVIDIA = {"VERL_PLATFORM": "nvidia", **NCCL}
CPU = {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("-1", 0), ("1,3", 2), ("2,-1,3", 1), ("GPU-1", 1), ("0,1,2,3,4,5", 4)]
)
def test_gpus_are_those_that_cuda_may_use(machine, monkeypatch, visible, count):
    machine(4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == count and uses_gpu(SGLangLaunch("m")) == (count > 0)


def test_gpus_are_counted_by_the_driver_without_nvidia_smi(machine, monkeypatch):
    machine(0, "exit 9")
    monkeypatch.setattr(device.glob, "glob", lambda pattern: [])
    assert visible_gpus() == 0
    device._gpus_of_the_machine.cache_clear()
    monkeypatch.setattr(device.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(device.glob, "glob", lambda pattern: ["0", "1"] if pattern.startswith("/proc") else [])
    assert visible_gpus() == 2


def test_gpu_whose_nvidia_smi_fails_is_an_error(machine, monkeypatch):
    machine(0, "echo Driver/library version mismatch; exit 18")
    monkeypatch.setattr(device, "driver_gpus", lambda: 1)
    with pytest.raises(ConfigurationError, match="nvidia-smi -L fails .Driver/library version mismatch.: repair"):
        visible_gpus()


def test_gpu_whose_nvidia_smi_hangs_is_an_error(machine, monkeypatch):
    machine(0, "exec sleep 100")
    monkeypatch.setattr(device, "_SMI_SECONDS", 0.2)
    with pytest.raises(ConfigurationError, match="nvidia-smi -L does not answer within 0.2 s: .*CUDA_VISIBLE_DEVICES="):
        visible_gpus()


@pytest.mark.parametrize(
    ("gpus", "options", "environment", "expected"),
    [
        (0, [], {}, CPU),
        (1, [], {}, NVIDIA),
        (1, [], {"CUDA_VISIBLE_DEVICES": ""}, CPU),
        (1, ["preset=demo"], {}, CPU),
        (1, ["preset=demo"], {"RAY_ADDRESS": "host:6379"}, CPU),
        (1, ["preset=demo"], {"VERL_PLATFORM": "nvidia"}, CPU),
        (0, [], {"RAY_ADDRESS": "host:6379"}, NVIDIA),  # a head without a GPU, or a driver in front of a cluster
        (0, ["ray_kwargs.ray_init.address=host:6379"], {}, NVIDIA),
        (0, ["ray_kwargs.ray_init.address=host:6379", "trainer.device=cpu"], {}, CPU),
        (0, ["trainer.device=cuda"], {}, NVIDIA),
        (0, [], {"VERL_PLATFORM": "amd"}, {"VERL_PLATFORM": "amd", **NCCL}),
    ],
)
def test_trainer_and_servers_compute_on_the_same_device(machine, monkeypatch, gpus, options, environment, expected):
    machine(gpus)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plan = plan_run(["actor_rollout_ref.model.path=m", *options])
    assert platform_variables(plan.config) == expected
    assert plan.config.trainer.device == ("cpu" if expected == CPU else "cuda")
    given = plan.complete()
    assert given.inference.device == given.trainer.device == resolved(plan.composed).trainer.device, "as the user said"


def test_server_on_a_cpu_leaves_the_gpus_alone(machine):
    machine(2)
    assert sglang_command(SGLangLaunch("m", python="p", port=1, device="cpu"))[1]["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in sglang_command(SGLangLaunch("m", python="p", port=1))[1]
