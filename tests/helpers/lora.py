"""A trainer with a LoRA adapter, and its steps one by one."""

from copy import deepcopy

from helpers.sglang import sampled_groups
from helpers.trainer import compose_config, prepare, started
from recipe.atropos.data.data_proto import groups_to_data_proto

RANK, ALPHA = 8, 32


def make_trainer(model_path, server, run_dir, strategy, world, targets, *overrides):
    config = compose_config(
        f"actor_rollout_ref.model.path={model_path}",
        f"actor_rollout_ref.model.lora_rank={RANK}",
        f"actor_rollout_ref.model.lora_alpha={ALPHA}",
        f"actor_rollout_ref.model.target_modules={targets}",
        "actor_rollout_ref.model.lora.merge=true",
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=3",
        f"trainer.n_gpus_per_node={world}",
        f"inference.urls=[{server}]",
        f"run.dir={run_dir}",
        *overrides,
    )
    return started(config)


def scored_batch(trainer, server, step):
    """A batch of fresh samples, ready for the update, and the largest difference of engine and worker on it."""
    batch, _ = groups_to_data_proto(sampled_groups(server), trainer.limits, trainer.mini_batch_size)
    prepare(trainer, batch, step)
    trainer._describe(batch)
    return batch, trainer.metrics["atropos/logprob_diff/max"]


def update(trainer, batch, step):
    trainer.metrics, trainer.timing_raw, trainer.global_steps = {}, {}, step
    trainer._update_actor(deepcopy(batch), meanwhile=trainer._describe)
