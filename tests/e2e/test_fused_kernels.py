"""verl's fused kernels, which compute logprobs without a micro-batch's logits: updates are those of plain autograd."""

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from helpers.sglang import make_tiny_model
from helpers.trainer import compose_config, model_vocab, pushed_weights, random_group, running, update
from recipe.atropos.data.data_proto import groups_to_data_proto

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]


@pytest.fixture
def model_path(tmp_path):
    """With a tied head, without which verl's fused kernels fail under FSDP2."""
    return make_tiny_model(tmp_path / "model", seed=0, tie_word_embeddings=True)


@pytest.fixture
def trainer(model_path, tmp_path):
    config = compose_config(
        f"actor_rollout_ref.model.path={model_path}",
        "actor_rollout_ref.model.use_fused_kernels=true",
        f"run.dir={tmp_path}",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.rollout_correction.rollout_is=null",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=1",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "actor_rollout_ref.actor.optim.clip_grad=1e9",
        "inference.urls=[]",  # a push then only writes the weights
    )
    with running(config) as trainer:
        yield trainer


def pushed(trainer, step):
    ray.get(trainer.actor.update_weights(step, []))
    return pushed_weights(trainer.config.run.dir, step)


def response_logprobs(model, batch, row):
    """(R,) logprobs of a row's response by plain transformers, without padding."""
    width = batch.batch["responses"].shape[1]
    attended = batch.batch["attention_mask"][row].bool()
    ids, length = batch.batch["input_ids"][row][attended], int(attended[-width:].sum())
    logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
    return logprobs[torch.arange(len(ids) - length - 1, len(ids) - 1), ids[-length:]]


def test_update_with_fused_kernels_is_the_plain_one(trainer, model_path):
    rng = np.random.default_rng(0)
    groups = [random_group(rng, model_vocab(model_path), turns=2, prompt=10) for _ in range(4)]
    batch, _ = groups_to_data_proto(groups, trainer.limits)
    before = pushed(trainer, 1)
    update(trainer, batch, step=1)
    after = pushed(trainer, 2)

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    masks, loss = batch.batch["response_mask"], 0.0
    for row, mask in enumerate(masks):
        logprobs = response_logprobs(model, batch, row)
        mask, advantages, found = (
            tensor[: len(logprobs)]
            for tensor in (mask, *(batch.batch[key][row] for key in ("advantages", "old_log_probs")))
        )
        assert torch.allclose(found * mask, logprobs.detach() * mask, atol=1e-5)
        loss = loss - (advantages * logprobs * mask).sum() / masks.sum()
    loss.backward()
    moved = {name: before[name] - after[name] for name in before}
    assert {name for name, _ in model.named_parameters()} <= moved.keys()
    for name, parameter in model.named_parameters():
        assert torch.allclose(moved[name], parameter.grad, atol=2e-6, rtol=1e-3), name
    assert max(tensor.abs().max() for tensor in moved.values()) > 1e-3
