"""A trainer with a LoRA adapter, and its steps one by one."""

import asyncio
from copy import deepcopy

from helpers.trainer import begin_step, compose_config, started
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.inference.client import SGLangClient

RANK, ALPHA = 8, 32
PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33, 34]]


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


def sampled_groups(server, n=4):
    """Fresh samples as an environment posts them: full length, the engine's own logprobs, 1.0 over the prompt."""

    async def sample():
        parameters = {"temperature": 1.0, "max_new_tokens": 16, "n": n}
        async with SGLangClient(server) as client:
            return [await client.generate(input_ids=prompt, sampling_params=parameters) for prompt in PROMPTS]

    groups = []
    for prompt, replies in zip(PROMPTS, asyncio.run(sample()), strict=True):
        outputs = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
        tokens = [[token for _, token, _ in output] for output in outputs]
        groups.append(
            {
                "tokens": [prompt + output for output in tokens],
                "masks": [[-100] * len(prompt) + output for output in tokens],
                "inference_logprobs": [[1.0] * len(prompt) + [lp for lp, *_ in output] for output in outputs],
                "scores": [float(i % 2) for i in range(n)],
            }
        )
    return groups


def scored_batch(trainer, server, step):
    """A batch of fresh samples, ready for the update, and the largest difference of engine and worker on it."""
    batch, _ = groups_to_data_proto(sampled_groups(server), trainer.limits, trainer.mini_batch_size)
    begin_step(trainer, batch, step)
    trainer._compute_log_probs(batch)
    trainer._compute_reference_log_probs(batch)
    trainer._compute_advantages(batch)
    return batch, trainer.metrics["atropos/logprob_diff/max"]


def update(trainer, batch, step):
    trainer.metrics, trainer.timing_raw, trainer.global_steps = {}, {}, step
    trainer._update_actor(deepcopy(batch))
