"""scripts/gpu_check.py, which looks at a GPU, as it runs without one: the real parts, and a tiny model."""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from recipe.atropos.inference.server import sglang_command
from recipe.atropos.launch_services import load_config
from recipe.atropos.preflight import check_config
from recipe.atropos.services.inference import plan_servers
from recipe.atropos.services.process import start_service
from recipe.atropos.services.run import Run

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
FIGURES = ("push_s", "push_gb_per_s", "pause_s", "generation_tokens_per_s", "trainer_peak_gib", "server_peak_gib")


def started(tmp_path, *options):
    """The script, on the CPU, as a service: its guardian ends and names what it leaves running."""
    out = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(out), "--work", str(tmp_path / "work")]
    return start_service("gpu_check", [*command, *options], log_path=tmp_path / "gpu_check.log"), out


def finished(service, out, timeout):
    """Exit status and report; nothing that the script started is left running."""
    try:
        status = service.process.wait(timeout)
        assert "ending what it left running" not in service.tail()
        return status, json.loads(out.read_text())
    finally:
        service.stop()


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_every_transport_trains_pushes_and_is_measured_on_a_cpu(tmp_path):
    status, report = finished(*started(tmp_path, "--steps", "2"), timeout=400)
    assert status == 0 and report["ok"] and report["device"] == "cpu", report
    assert list(report["transports"]) == ["tensor", "disk", "distributed"]
    for name, result in report["transports"].items():
        assert result["ok"] and all(result[figure] > 0 for figure in FIGURES), (name, result)
        assert result["probe_gap"] < 1e-4 and result["logprob_diff_max"] < 1e-4, (name, result)
        assert result["colocated"] == (name != "distributed")
        assert result["push_bytes"] == 4 * report["parameters"]
    assert report["versions"]["trainer"]["verl"] and report["versions"]["sglang"]["sglang"]
    log = (tmp_path / "gpu_check.log").read_text()
    assert all(f"{name:<13}ok" in log for name in report["transports"])


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_each_transport_has_a_limit_and_its_failure_does_not_hide_the_next(tmp_path):
    """Two seconds, in which nothing can start: both are tried, ended and named, with what the services said last."""
    status, report = finished(*started(tmp_path, "--limit", "2", "--transports", "tensor,disk"), timeout=160)
    assert status == 1 and not report["ok"]
    assert list(report["transports"]) == ["tensor", "disk"]
    for result in report["transports"].values():
        assert not result["ok"] and "not done within 2 s" in result["error"] and "--- sglang:" in result["error"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_check_that_is_ended_ends_what_it_started_and_says_what_it_has(tmp_path):
    service, out = started(tmp_path, "--transports", "disk")
    deadline = time.monotonic() + 120
    while not (tmp_path / "work" / "disk" / "logs" / "trainer.log").exists():
        assert service.poll() is None and time.monotonic() < deadline, service.tail()
        time.sleep(0.1)
    os.kill(service.pid, signal.SIGTERM)
    status, report = finished(service, out, timeout=60)
    assert status == 130 and not report["ok"] and report["transports"] == {}


def test_on_one_gpu_the_distributed_transport_is_impossible_and_with_two_it_has_a_gpu_of_its_own(script):
    one = {trial.transport: trial for trial in script.plan(gpus=1)}
    assert "second GPU" in one["distributed"].impossible
    assert all(one[name].colocated and not one[name].impossible for name in ("tensor", "disk"))
    two = {trial.transport: trial for trial in script.plan(gpus=2)}
    assert not two["distributed"].impossible and not two["distributed"].colocated and two["tensor"].colocated


def test_what_the_environments_lack_on_a_gpu_is_said_before_anything_starts(script):
    shared, apart = script.Trial("tensor", colocated=True), script.Trial("distributed")
    versions = {
        "trainer": {"nvidia-nccl-cu13": "2.29.7"},
        "sglang": {"nvidia-nccl-cu13": "2.30.7", "torch_memory_saver": None},
    }
    assert "torch_memory_saver" in script.lacking(shared, versions)
    assert "nvidia-nccl-cu13==2.30.7" in script.lacking(apart, versions)
    versions["sglang"] |= {"nvidia-nccl-cu13": "2.29.7", "torch_memory_saver": "0.0.10"}
    assert script.lacking(shared, versions) is None and script.lacking(apart, versions) is None


@pytest.mark.parametrize("transport", ["tensor", "disk", "distributed"])
def test_the_configuration_for_gpus_passes_the_trainers_own_checks_and_starts_sglang_as_meant(
    script, tmp_path, transport
):
    """Composed as on a GPU machine; verl's own platform here is the CPU's."""
    script.make_model(tmp_path / "model", script.SIZES["tiny"], torch.bfloat16)
    arguments = script.parse(["--size=400m", "--mem-fraction-static=0.25", "inference.python=python"])
    trial = script.plan(gpus=2, transports=[transport])[0]
    config = load_config(script.overrides_of(trial, arguments, tmp_path / "model", on_gpu=True))
    check_config(config)
    assert config.inference.dtype == "bfloat16" and not config.actor_rollout_ref.actor.use_torch_compile
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"
    servers = plan_servers(Run(config, [], tmp_path / "run"))
    command = " ".join(sglang_command(servers["sglang"])[0])
    assert "--device cuda --dtype bfloat16" in command
    if trial.colocated:
        assert "--mem-fraction-static 0.25" in command and "--enable-memory-saver" in command
        assert "--base-gpu-id 0" in command
    else:
        assert "--base-gpu-id 1" in command and "--mem-fraction" not in command and "--enable-memory" not in command
