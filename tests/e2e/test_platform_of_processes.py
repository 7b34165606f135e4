"""Which platform verl chooses in a process that imports it, on machines with and without GPUs.

There is no GPU here: an ``nvidia-smi`` that lists some stands for it.
"""

import os
import subprocess
import sys

import pytest

from helpers.gpu import VARIABLES

CODE = "import verl; from verl.plugin.platform import get_platform; print('platform', get_platform().device_name)"
DRIVERS = "import recipe.atropos.utils.gpus as device; device.driver_gpus = lambda: {}; "


def platform(code=CODE, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**kept, **environment}
    )
    return [line for line in result.stdout.splitlines() if line.startswith("platform")]


def test_without_an_accelerator_verl_finds_the_cpu_by_itself(machine):
    machine(0, "exit 9")
    assert platform(DRIVERS.format(0) + CODE, CUDA_VISIBLE_DEVICES="") == ["platform cpu"]


@pytest.mark.parametrize(
    "where", ["nvidia-smi", *(pytest.param(where, marks=pytest.mark.slow) for where in ("driver", "cluster", "worker"))]
)
def test_where_a_gpu_may_be_present_the_plugin_stays_off(machine, where):
    """verl then takes its own default, also in a process that sees no GPU by itself."""
    if where == "nvidia-smi":
        machine(1)
    variables = {"cluster": {"RAY_ADDRESS": "host:6379"}, "worker": {"RAY_RAYLET_PID": "1"}}.get(where, {})
    assert platform((DRIVERS.format(1) if where == "driver" else "") + CODE, **variables) == ["platform cuda"]


@pytest.mark.parametrize(("name", "device"), [("nvidia", "cuda"), pytest.param("cpu", "cpu", marks=pytest.mark.slow)])
def test_verls_own_variable_decides_over_both(name, device):
    assert platform(VERL_PLATFORM=name) == [f"platform {device}"]
