"""What can be known to be wrong before anything is started: each error names the value and the mend."""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import get_args

import aiohttp
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.trainer.ppo.utils import need_critic
from verl.utils.device import get_device_name

from recipe.atropos.advantages import GRPO_ATROPOS, AdvantageConfig
from recipe.atropos.checkpoint_format import model_file
from recipe.atropos.config.schema import check_schema
from recipe.atropos.data_source import DataSourceConfig
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.client import InferenceError, PauseMode, SGLangClient
from recipe.atropos.losses import DistillationConfig
from recipe.atropos.recorded import recorded_steps
from recipe.atropos.rows import RowLimits, VersionLimits
from recipe.atropos.services.specs import check_specs, environment_specs
from recipe.atropos.utils.reward_bridge import parse_bridge
from recipe.atropos.weight_sync.engine import TRANSPORTS
from recipe.atropos.weight_sync.served_model import QUANTIZATION_FLAGS

logger = logging.getLogger(__name__)


SMALL_POLICY = "small-policy"  # begins the names of models that are made here on first use, see utils/small_policy.py


def resolve_model(path: str, seed: int) -> str:
    """The model's folder or hub name; makes a small policy of ``seed`` where one is asked for and not there yet."""
    if not path.startswith(SMALL_POLICY):
        return os.path.expanduser(path)
    from recipe.atropos.utils.calculator_policy import CalculatorRecipe
    from recipe.atropos.utils.small_policy import Recipe, ensure_small_policy
    from recipe.atropos.utils.terse_policy import TerseRecipe
    from recipe.atropos.utils.two_task_policy import TwoTaskRecipe

    recipes = {recipe.name: recipe for recipe in (Recipe(), TerseRecipe(), TwoTaskRecipe(), CalculatorRecipe())}
    return str(ensure_small_policy(seed=seed, recipe=recipes[path])) if path in recipes else path


def looks_local(path: str) -> bool:
    """Whether a model or dataset name can only be a path: hub names are NAME or ORG/NAME."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or os.path.exists(os.path.expanduser(path))


def check_config(config: DictConfig) -> None:
    """Checks that need no server: of each value by the schema, then those that join several keys.

    Raises:
        ConfigurationError: naming the key.
    """
    check_schema(OmegaConf.to_container(config, resolve=True))
    model = config.actor_rollout_ref.model.path
    if looks_local(model) and not (Path(model).expanduser() / "config.json").is_file():
        raise ConfigurationError(
            f"actor_rollout_ref.model.path={model}: no model there (no config.json); "
            "give a folder in Hugging Face format, or a hub name"
        )
    _check_quantization(config)
    _check_algorithm(config)
    group_size = config.actor_rollout_ref.rollout.n
    batch_size = config.data.train_batch_size * group_size
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    try:
        check_specs([*environment_specs(config).values()], batch_size)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if config.data.train_batch_size % mini_batch:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch} does not divide "
            f"data.train_batch_size={config.data.train_batch_size}; both count groups"
        )
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if (mini_batch * group_size) % ranks:
        raise ConfigurationError(
            f"a mini-batch of {mini_batch} groups x {group_size} sequences cannot be split over {ranks} ranks "
            "(trainer.nnodes x trainer.n_gpus_per_node); change actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    try:
        DataSourceConfig.from_config(config.trainer.atropos)
        RowLimits(config.data.max_prompt_length, config.data.max_response_length, 0, config.trainer.atropos.overlong)
        VersionLimits(0, config.trainer.atropos.max_staleness)
        AdvantageConfig.from_config(config.trainer.atropos)
        DistillationConfig.from_config(config.trainer.atropos.distillation)
        if config.environment.reward_bridge is not None:
            parse_bridge(OmegaConf.to_container(config.environment.reward_bridge), "environment.reward_bridge")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from error
    replay = config.trainer.atropos.replay
    if replay and not recorded_steps(replay):
        raise ConfigurationError(
            f"trainer.atropos.replay={replay}: no recorded batches there; give the folder batches/ of a run that was "
            "started with trainer.atropos.record_batches=true"
        )
    for key, least in (("servers", 1), ("max_restarts", 0)):
        value = config.inference[key]
        if type(value) is not int or value < least:
            raise ConfigurationError(f"inference.{key}={value!r}: give a whole number from {least} on")
    if config.trainer.atropos.sampling_mismatch == "per_row" and config.actor_rollout_ref.model.use_fused_kernels:
        raise ConfigurationError(
            "trainer.atropos.sampling_mismatch=per_row with actor_rollout_ref.model.use_fused_kernels=true: fused "
            "kernels take one temperature for a batch; set either to another value"
        )
    weight_sync = config.trainer.atropos.weight_sync
    known = {"transport": TRANSPORTS, "pause_mode": get_args(PauseMode), "verify": ("version", "probe", "checksum")}
    for key, choices in known.items():
        if weight_sync[key] not in choices:
            raise ConfigurationError(
                f"trainer.atropos.weight_sync.{key}={weight_sync[key]!r}; choose one of {', '.join(choices)}"
            )
    if not isinstance(weight_sync.every, int) or weight_sync.every < 1:
        raise ConfigurationError(
            f"trainer.atropos.weight_sync.every={weight_sync.every!r} updates between pushes: give 1 or more"
        )
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
    if config.inference.colocated and weight_sync.transport == "distributed" and get_device_name() != "cpu":
        raise ConfigurationError(
            "inference.colocated=true with trainer.atropos.weight_sync.transport=distributed: NCCL takes no two ranks "
            "on one GPU; set it to auto, tensor or disk"
        )
    _check_evaluation(config.evaluation, weight_sync.every)
    max_staleness = config.trainer.atropos.max_staleness
    if max_staleness is not None and max_staleness < weight_sync.every - 1:
        raise ConfigurationError(
            f"trainer.atropos.max_staleness={max_staleness} with weight_sync.every={weight_sync.every}: training would "
            f"wait for ever, since the last update before a push needs samples that are {weight_sync.every - 1} "
            "updates old; raise the one or lower the other"
        )


def _check_evaluation(evaluation: DictConfig, push_every: int) -> None:
    every, timeout = evaluation.every, evaluation.timeout
    if every is not None and (type(every) is not int or every < 1):
        raise ConfigurationError(f"evaluation.every={every!r}: give a whole number of updates from 1 on, or null")
    if every is not None and every % push_every:
        raise ConfigurationError(
            f"evaluation.every={every} is no multiple of trainer.atropos.weight_sync.every={push_every}: the servers "
            "would hold older weights than those of that update; change either"
        )
    if not isinstance(timeout, int | float) or timeout <= 0:
        raise ConfigurationError(f"evaluation.timeout={timeout!r}: give seconds, above 0")


# Estimators of verl that cannot work here, and what each would need.
_ESTIMATORS_LACKING = {
    "gae": "a critic, which this recipe does not train",
    "remax": "a greedy rollout for each prompt, which environments do not send",
    "gdpo": "several named rewards for each sequence, of which the Trajectory API carries one",
}


def _check_algorithm(config: DictConfig) -> None:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    usable = sorted(set(ADV_ESTIMATOR_REGISTRY) - set(_ESTIMATORS_LACKING))
    estimator = algorithm.adv_estimator
    lacking = _ESTIMATORS_LACKING["gae"] if need_critic(config) else _ESTIMATORS_LACKING.get(estimator)
    if lacking or estimator not in ADV_ESTIMATOR_REGISTRY:
        why = f"needs {lacking}" if lacking else "is not registered"
        raise ConfigurationError(f"algorithm.adv_estimator={estimator} {why}; choose one of {', '.join(usable)}")
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
    if estimator != GRPO_ATROPOS and not config.trainer.atropos.fallback_to_grpo:
        raise ConfigurationError(
            f"trainer.atropos.fallback_to_grpo=false means nothing to algorithm.adv_estimator={estimator}, which reads "
            "no advantages of the environment; set it to true, or choose grpo_atropos"
        )
    _check_loss(config)
    _check_correction(correction)
    try:
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), algorithm.kl_penalty)
    except NotImplementedError as error:
        raise ConfigurationError(
            f"algorithm.kl_penalty={algorithm.kl_penalty!r}; choose kl, abs, mse or low_var_kl"
        ) from error
    model = config.actor_rollout_ref.model
    for key, value in (("lora_adapter_path", model.get("lora_adapter_path")), ("lora.rank", model.lora.get("rank"))):
        if value and not model.lora_rank:
            raise ConfigurationError(
                f"actor_rollout_ref.model.{key}={value} with lora_rank=0 would train without an adapter; give "
                "actor_rollout_ref.model.lora_rank"
            )
    if model.lora_rank > 0 and not model.lora.merge:
        _check_adapter_only(config)
    distillation = config.trainer.atropos.distillation
    if distillation.loss_coef:
        sequence_parallel = max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)
        for key, value, needed in (
            ("actor.ulysses_sequence_parallel_size", sequence_parallel, 1),
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
    file = model_file(path, "config.json")
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
    settings, inference = config.trainer.atropos.weight_sync, config.inference
    served = inference.urls and not config.trainer.atropos.replay
    for wrong, key, why in (
        (
            served and not inference.gateway,
            "inference.gateway=null",
            "requests meet the adapter only if the gateway names it to the servers: start one, python -m "
            "recipe.atropos.inference.gateway, give its URL, and let the environments ask it",
        ),
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
            inference.colocated,
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
    if loss_mode not in POLICY_LOSS_REGISTRY:
        raise ConfigurationError(f"{key}={loss_mode}; choose one of {', '.join(sorted(POLICY_LOSS_REGISTRY))}")
    if loss_mode == "geo_mean":
        raise ConfigurationError(
            f"{key}=geo_mean: verl averages it over each micro-batch, padding rows included, and adds these up, so it "
            "grows with their number; choose another, gspo is the nearest"
        )
    if loss_mode == "dro" and actor.policy_loss.dro_beta is None:
        raise ConfigurationError(f"{key}=dro needs actor_rollout_ref.actor.policy_loss.dro_beta")
    if bypass and loss_mode not in ("vanilla", "bypass_mode"):
        raise ConfigurationError(
            "algorithm.rollout_correction.bypass_mode=true brings a loss of its own and would replace "
            f"{key}={loss_mode}; drop one of them"
        )
    if loss_mode == "bypass_mode" and not bypass:
        raise ConfigurationError(f"{key}=bypass_mode goes with algorithm.rollout_correction.bypass_mode=true; set it")
    if actor.loss_agg_mode not in _LOSS_AGG_MODES:
        raise ConfigurationError(
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}; choose one of {', '.join(_LOSS_AGG_MODES)}"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    for name, dynamic, budget in (
        ("actor.ppo_max_token_len_per_gpu", actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
        (
            "rollout.log_prob_max_token_len_per_gpu",
            config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz,
            config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu,
        ),
    ):
        if dynamic and longest > budget * actor.ulysses_sequence_parallel_size:
            raise ConfigurationError(
                f"actor_rollout_ref.{name}={budget} has no room for a row of data.max_prompt_length + "
                f"data.max_response_length = {longest} tokens; raise it"
            )


_LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def _check_correction(correction: DictConfig) -> None:
    """verl's own functions read the settings, on two tokens, now rather than after the first batch."""
    key = "algorithm.rollout_correction"
    if correction.rollout_is and correction.rollout_is_threshold is None:
        raise ConfigurationError(
            f"{key}.rollout_is_threshold=null with rollout_is={correction.rollout_is}: give a number"
        )
    if correction.loss_type not in ("ppo_clip", "reinforce"):
        raise ConfigurationError(f"{key}.loss_type={correction.loss_type}; choose ppo_clip or reinforce")
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    nothing = torch.zeros(1, 2)
    try:
        compute_rollout_correction_and_rejection_mask(
            nothing, nothing, torch.ones(1, 2), **{name: correction[name] for name in names}
        )
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{key}: {error}") from error


def check_services(config: DictConfig, timeout: float = 30.0) -> None:
    """Whether the Trajectory API, every SGLang server and a gateway answer, asked for at most ``timeout`` seconds.

    A replay needs neither.

    Raises:
        ConfigurationError: naming the service and its URL.
    """
    if config.trainer.atropos.replay:
        return
    if not config.inference.urls:
        raise ConfigurationError(
            "inference.urls is empty: give the URLs of the SGLang servers, inference.urls=[http://HOST:PORT], "
            "or start everything with python -m recipe.atropos.launch_services"
        )
    asyncio.run(_check_services(config, timeout))


async def _check_services(config: DictConfig, timeout: float) -> None:
    async def trajectory_api() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            async with session.get(config.trainer.atropos.api_url.rstrip("/") + "/status") as reply:
                reply.raise_for_status()

    wanted = config.trainer.atropos.weight_sync.pause_mode

    async def server(url: str) -> None:
        async with SGLangClient(url, config.inference.api_key, timeout=5) as client:
            await client.weight_version()
            capabilities = await client.capabilities()
        try:
            mode = capabilities.safe_pause_mode(wanted)
        except ValueError as error:
            raise ConfigurationError(
                f"trainer.atropos.weight_sync.pause_mode={wanted} does not work with inference.urls={url}: {error}"
            ) from error
        if wanted == "auto" and mode == "abort":
            logger.warning(
                "%s runs SGLang %s, which cannot flush its cache with retracted requests: each push ends the requests "
                "that run (finish_reason abort), and environments lose these groups",
                url,
                capabilities.version,
            )

    async def gateway() -> None:
        headers = {"Authorization": f"Bearer {config.inference.api_key}"} if config.inference.api_key else None
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as session:
            async with session.get(config.inference.gateway.rstrip("/") + "/gateway/status") as reply:
                reply.raise_for_status()

    checks = [_wait_for(trajectory_api, "trainer.atropos.api_url", config.trainer.atropos.api_url, timeout)]
    checks += [_wait_for(partial(server, url), "inference.urls", url, timeout) for url in config.inference.urls]
    if config.inference.gateway:
        checks.append(_wait_for(gateway, "inference.gateway", config.inference.gateway, timeout))
    await asyncio.gather(*checks)


async def _wait_for(check: Callable[[], Awaitable[None]], key: str, url: str, timeout: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            return await check()
        except (aiohttp.ClientError, InferenceError, OSError, TimeoutError) as error:
            refused = isinstance(error, InferenceError) and error.status in (401, 403)
            if refused or asyncio.get_running_loop().time() > deadline:
                raise ConfigurationError(
                    f"nothing usable at {key}={url} within {timeout:g} s ({error}); start it or correct {key}"
                ) from error
        await asyncio.sleep(0.5)
