"""verl's fused kernels, which compute logprobs without a micro-batch's logits: updates are those of plain autograd."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.gradients import Update, assert_per_token, sgd_trainer, some_groups
from helpers.sglang import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]


def test_update_with_fused_kernels_is_the_plain_one(tmp_path):
    """With a tied head, without which verl's fused kernels fail under FSDP2."""
    model_path = make_tiny_model(tmp_path / "model", seed=0, tie_word_embeddings=True)
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    groups = some_groups(model_path)
    with sgd_trainer(model_path, tmp_path, "actor_rollout_ref.model.use_fused_kernels=true") as trainer:
        update = Update(trainer, plain, groups, {"rollout_correction.rollout_is": None})
    del update.gradient["lm_head.weight"]  # the embedding's
    rows = assert_per_token(update, lambda row, advantage: dict.fromkeys(row.positions, -advantage))
    for row, found in zip(rows, update.batch.batch["old_log_probs"], strict=False):
        assert found[[t - row.first for t in row.positions]].tolist() == pytest.approx([*row.values.values()], abs=1e-5)
