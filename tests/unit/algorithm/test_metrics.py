"""The metrics of a batch, number by number."""

import numpy as np
import pytest
import torch
from verl.protocol import DataProto

from recipe.atropos.algorithm.metrics import batch_metrics, staleness_metrics


def a_batch():
    """Five rows of three groups; the last two are of another environment, without advantage."""
    mask = [[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
    tensors = {
        "response_mask": torch.tensor(mask),
        "attention_mask": torch.tensor([[0, 1, *row] for row in ([1, 1, 0, 0], [1] * 4, [1, 0, 0, 0], [1, 1, 1, 0])])[
            [0, 1, 2, 3, 0]
        ],
        "advantages": torch.tensor([[1.0, 2.0, 9.0, 9.0], [-1.0, 9.0, -1.0, -1.0], [0.5] * 4, [0.0] * 4, [0.0] * 4]),
        "token_level_scores": torch.tensor(
            [[0.0, 1.0, 0, 0], [0.0, 0, 0, 3.0], [2.0, 0, 0, 0], [0, 0, 5.0, 0], [0.0] * 4]
        ),
    }
    others = {
        "env_name": np.array(["a/b", "a/b", "a/b", None, None], dtype=object),
        "env_id": np.array([1, 1, 1, 7, 7], dtype=object),
        "raw_score": np.array([10.0, 30.0, 20.0, 50.0, 0.0]),
        "credit": np.array([None] * 5, dtype=object),
        "uid": np.array(["0", "0", "1", "2", "2"], dtype=object),
        "has_signal": np.array([True, False, True, False, False]),
        "policy_version_min": np.array([4, 2, None, 4, 3], dtype=object),
        "sequence": np.arange(5),
    }
    return DataProto.from_dict(tensors, others)


def test_metrics_are_over_trained_tokens_rows_and_groups():
    found = batch_metrics(a_batch())
    expected = {
        "mean_score": (11 / 5, 2.0, 2.5),
        "mean_raw_score": (22.0, 20.0, 25.0),
        "raw_score_min": (0.0, 10.0, 0.0),
        "raw_score_max": (50.0, 30.0, 50.0),
        "mean_advantage": (0.5 / 11, 0.5 / 6, 0.0),
        "trained_tokens": (11, 6, 5),
        "response_length": (12 / 5, 7 / 3, 2.5),
        "groups": (3, 2, 1),
        "zero_signal_groups": (1, 0, 1),
        "zero_signal_share": (1 / 3, 0, 1),
    }
    wanted = {"atropos/num_environments": 2.0}
    for key, (of_all, of_named, of_other) in expected.items():
        wanted |= {f"atropos/{key}": of_all, f"atropos/a_b/{key}": of_named, f"atropos/env_7/{key}": of_other}
    assert found == pytest.approx(wanted)
    assert all(type(value) is float for value in found.values())


def test_metrics_of_credit_by_hand():
    """Of rows with a rule: row 0 has one turn, row 1 two, and is less rewarded than its score is above the other's."""
    batch = a_batch()
    batch.non_tensor_batch["credit"][:2] = "lam=0.5"
    found = batch_metrics(batch)
    for name in ("atropos", "atropos/a_b"):
        assert found[f"{name}/credit/last_turn_share"] == pytest.approx((3 + 2) / 6)
        assert found[f"{name}/credit/turn_share/1"] == pytest.approx((3 + 1) / 6)
        assert found[f"{name}/credit/turn_share/2"] == pytest.approx(2 / 6)
        assert f"{name}/credit/turn_share/3" not in found
        assert found[f"{name}/credit/outcome_correlation"] == pytest.approx(-1.0)
    assert not any("env_7/credit" in key for key in found)
    batch.non_tensor_batch["trajectory"] = np.array([4, 4, None, None, None], dtype=object)
    found = batch_metrics(batch)
    assert found["atropos/credit/last_turn_share"] == pytest.approx(2 / 6), "of one trajectory"
    shares = [found[f"atropos/credit/turn_share/{turn}"] for turn in (1, 2, 3)]
    assert shares == pytest.approx([3 / 6, 1 / 6, 2 / 6]), "its second row's turns come after those of the first"
    batch.non_tensor_batch["sequence"][:2] = [1, 0]
    found = batch_metrics(batch)
    assert found["atropos/credit/last_turn_share"] == pytest.approx(3 / 6), "in the group's order, whatever the batch's"
    shares = [found[f"atropos/credit/turn_share/{turn}"] for turn in (1, 2, 3)]
    assert shares == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_metrics_of_credit_are_of_eight_turns_at_most():
    """Twenty turns of one token each; padding and the environment's tokens are of no turn."""
    mask = torch.tensor([[1, 0] * 20 + [0, 0]])
    rows = DataProto.from_dict(
        {
            "response_mask": mask,
            "attention_mask": torch.ones(1, 43),
            "advantages": torch.ones(mask.shape),
            "token_level_scores": torch.zeros(mask.shape),
        },
        {name: values[:1] for name, values in a_batch().non_tensor_batch.items()} | {"credit": np.array(["lam=0"])},
    )
    found = batch_metrics(rows)
    shares = {key.rpartition("/")[2]: value for key, value in found.items() if key.startswith("atropos/credit/turn_")}
    assert shares == pytest.approx({str(turn): 0.05 for turn in range(1, 9)})


def test_metrics_of_a_batch_without_a_trained_token_are_finite():
    batch = a_batch()
    batch.batch["response_mask"][3:] = 0
    assert batch_metrics(batch)["atropos/env_7/mean_advantage"] == 0
    batch.batch["response_mask"][3, 0] = 1
    batch.batch["advantages"][3, 0] = 3.0
    assert batch_metrics(batch)["atropos/env_7/mean_advantage"] == 3, "of one token"


def test_metrics_of_staleness_count_updates_and_rows():
    found = staleness_metrics(a_batch(), step=5)
    ages = {"mean": 0.75, "max": 2, "min": 0, "rows_0": 2, "rows_1": 1, "rows_2": 1}
    assert found == {
        "atropos/rows_with/unknown_version": 1.0,
        **{f"atropos/staleness/{key}": float(value) for key, value in ages.items()},
    }
    batch = a_batch()
    batch.non_tensor_batch["policy_version_min"][:] = None
    assert staleness_metrics(batch, step=5) == {"atropos/rows_with/unknown_version": 5.0}
    batch.non_tensor_batch["policy_version_min"][:] = 4
    assert "atropos/rows_with/unknown_version" not in staleness_metrics(batch, step=5)
