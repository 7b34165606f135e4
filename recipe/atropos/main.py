"""Hydra entry point of the trainer: ``python -m recipe.atropos.main key=value ...``

The SGLang servers (``inference.urls``) and the Trajectory API (``trainer.atropos.api_url``) must be running;
``launch_services`` starts them, and an environment, around this.
"""

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hydra
import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import GetTimeoutError, RayTaskError
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.device import get_device_name

from recipe.atropos.data_source import DataSourceError
from recipe.atropos.evaluated import NotEvaluated
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.preflight import ConfigurationError, check_config, check_services, resolve_model
from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer
from recipe.atropos.weight_sync.fleet import ServersGone
from recipe.atropos.weight_sync.gateway import GatewayError
from recipe.atropos.weight_sync.servers import WeightPushError

logger = logging.getLogger(__name__)

# Each names what is wrong and where to look; a traceback would only hide it.
_EXPECTED = (
    ConfigurationError,
    DataSourceError,
    GatewayError,
    GetTimeoutError,
    InferenceError,
    NotEvaluated,
    RayTaskError,
    ServersGone,
    WeightPushError,
)


def run(config: DictConfig) -> None:
    """Check, start Ray (or join the cluster of RAY_ADDRESS), train.

    Raises:
        ConfigurationError: a value that cannot work, or a service that does not answer within ``startup_timeout``.
        DataSourceError: the Trajectory API was lost, or no batch came in time.
        WeightPushError, InferenceError, GetTimeoutError: a server refused the weights, or does not answer.
        NotEvaluated: the launcher's evaluation of the weights in force did not end.
        ServersGone, GatewayError: behind a gateway, no SGLang server is left, or the gateway itself is gone.
    """
    with open_dict(config):
        config.trainer.device = get_device_name()
        if config.trainer.device == "cpu":  # verl's own default, FlashAttention, exists for accelerators only
            config.actor_rollout_ref.model.override_config.setdefault("attn_implementation", "sdpa")
    OmegaConf.resolve(config)
    os.environ.setdefault("TENSORBOARD_DIR", str(Path(config.run.dir) / "tensorboard"))
    os.environ.setdefault("WANDB_DIR", str(config.run.dir))
    config.actor_rollout_ref.model.path = resolve_model(config.actor_rollout_ref.model.path, config.seed)
    check_config(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)

    init = OmegaConf.to_container(config.ray_kwargs.ray_init)
    runtime_env = {**get_ppo_ray_runtime_env(config), **(init.pop("runtime_env", None) or {})}
    with ThreadPoolExecutor(max_workers=1) as pool:  # the servers may still be starting, and so do Ray and its workers
        services = pool.submit(check_services, config, timeout=config.trainer.atropos.startup_timeout)
        ray.init(runtime_env=runtime_env, **init)
        try:
            model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
            vocab_size = model.hf_config.get_text_config().vocab_size
            trainer = RayGRPOAtroposTrainer(config=config, tokenizer=model.tokenizer, vocab_size=vocab_size)
            trainer.init_workers()
            services.result()
            trainer.fit()
        finally:
            ray.shutdown()


@hydra.main(config_path="config", config_name="trainer", version_base=None)
def main(config: DictConfig) -> None:
    try:
        run(config)
    except _EXPECTED as error:
        logger.debug("the run ended with", exc_info=True)
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
