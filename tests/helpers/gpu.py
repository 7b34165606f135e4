"""A machine with GPUs, as far as programs are asked for it: an ``nvidia-smi`` that lists some."""

import os

import pytest

from helpers.configs import loaded
from recipe.atropos.utils import gpus as device

VARIABLES = ("VERL_PLATFORM", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")


def load_decided(*overrides):
    """Return ``loaded`` with the device decided, as a start has it."""
    config = loaded(*overrides)
    device.decide_device(config)
    return config


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Call it with a number of GPUs, and what ``nvidia-smi`` does if not list them."""

    def of(gpus, script=None):
        lines = [f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i})\n  MIG 1g.10gb Device 0" for i in range(gpus)]
        (tmp_path / "bin").mkdir(exist_ok=True)
        program = tmp_path / "bin" / "nvidia-smi"
        program.write_text("\n".join(["#!/bin/sh", script or "cat <<END", *lines, "END\n"]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        device._gpus_of_the_machine.cache_clear()

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield of
    device._gpus_of_the_machine.cache_clear()
