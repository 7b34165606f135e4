"""The trainer: ``python -m recipe.atropos.main key=value ...``, a Hydra application (``--help``, ``--hydra-help``).

The SGLang servers (``inference.urls``) and the Trajectory API (``trainer.atropos.api_url``) must be running;
``launch_services`` starts them, the environments and this trainer. Without ``inference.gateway``, the trainer starts a
gateway in front of the servers, and prints how environments use it. verl, torch and Ray are imported only once the
configuration has been checked, so that a wrong key or value is reported quickly.
"""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.atropos.checkpoint.resumption import prepare_folder
from recipe.atropos.config.compose import differences
from recipe.atropos.config.hydra_app import checked_config, hydra_arguments
from recipe.atropos.config.model_rules import model_rules
from recipe.atropos.config.models import check_model, resolve_model
from recipe.atropos.config.preflight import check_config, check_rules
from recipe.atropos.errors import ConfigurationError, expected_failure, one_line_errors, output_may_be_closed
from recipe.atropos.inference.installed import installed_versions
from recipe.atropos.inference.own_gateway import gateway_before
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils import scratch
from recipe.atropos.utils.files import DiskFull
from recipe.atropos.utils.gpus import BUCKET_MEGABYTES, decide_device, platform_variables, visible_gpus
from recipe.atropos.utils.hosts import cluster_address, interface_variables, is_this_host
from recipe.atropos.utils.importing import gc_disabled
from recipe.atropos.verl_ext.attention import set_attention


def run(config: DictConfig, given: Mapping[str, Any] | None = None) -> None:
    """Start Ray (or join the cluster at RAY_ADDRESS) and train. ``config`` is checked, and its device is decided.

    ``given``: as for ``resumption.prepare_folder``.

    A failure or a signal ends it at once, together with the Ray cluster that it started.

    Raises:
        AtroposError: a value that cannot work, a service that does not answer in time, a push that failed, a run
            folder that another process holds, a full disk.
    """
    if not (config.inference.urls or config.trainer.atropos.replay):
        raise ConfigurationError(
            "inference.urls is empty: give the URLs of the SGLang servers, inference.urls=[http://HOST:PORT], "
            "or start everything with python -m recipe.atropos.launch_services"
        )
    os.environ |= platform_variables(config)  # before verl is imported
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's: batches in huge pages, which cost fewer page faults
    with gc_disabled():
        from recipe.atropos.verl_ext.driver import validate_config
        from recipe.atropos.verl_ext.ranks import need_reference_policy

    fill_in(config)
    if warning := set_attention(config):
        print(warning, flush=True)
    folder = RunDir(config.run.dir)
    os.environ.setdefault("TENSORBOARD_DIR", str(folder.tensorboard))
    os.environ.setdefault("WANDB_DIR", str(config.run.dir))
    config.actor_rollout_ref.model.path = resolve_model(config.actor_rollout_ref.model.path, config.seed)
    check_rules(model_rules(config))  # those of the hub may have come since
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)

    with folder.lock():
        if folder.inherited_lock() is None:  # else the launcher has prepared it
            for change in prepare_folder(folder, config, installed_versions(config.inference.python), given):
                print(f"resumed with another {change}", flush=True)
        with gateway_before(config):
            _train(config)


def fill_in(config: DictConfig) -> None:
    """Fill in settings that are still null without a launcher, or depend on the device."""
    with open_dict(config):
        # null is for the launcher to resolve; without it: not colocated
        config.inference.colocated = bool(config.inference.colocated)
        pushes = config.actor_rollout_ref.rollout.checkpoint_engine
        if pushes.update_weights_bucket_megabytes is None:
            pushes.update_weights_bucket_megabytes = BUCKET_MEGABYTES[config.trainer.device]


def _train(config: DictConfig) -> None:
    with gc_disabled():
        import ray

        from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer
        from recipe.atropos.utils.local_ray import keep_logs, start_ray
        from recipe.atropos.verl_ext.driver import omega_conf_to_dataclass

    if not cluster_address(config.ray_kwargs.ray_init):
        os.environ |= scratch.current().variables()
        if all(is_this_host(url) for url in config.inference.urls):
            os.environ |= interface_variables()
    start_ray(**ray_options(config))
    try:
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        vocab_size = model.hf_config.get_text_config().vocab_size
        trainer = RayGRPOAtroposTrainer(config=config, tokenizer=model.tokenizer, vocab_size=vocab_size)
        trainer.init_workers()
        trainer.fit()
    except Exception:
        keep_logs(RunDir(config.run.dir).logs / "ray")
        raise
    finally:
        ray.shutdown()
    export_model(RunDir(config.run.dir))


def ray_options(config: DictConfig) -> dict[str, Any]:
    """Return ``ray.init``'s arguments; all workers, also on other machines, get this process's platform variables."""
    from recipe.atropos.verl_ext.driver import get_ppo_ray_runtime_env

    init: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    if not cluster_address(init) and config.trainer.device == "cuda" and config.trainer.nnodes == 1:
        init.setdefault("num_gpus", min(config.trainer.n_gpus_per_node, visible_gpus()))  # the others are the servers'
    runtime_env = {**get_ppo_ray_runtime_env(config), **(init.pop("runtime_env", None) or {})}
    own = {name: os.environ[name] for name in platform_variables(config)}
    runtime_env["env_vars"] = {**own, **runtime_env.get("env_vars", {})}
    return {**init, "runtime_env": runtime_env}


def export_model(folder: RunDir) -> None:
    """Export the last checkpoint to the run's folder. Only report a failure, since all steps are trained.

    Raises:
        DiskFull: the same command exports it once there is room.
    """
    try:
        from recipe.atropos.checkpoint.export import export_last

        if (exported := export_last(folder)) is not None:
            print(f"model exported to {exported}", flush=True)
    except DiskFull:
        raise
    except Exception as error:  # also transformers', such as a model type that it no longer knows
        if (message := expected_failure(error)) is None:
            logging.getLogger(__name__).exception("the export of the trained model failed")
            message = f"{type(error).__name__}: {error}"
        print(f"model not exported: {' '.join(message.split())}", flush=True)


def train(config: DictConfig, given: Mapping[str, Any] | None = None) -> None:
    """Check what needs neither verl nor a service, say what is trained, and train.

    An expected failure ends the process with one line.
    """
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    with one_line_errors():
        is_launched = RunDir(config.run.dir).inherited_lock() is not None  # then the configuration was checked
        if config.run.resume_from and not is_launched:
            raise ConfigurationError(
                f"run.resume_from={config.run.resume_from} is the launcher's work: export that run, and give the "
                "folder as actor_rollout_ref.model.path"
            )
        decide_device(config)
        if not is_launched:
            check_config(config)
        check_model(config.actor_rollout_ref.model.path)
        print(f"run {config.run.dir}: trains {config.actor_rollout_ref.model.path}", flush=True)
        # verl warns of each engine that is not installed; this recipe uses only FSDP.
        warnings.filterwarnings("ignore", message=".* engine is not available")
        run(config, given)


@hydra.main(config_path="config", config_name="trainer", version_base=None)
def _hydra_main(composed: DictConfig) -> None:
    try:
        with one_line_errors():
            config = checked_config(composed)
        train(config, differences(composed))
    except Exception:  # Hydra would print the arguments, which may hold keys, and half of the traceback
        traceback.print_exc()
        sys.exit(1)


@output_may_be_closed()
def main(argv: list[str] | None = None) -> None:
    with one_line_errors():
        sys.argv[1:] = hydra_arguments(sys.argv[1:] if argv is None else argv)
    _hydra_main()


if __name__ == "__main__":
    main()
