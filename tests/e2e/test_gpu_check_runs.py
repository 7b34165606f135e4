"""scripts/gpu_check.py from its start to its report, on a CPU."""

import json
import os
import signal
import sys

import pytest

from helpers import ROOT
from helpers.waiting import until
from recipe.atropos.utils.process import start_service

SCRIPT = ROOT / "scripts" / "gpu_check.py"
FIGURES = ("push_s", "push_gb_per_s", "pause_s", "generated_tokens_per_s", "trainer_gib", "server_high_gib")


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cases_train_push_and_are_measured_on_a_cpu(tmp_path):
    names = ["tensor", "distributed", "moe", "two_ranks"]
    status, report = finished(*started(tmp_path, "--steps", "2", "--only", ",".join(names)), timeout=880)
    assert status == 0 and report["ok"] and report["device"] == "cpu", report
    assert list(report["cases"]) == names
    for name, result in report["cases"].items():
        assert result["ok"] and all(result[figure] > 0 for figure in FIGURES), (name, result)
        assert result["probe"] < 1e-4 and result["after"] < 1e-4, (name, result)
    assert report["versions"]["trainer"]["verl"] and report["versions"]["sglang"]["sglang"]
    log = (tmp_path / "gpu_check.log").read_text()
    assert all(f"{name:<16}ok" in log for name in names)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpu_check_goes_on_after_a_case_that_fails(tmp_path):
    """Two seconds, in which nothing can start: both are tried, ended and named."""
    status, report = finished(*started(tmp_path, "--limit", "2", "--only", "tensor,disk"), timeout=280)
    assert status == 1 and not report["ok"]
    assert list(report["cases"]) == ["tensor", "disk"]
    for result in report["cases"].values():
        assert not result["ok"] and "not done in 2 s" in result["error"] and "launcher.log" in result["error"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_gpu_check_that_is_ended_leaves_nothing_but_its_report(tmp_path):
    """It ends what it started, and reports the cases that are done."""
    service, out = started(tmp_path, "--only", "disk")
    until((tmp_path / "work/disk/run/logs/trainer.log").exists, 120, service)
    os.kill(service.pid, signal.SIGTERM)
    status, report = finished(service, out, timeout=90)
    assert status == 130 and not report["ok"] and report["cases"] == {}
