"""Configurations and rows for tests that run verl's real workers."""

import functools
import pickle
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer
from verl.utils.config import omega_conf_to_dataclass

from helpers.services import get, post
from helpers.waiting import until
from recipe.atropos.config import compose
from recipe.atropos.config.derived import set_derived
from recipe.atropos.inference.own_gateway import gateway_before

CPU_OVERRIDES = [
    "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.use_torch_compile=false",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512",
    "inference.dtype=float32",
    "trainer.atropos.weight_sync.transport=disk",  # what was pushed can be read
    "trainer.logger=[]",
]


def compose_config(*overrides: str) -> DictConfig:
    """The recipe's configuration for this machine, with further overrides."""
    return pickle.loads(_composed(overrides))  # faster than a deep copy


@functools.cache
def configured(*overrides: str) -> DictConfig:
    """Of no model; it is shared, so nothing of it is changed."""
    return compose_config("actor_rollout_ref.model.path=none", *overrides)


def actor_of(*overrides: str) -> Any:
    """``actor_rollout_ref.actor`` as verl's losses take it; a new one."""
    return omega_conf_to_dataclass(configured(*overrides).actor_rollout_ref.actor)


_KEYS = {
    "world": "trainer.n_gpus_per_node",
    "strategy": "actor_rollout_ref.actor.strategy",
    "groups": "data.train_batch_size",
    "size": "actor_rollout_ref.rollout.n",
    "lr": "actor_rollout_ref.actor.optim.lr",
    "steps": "trainer.total_training_steps",
    "transport": "trainer.atropos.weight_sync.transport",
    "api": "trainer.atropos.api_url",
}


def trainer_config(model: Any, folder: Any, servers: Iterable[str], *overrides: str, **values: Any) -> DictConfig:
    """``compose_config`` for a run in ``folder`` with these servers; ``values`` are by the names of ``_KEYS``."""
    options = [f"actor_rollout_ref.model.path={model}", f"run.dir={folder}", f"inference.urls=[{','.join(servers)}]"]
    return compose_config(*options, *(f"{_KEYS[name]}={value}" for name, value in values.items()), *overrides)


@functools.cache
def _composed(overrides: tuple[str, ...]) -> bytes:
    config = compose.compose_config([*CPU_OVERRIDES, *overrides])
    config.trainer.device = "cpu"  # as recipe.atropos.main sets it
    return pickle.dumps(set_derived(config))


def started(config: DictConfig) -> Any:
    """A RayGRPOAtroposTrainer whose workers are up, with the gateway that it is started with; ``close`` it."""
    from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer

    path, gateway = config.actor_rollout_ref.model.path, ExitStack()
    gateway.enter_context(gateway_before(config))
    trainer = RayGRPOAtroposTrainer(
        config=config, tokenizer=AutoTokenizer.from_pretrained(path), vocab_size=model_vocab(path)
    )
    trainer.init_workers()
    trainer.gateway = gateway
    return trainer


@contextmanager
def running(config: DictConfig) -> Iterator[Any]:
    """``started``, and closed at the end."""
    trainer = started(config)
    try:
        yield trainer
    finally:
        close(trainer)


def fit_on(trainer: Any, groups: Iterable[dict[str, Any]]) -> None:
    """``fit``, with ``groups`` posted from its registration on; they may take their time."""
    poster = threading.Thread(
        target=post_when_registered, args=(trainer.config.trainer.atropos.api_url, groups), daemon=True
    )
    poster.start()
    trainer.fit()
    poster.join(10)


def post_when_registered(url: str, groups: Iterable[dict[str, Any]]) -> None:
    """Post groups once a trainer has registered."""
    until(lambda: get(f"{url}/info")["batch_size"] != -1, 200, told=lambda: "no trainer registers")
    for item in groups:
        post(f"{url}/scored_data", item)


def update(trainer: Any, batch: Any, step: int) -> None:
    """One update on a batch, of which the engine's logprobs are known."""
    prepare(trainer, batch, step)
    trainer._update_actor(batch, meanwhile=trainer._describe)


def prepare(trainer: Any, batch: Any, step: int) -> None:
    """All that comes before an update."""
    begin_step(trainer, batch, step)
    trainer._compute_log_probs(batch)
    trainer._compute_reference_log_probs(batch)
    trainer._compute_advantages(batch)


def pushed_weights(run_dir: Path | str, version: int) -> dict[str, torch.Tensor]:
    """What was written for a push of this version, by name."""
    files = sorted(Path(run_dir, "weights", "weight_versions", f"version_{version}").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def begin_step(trainer: Any, batch: Any, step: int) -> None:
    """What the trainer sets before the parts of ``fit_step`` that a test calls itself."""
    trainer.metrics, trainer.timing_raw, trainer._later, trainer.global_steps = {}, {}, [], step
    batch.meta_info["temperature"] = 1.0


def close(trainer: Any) -> None:
    """End a trainer's workers and give their resources back to Ray."""
    for worker in trainer.actor.workers:
        ray.kill(worker)
    for group in trainer.actor.pool.pgs:
        ray.util.remove_placement_group(group)
    trainer.gateway.close()


def random_group(
    rng: np.random.Generator, vocab_size: int, turns: int = 1, size: int = 4, prompt: int = 6, longest: int = 12
) -> dict[str, Any]:
    """A group in the API's format: prompts of different lengths, ``turns`` trained spans with masked tokens between."""
    tokens, masks, logprobs = [], [], []
    for _ in range(size):
        ids = rng.integers(3, vocab_size, int(rng.integers(1, prompt + 1))).tolist()
        mask = [-100] * len(ids)
        for turn in range(turns):
            span = rng.integers(3, vocab_size, int(rng.integers(1, longest + 1))).tolist()
            ids, mask = ids + span, mask + span
            if turn + 1 < turns:
                reply = rng.integers(3, vocab_size, int(rng.integers(1, 5))).tolist()
                ids, mask = ids + reply, mask + [-100] * len(reply)
        tokens.append(ids)
        masks.append(mask)
        logprobs.append([1.0 if m == -100 else float(-rng.exponential()) for m in mask])
    scores = rng.choice([-1.0, 1.0], size).tolist()
    return {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs, "env_id": 0}


def model_vocab(path: Path | str) -> int:
    """Vocabulary size of the model in ``path``."""
    return AutoConfig.from_pretrained(path).vocab_size
