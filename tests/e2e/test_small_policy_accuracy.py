"""The policy of the demonstration as it is before any training; where it is not kept yet, it is made."""

import pytest
from transformers import AutoTokenizer

from recipe.atropos.demo import policies
from recipe.atropos.demo.policies import TwoTaskRecipe
from recipe.atropos.demo.small_policy import Recipe, ensure_small_policy


@pytest.mark.timeout(280)
def test_small_policy_gets_a_fifth_to_a_half_right():
    """The problems are held out."""
    assert 0.2 <= Recipe().accuracies(ensure_small_policy(seed=0))["word problems"] <= 0.5


def test_a_policy_is_made_in_a_folder_and_measured(tmp_path, capsys, monkeypatch):
    quick = TwoTaskRecipe(steps=3, problems=200, batch_size=8)
    monkeypatch.setitem(policies.RECIPES, quick.name, quick)
    monkeypatch.setattr("sys.argv", ["policies", quick.name, "--output", str(tmp_path), "--seed", "1"])
    policies.main()
    shown = capsys.readouterr().out
    assert "greedy, held out, word problems: " in shown and "greedy, held out, sums: " in shown
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
