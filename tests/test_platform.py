"""verl's choice of platform, in processes that import verl as any other program does."""

import os
import subprocess
import sys

import pytest

CODE = "import verl; from verl.plugin.platform import get_platform; print('platform', get_platform().device_name)"


def platform(**environment):
    result = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    return [line for line in result.stdout.splitlines() if line.startswith("platform")]


def test_without_an_accelerator_verl_finds_the_cpu_by_itself():
    assert platform() == ["platform cpu"]


def test_where_a_gpu_is_present_the_plugin_stays_off(tmp_path):
    """There is none here to be present: verl asks nvidia-smi, so one that answers stands for it."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    assert platform(PATH=f"{tmp_path}:{os.environ['PATH']}") == ["platform cuda"]


@pytest.mark.parametrize(("name", "device"), [("cpu", "cpu"), ("nvidia", "cuda")])
def test_verls_own_variable_decides_over_both(name, device):
    assert platform(VERL_PLATFORM=name) == [f"platform {device}"]
