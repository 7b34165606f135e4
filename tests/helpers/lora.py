"""A trainer with a LoRA adapter, and its steps one by one."""

from copy import deepcopy

from helpers.sglang import sampled_groups
from helpers.trainer import prepare, started, trainer_config
from recipe.atropos.data.data_proto import groups_to_data_proto

RANK, ALPHA = 8, 32


def make_trainer(model_path, server, run_dir, strategy, world, targets, *overrides):
    adapter = {"lora_rank": RANK, "lora_alpha": ALPHA, "target_modules": targets, "lora.merge": "true"}
    options = [f"actor_rollout_ref.model.{key}={value}" for key, value in adapter.items()]
    options += ["actor_rollout_ref.actor.use_kl_loss=true", *overrides]
    values = {"strategy": strategy, "lr": 1e-3, "groups": 3, "size": 4, "world": world}
    return started(trainer_config(model_path, run_dir, [server], *options, **values))


def scored_batch(trainer, server, step):
    """A batch of fresh samples, ready for the update, and the largest difference of engine and worker on it."""
    batch, _ = groups_to_data_proto(sampled_groups(server), trainer.limits, trainer.mini_batch_size)
    prepare(trainer, batch, step)
    trainer._describe(batch)
    return batch, trainer.metrics["atropos/logprob_diff/max"]


def update(trainer, batch, step):
    trainer.metrics, trainer.timing_raw, trainer.global_steps = {}, {}, step
    trainer._update_actor(deepcopy(batch), meanwhile=trainer._describe)
