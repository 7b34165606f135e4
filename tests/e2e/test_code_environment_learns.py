"""The small policy learns to write programs, by the launcher, as a person starts it."""

import sys

import orjson
import pytest

from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.process import start_service


@pytest.mark.slow
@pytest.mark.timeout(3000)  # with the making of the policy, where it is not kept yet; five minutes on idle cores
def test_code_environment_policy_learns(tmp_path):
    command = [sys.executable, "-m", "recipe.atropos.launch_services", "--preset", "code", "--seed", "0"]
    service = start_service("launcher", [*command, "--run-dir", str(tmp_path / "run")], log_path=tmp_path / "log")
    try:
        assert service.process.wait(2800) == 0, service.tail(60)
        assert "left running" not in service.tail(), "it ends what it started"
    finally:
        service.stop(grace=30)
    summary = orjson.loads((tmp_path / "run/summary.json").read_bytes())
    before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
    assert summary["heldout_problems"] == 256 and 0.3 <= before <= 0.7
    assert after - before >= 0.15
    assert summary["steps"] == 60 and summary["dropped"] == {}
    metrics = read_metrics(tmp_path / "run")
    assert metrics[0]["atropos/logprob_diff/max"] < 1e-4
    assert not any("unknown_version" in key for line in metrics for key in line)
    assert "isolated and probed" in "".join(path.read_text() for path in (tmp_path / "run/logs").glob("*.log"))
