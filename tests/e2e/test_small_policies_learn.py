"""The small policies learn to use a calculator and to write programs, by the launcher, as a person starts it."""

import orjson
import pytest

from helpers.launchers import trained
from recipe.atropos.run.record import read_metrics


@pytest.mark.slow
@pytest.mark.timeout(3000)  # with the making of the policy, where it is not kept yet; five minutes on idle cores
@pytest.mark.parametrize(
    ("preset", "seed", "least", "most"),
    [("calculator", 0, 0.1, 0.5), ("calculator", 1, 0.1, 0.5), ("code", 0, 0.3, 0.7)],
)
def test_preset_raises_held_out_success_by_15_points(tmp_path, preset, seed, least, most):
    """It has 60 steps for that."""
    trained(tmp_path, "--preset", preset, "--seed", str(seed), "--run-dir", "run", timeout=2800)
    summary = orjson.loads((tmp_path / "run/summary.json").read_bytes())
    before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
    assert summary["heldout_problems"] == 256 and least <= before <= most
    assert after - before >= 0.15
    assert summary["steps"] == 60 and summary["dropped"] == {}
    metrics = read_metrics(tmp_path / "run")
    assert metrics[0]["atropos/logprob_diff/max"] < 1e-4
    assert max(line["atropos/staleness/max"] for line in metrics) <= 2
    assert not any("unknown_version" in key for line in metrics for key in line)
    rows = [orjson.loads(line) for line in (tmp_path / "run/rollouts/60.jsonl").read_bytes().splitlines()]
    assert all(row["score"] in (1.0, -1.0) for row in rows)
    if preset == "calculator":
        assert sum(row["output"].count("<|im_start|>tool") for row in rows) >= 2 * len(rows), "two calls a problem"
    else:
        assert "isolated and probed" in "".join(path.read_text() for path in (tmp_path / "run/logs").glob("*.log"))
