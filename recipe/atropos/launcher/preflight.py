"""What can be known to be wrong before anything is started: each error names the value and the fix."""

import json
import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.atropos.checkpoint.store import resume_folder
from recipe.atropos.config.env_specs import EnvironmentSpec, check_specs, environment_specs
from recipe.atropos.config.models import config_file
from recipe.atropos.config.schema import check_schema
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import QUANTIZATION_FLAGS
from recipe.atropos.utils.gpus import device_of
from recipe.atropos.verl_ext.attention import sequence_parallel

logger = logging.getLogger(__name__)


def check_config(config: DictConfig) -> None:
    """Checks that need no server: of each value by the schema, then those that join several keys.

    Raises:
        ConfigurationError: naming the key.
    """
    check_schema(OmegaConf.to_container(config, resolve=True))
    _check_quantization(config)
    _check_algorithm(config)
    group_size = config.actor_rollout_ref.rollout.n
    batch_size = config.data.train_batch_size * group_size
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    try:
        specs = [*environment_specs(config).values()]
        check_specs(specs, batch_size)
        for spec in specs:
            _check_bridge(spec)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if not specs:
        _check_joined(config)
    if config.data.train_batch_size % mini_batch:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch} does not divide "
            f"data.train_batch_size={config.data.train_batch_size}; both count groups"
        )
    if config.actor_rollout_ref.actor.shuffle:
        raise ConfigurationError(
            "actor_rollout_ref.actor.shuffle=true would tear groups apart: mini-batches are whole groups in the order "
            "of their arrival; set it to false"
        )
    replay = config.trainer.atropos.replay
    if replay and not list(Path(replay).glob("*.json")):
        raise ConfigurationError(
            f"trainer.atropos.replay={replay}: no recorded batches there; give the folder batches/ of a run that was "
            "started with trainer.atropos.record_batches=true"
        )
    if config.trainer.atropos.sampling_mismatch == "per_row" and config.actor_rollout_ref.model.use_fused_kernels:
        raise ConfigurationError(
            "trainer.atropos.sampling_mismatch=per_row with actor_rollout_ref.model.use_fused_kernels=true: fused "
            "kernels take one temperature for a batch; set either to another value"
        )
    weight_sync = config.trainer.atropos.weight_sync
    if config.inference.colocated and weight_sync.every != 1:
        raise ConfigurationError(
            f"inference.colocated=true with trainer.atropos.weight_sync.every={weight_sync.every}: servers that lent "
            "their memory have no weights left, so every update needs a push; set it to 1"
        )
    if config.inference.colocated and weight_sync.pause_mode == "in_place":
        raise ConfigurationError(
            "inference.colocated=true with trainer.atropos.weight_sync.pause_mode=in_place: SGLang dies when it gives "
            "memory back under a running request; set it to auto"
        )
    if config.inference.colocated and weight_sync.transport == "distributed" and device_of(config) == "cuda":
        raise ConfigurationError(
            "inference.colocated=true with trainer.atropos.weight_sync.transport=distributed: NCCL takes no two ranks "
            "on one GPU; set it to auto, tensor or disk"
        )
    _check_evaluation(config.evaluation, weight_sync.every)
    _check_resumption(config.trainer)
    max_staleness = config.trainer.atropos.max_staleness
    if max_staleness is not None and max_staleness < weight_sync.every - 1:
        raise ConfigurationError(
            f"trainer.atropos.max_staleness={max_staleness} with weight_sync.every={weight_sync.every}: training would "
            f"wait for ever, since the last update before a push needs samples that are {weight_sync.every - 1} "
            "updates old; raise the one or lower the other"
        )


def _check_joined(config: DictConfig) -> None:
    """Nothing that an environment of the run's own would be needed for."""
    for key, value in (
        ("environment.args", dict(config.environment.args)),
        ("environment.reward_bridge", config.environment.reward_bridge),
        ("evaluation.every", config.evaluation.every),
    ):
        if value:
            raise ConfigurationError(
                f"{key}={value} has no effect with environment.target=null, which starts no environment: leave it out, "
                "and give it to the environment that joins, or name a target"
            )


def _check_bridge(spec: EnvironmentSpec) -> None:
    if spec.reward_bridge is not None:
        from recipe.atropos.adapter.reward_bridge import parse_bridge  # here: few runs have one

        parse_bridge(dict(spec.reward_bridge), f"{spec.key}.reward_bridge")


def _check_resumption(trainer: DictConfig) -> None:
    path = trainer.resume_from_path
    if (trainer.resume_mode == "resume_path") != (path is not None):
        raise ConfigurationError(
            f"trainer.resume_from_path={path} with trainer.resume_mode={trainer.resume_mode}: give both, "
            "resume_mode=resume_path and the folder global_step_N, or neither"
        )
    if path is not None:
        resume_folder(path)


def _check_evaluation(evaluation: DictConfig, push_every: int) -> None:
    every = evaluation.every
    if every is not None and every % push_every:
        raise ConfigurationError(
            f"evaluation.every={every} is no multiple of trainer.atropos.weight_sync.every={push_every}: the servers "
            "would hold older weights than those of that update; change either"
        )


def _check_algorithm(config: DictConfig) -> None:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    estimator = algorithm.adv_estimator
    if "optimal_token_baseline" in estimator and not actor.calculate_sum_pi_squared:
        raise ConfigurationError(
            f"algorithm.adv_estimator={estimator} needs actor_rollout_ref.actor.calculate_sum_pi_squared=true"
        )
    correction = algorithm.rollout_correction
    if "optimal_token_baseline" in estimator and correction.bypass_mode:
        raise ConfigurationError(
            f"algorithm.adv_estimator={estimator} needs the forward pass that is saved by "
            "algorithm.rollout_correction.bypass_mode=true; set it to false"
        )
    atropos = config.trainer.atropos
    if estimator != "grpo_atropos" and not atropos.fallback_to_grpo:
        raise ConfigurationError(
            f"trainer.atropos.fallback_to_grpo=false means nothing to algorithm.adv_estimator={estimator}, which reads "
            "no advantages of the environment; set it to true, or choose grpo_atropos"
        )
    _check_loss(config)
    check_correction(correction)
    if not (atropos.use_advantages or atropos.fallback_to_grpo):
        raise ConfigurationError(
            "trainer.atropos.use_advantages=false and fallback_to_grpo=false leave no advantage; set one to true"
        )
    bounds = atropos.advantage_clipping
    if bounds is not None and bounds[0] >= bounds[1]:
        raise ConfigurationError(f"trainer.atropos.advantage_clipping={list(bounds)}: give [low, high], low below high")
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path and not model.lora_rank:
        raise ConfigurationError(
            f"actor_rollout_ref.model.lora_adapter_path={model.lora_adapter_path} with lora_rank=0 would train without "
            "an adapter; give actor_rollout_ref.model.lora_rank"
        )
    contents = actor.checkpoint.save_contents
    if model.lora_rank > 0 and "hf_model" in contents:
        kept = ",".join(name for name in contents if name != "hf_model")
        raise ConfigurationError(
            f"actor_rollout_ref.actor.checkpoint.save_contents={list(contents)} with lora_rank={model.lora_rank}: "
            "verl's hf_model names an adapter's tensors as no model does, and transformers loads random weights; give "
            f"save_contents=[{kept}], of which model holds base and adapter"
        )
    if model.lora_rank > 0 and not model.lora.merge:
        _check_adapter_only(config)
    distillation = atropos.distillation
    if not (distillation.loss_coef or distillation.use_policy_loss):
        raise ConfigurationError(
            "trainer.atropos.distillation.use_policy_loss=false leaves no loss at loss_coef=0; give a loss_coef"
        )
    if distillation.loss_coef:
        for key, value, needed in (
            ("actor.ulysses_sequence_parallel_size", sequence_parallel(actor), 1),
            ("model.use_fused_kernels", model.use_fused_kernels, False),
            ("actor.fsdp_config.pad_to_length", actor.fsdp_config.pad_to_length, False),
        ):
            if value != needed:
                raise ConfigurationError(
                    f"actor_rollout_ref.{key}={value}: distillation needs whole logits; set it to {needed}"
                )
        if not distillation.use_policy_loss and (actor.use_kl_loss or actor.entropy_coeff):
            raise ConfigurationError(
                "trainer.atropos.distillation.use_policy_loss=false leaves out the KL and entropy terms too; drop "
                "actor_rollout_ref.actor.use_kl_loss and entropy_coeff, or keep the policy loss"
            )


def _check_quantization(config: DictConfig) -> None:
    path = config.actor_rollout_ref.model.path
    file = config_file(path)
    quantization = json.loads(file.read_text()).get("quantization_config") if file else None
    if quantization:
        raise ConfigurationError(
            f"actor_rollout_ref.model.path={path} is quantized ({quantization.get('quant_method')}), and unquantized "
            "weights are pushed to the servers; give a bfloat16 checkpoint"
        )
    if config.actor_rollout_ref.actor.fsdp_config.qat.enable:
        raise ConfigurationError(
            "actor_rollout_ref.actor.fsdp_config.qat.enable=true trains for quantized servers, and unquantized weights "
            "are pushed; set it to false"
        )
    for flag, value in config.inference.args.items():
        if flag.replace("-", "_") in QUANTIZATION_FLAGS and value:
            raise ConfigurationError(
                f"inference.args.{flag}={value}: a quantized server cannot take the weights that are pushed; leave it "
                "out, and serve bfloat16"
            )


def _check_adapter_only(config: DictConfig) -> None:
    settings = config.trainer.atropos.weight_sync
    for wrong, key, why in (
        (
            settings.transport not in ("auto", "tensor"),
            f"trainer.atropos.weight_sync.transport={settings.transport}",
            "an adapter travels inside the request that loads it; set it to auto",
        ),
        (
            settings.verify == "checksum",
            "trainer.atropos.weight_sync.verify=checksum",
            "SGLang's checksums are of the base weights alone; set it to probe",
        ),
        (
            config.inference.colocated,
            "inference.colocated=true",
            "the base weights would be lost with the memory that servers lend, and are not pushed; set it to false",
        ),
    ):
        if wrong:
            raise ConfigurationError(
                f"actor_rollout_ref.model.lora.merge=false with {key}: {why}, or set lora.merge=true"
            )


def _check_loss(config: DictConfig) -> None:
    actor, bypass = config.actor_rollout_ref.actor, config.algorithm.rollout_correction.bypass_mode
    key, loss_mode = "actor_rollout_ref.actor.policy_loss.loss_mode", actor.policy_loss.loss_mode
    if loss_mode == "dro" and actor.policy_loss.dro_beta is None:
        raise ConfigurationError(f"{key}=dro needs actor_rollout_ref.actor.policy_loss.dro_beta")
    if bypass and loss_mode not in ("vanilla", "bypass_mode"):
        raise ConfigurationError(
            "algorithm.rollout_correction.bypass_mode=true brings a loss of its own and would replace "
            f"{key}={loss_mode}; drop one of them"
        )
    if loss_mode == "bypass_mode" and not bypass:
        raise ConfigurationError(f"{key}=bypass_mode goes with algorithm.rollout_correction.bypass_mode=true; set it")
    longest = config.data.max_prompt_length + config.data.max_response_length
    for name, dynamic, budget in (
        ("actor.ppo_max_token_len_per_gpu", actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
        (
            "rollout.log_prob_max_token_len_per_gpu",
            config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz,
            config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu,
        ),
    ):
        if dynamic and longest > budget * sequence_parallel(actor):
            raise ConfigurationError(
                f"actor_rollout_ref.{name}={budget} has no room for a row of data.max_prompt_length + "
                f"data.max_response_length = {longest} tokens; raise it"
            )


_STATISTICS = tuple(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3"))
REJECTION_STATISTICS = (*_STATISTICS, "seq_max_k2", "seq_max_k3")


def check_correction(correction: DictConfig) -> None:
    """What verl would refuse after the first batch; a test compares both."""
    key = "algorithm.rollout_correction"
    if correction.get("bypass_mode") and correction.get("rollout_is_batch_normalize"):
        raise ConfigurationError(
            f"{key}.rollout_is_batch_normalize=true with bypass_mode=true: verl would normalize over each micro-batch, "
            "so the loss would depend on how the batch is cut; set one of them to false"
        )
    if correction.rollout_is:
        threshold = correction.rollout_is_threshold
        if threshold is None:
            raise ConfigurationError(
                f"{key}.rollout_is_threshold=null with rollout_is={correction.rollout_is}: give it"
            )
        _check_bounds(f"{key}.rollout_is_threshold", str(threshold), range_allowed=True)
    if not correction.rollout_rs:
        return
    statistics = list(dict.fromkeys(part.strip() for part in correction.rollout_rs.split(",") if part.strip()))
    if wrong := [name for name in statistics if name not in REJECTION_STATISTICS] or not statistics:
        raise ConfigurationError(
            f"{key}.rollout_rs={correction.rollout_rs}: {wrong[0] if statistics else 'it'} is none of "
            f"{', '.join(REJECTION_STATISTICS)}"
        )
    if correction.rollout_rs_threshold is None:
        raise ConfigurationError(f"{key}.rollout_rs_threshold=null with rollout_rs={correction.rollout_rs}: give it")
    bounds = [part.strip() for part in str(correction.rollout_rs_threshold).split(",") if part.strip()]
    if len(bounds) not in (1, len(statistics)):
        raise ConfigurationError(
            f"{key}.rollout_rs_threshold={correction.rollout_rs_threshold}: give one for all, or {len(statistics)}, "
            "comma-separated, one for each of rollout_rs"
        )
    for name, bound in zip(statistics, bounds * (len(statistics) if len(bounds) == 1 else 1), strict=True):
        _check_bounds(f"{key}.rollout_rs_threshold", bound, range_allowed=name.endswith("k1"), of=f" of {name}")


def _check_bounds(key: str, text: str, range_allowed: bool, of: str = "") -> None:
    """``HIGH``, or ``LOW_HIGH``; above 0 and in order."""
    try:
        values = [float(part) for part in text.split("_", 1)]
    except ValueError:
        values = []
    if not values or min(values) <= 0 or values != sorted(values) or (len(values) > 1 and not range_allowed):
        wanted = "a number above 0, or LOW_HIGH" if range_allowed else "a number above 0"
        raise ConfigurationError(f"{key}={text}{of}: give {wanted}")
