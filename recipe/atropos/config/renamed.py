"""Keys of other recipes that join Atropos and verl, and their names here. ``docs/migration.md`` lists all.

``check_renamed`` takes any mapping, nested or with dotted keys, so it works on a command line and on a file.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from recipe.atropos.errors import ConfigurationError

# A key covers all keys below it, which keep their names. If the new one has a comma or "=", the value differs too.
RENAMED = {
    "model.partial_pretrain": "actor_rollout_ref.model.path",
    "model.strategy": "actor_rollout_ref.actor.strategy",
    "rollout.max_new_tokens": "data.max_response_length",
    "actor_rollout_ref.rollout.max_new_tokens": "data.max_response_length",
    "data.micro_batch_size_per_gpu": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "data.balance_dp_token": "trainer.balance_batch",
    "optim": "actor_rollout_ref.actor.optim",
    "use_advantage_weighting": "actor_rollout_ref.actor.policy_loss.loss_mode=advantage_weighted_sft",
    "advantage_normalization": "trainer.atropos.advantage_normalization",
    "advantage_clipping": "trainer.atropos.advantage_clipping",
    "reward_config": "environment.reward_bridge",
    # atroposlib's example_trainer
    "model_name": "actor_rollout_ref.model.path",
    "lr": "actor_rollout_ref.actor.optim.lr",
    "training_steps": "trainer.total_training_steps",
    "batch_size": "data.train_batch_size, which counts groups of actor_rollout_ref.rollout.n sequences",
    "seq_len": "data.max_prompt_length and data.max_response_length, in tokens",
    "device": "trainer.device",
    "save_path": "trainer.default_local_dir",
    "vllm_port": "inference.gateway_port",
    "vllm_restart_interval": "trainer.atropos.weight_sync.every",
    "use_wandb": "trainer.logger=[console,wandb]",
    "wandb_project": "trainer.project_name",
    "wandb_group": "trainer.experiment_name",
}


def check_renamed(values: Mapping[str, Any]) -> None:
    """Raise ConfigurationError with a line for each key of ``RENAMED`` in ``values``, which names the new key."""
    if lines := list(_lines(values, "")):
        raise ConfigurationError("\n".join(lines))


def _lines(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _lines(value, f"{key}.")
        elif old := next((prefix for prefix in prefixes(key) if prefix in RENAMED), None):
            new = RENAMED[old] + key.removeprefix(old)
            shown = value if isinstance(value, str) else json.dumps(value, default=str)
            complete = "=" in new or "," in new
            instead = (
                "leave it out" if "=" in new and value is False else f"give {new if complete else f'{new}={shown}'}"
            )
            yield f"{key}={shown}: this key has another name here; {instead}"


def prefixes(key: str) -> list[str]:
    """Return the dotted key and the mappings around it, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
