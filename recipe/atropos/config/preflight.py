"""Configuration checks before anything is started; each error names the value and the fix.

A rule here is about several keys, or about what is on this machine; ``schema`` has those about a value.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pydantic import TypeAdapter

from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.config.env_specs import EnvironmentSpec, environment_specs
from recipe.atropos.config.model_rules import model_rules
from recipe.atropos.config.models import looks_local
from recipe.atropos.config.transports import WeightTransport, gpu_transport, named_transport
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.trajectory_api.store import DATABASE
from recipe.atropos.utils.files import read_json
from recipe.atropos.verl_ext.attention import sequence_parallel

# Each rule: a value that is true if the rule is violated, and the error message.
Rules = Iterable[tuple[Any, str]]


def check_config(config: DictConfig) -> None:
    """Run the checks of a resolved configuration that need no server.

    Raises:
        ConfigurationError: naming the key.
    """
    specs = [*environment_specs(config).values()]
    for spec in specs:
        _check_shaping(spec)
    if not specs:
        _check_credit("environment", config.environment.credit)
    check_rules(
        chain(
            model_rules(config),
            _algorithm(config),
            _loss(config),
            _ranks(config),
            _micro_batches(config),
            _precision(config),
            correction_rules(config.algorithm.rollout_correction),
            _lora(config),
            _distillation(config),
            _shares(specs, config.data.train_batch_size * config.actor_rollout_ref.rollout.n),
            _ignored_credit(config, specs),
            _ignored(config, specs) if specs else _joined(config),
            _training(config),
            _weight_sync(config),
            _transport(config),
            _sessions(config, specs),
        )
    )


def check_rules(rules: Rules) -> None:
    """Raise ConfigurationError with the message of the first rule that is violated."""
    for wrong, message in rules:
        if wrong:
            raise ConfigurationError(message)


def _training(config: DictConfig) -> Rules:
    data, actor, trainer = config.data, config.actor_rollout_ref.actor, config.trainer
    replay = trainer.atropos.replay
    yield (
        data.train_batch_size % actor.ppo_mini_batch_size,
        f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} does not divide "
        f"data.train_batch_size={data.train_batch_size}; both count groups",
    )
    yield (
        actor.shuffle,
        "actor_rollout_ref.actor.shuffle=true would tear groups apart: mini-batches are whole groups in the order of "
        "their arrival; set it to false",
    )
    yield (
        replay and not Path(replay, DATABASE).is_file(),
        f"trainer.atropos.replay={replay}: no batches there; give the folder trajectories/ of a run",
    )
    yield (
        trainer.atropos.sampling_mismatch == "per_row" and config.actor_rollout_ref.model.use_fused_kernels,
        "trainer.atropos.sampling_mismatch=per_row with actor_rollout_ref.model.use_fused_kernels=true: fused kernels "
        "take one temperature for a batch; set either to another value",
    )
    yield (
        (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None),
        f"trainer.resume_from_path={trainer.resume_from_path} with trainer.resume_mode={trainer.resume_mode}: give "
        "both, resume_mode=resume_path and the folder global_step_N, or neither",
    )

    contents = config.actor_rollout_ref.actor.checkpoint
    for key in ("save_contents", "load_contents"):
        yield (
            "model" not in contents[key],
            f"actor_rollout_ref.actor.checkpoint.{key}={list(contents[key])} lacks model: a run that is resumed, or a "
            "trainer that is restarted, would go on from the first weights; add it",
        )
    schedule, loaded = actor.optim, contents.load_contents
    constant = schedule.lr_scheduler_type == "constant"
    yield (
        "extra" not in loaded and not (constant and max(schedule.lr_warmup_steps, schedule.lr_warmup_steps_ratio) <= 0),
        f"actor_rollout_ref.actor.checkpoint.load_contents={list(loaded)} lacks extra: a run that is resumed would "
        "begin the learning rate's schedule anew; add it, or set optim.lr_scheduler_type=constant without a warmup",
    )


def _ranks(config: DictConfig) -> Rules:
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    for role in ("actor", "ref"):
        settings = config.actor_rollout_ref[role]
        sharded, shared = settings.fsdp_config.fsdp_size, sequence_parallel(settings)
        for key, size, wrong in (
            ("fsdp_config.fsdp_size", sharded, 0 <= sharded < ranks and (sharded == 0 or ranks % sharded)),
            ("ulysses_sequence_parallel_size", shared, shared < 1 or ranks % shared),
        ):
            yield (
                wrong,
                f"actor_rollout_ref.{role}.{key}={size} does not divide trainer.nnodes * trainer.n_gpus_per_node = "
                f"{ranks}, the number of ranks; change either",
            )


def _weight_sync(config: DictConfig) -> Rules:
    weight_sync, max_staleness = config.trainer.atropos.weight_sync, config.trainer.atropos.max_staleness
    colocated, evaluated, pushed = config.inference.colocated, config.evaluation.every, weight_sync.every
    yield (
        colocated and pushed != 1,
        f"inference.colocated=true with trainer.atropos.weight_sync.every={pushed}: servers that released "
        "their memory have no weights left, so every update needs a push; set it to 1",
    )
    yield (
        colocated and weight_sync.pause_mode == "in_place",
        "inference.colocated=true with trainer.atropos.weight_sync.pause_mode=in_place: SGLang dies when it gives "
        "memory back under a running request; set it to auto",
    )
    yield (
        evaluated is not None and evaluated % pushed,
        f"evaluation.every={evaluated} is no multiple of trainer.atropos.weight_sync.every={pushed}: the servers would "
        "hold older weights than those of that update; change either",
    )
    yield (
        max_staleness is not None and max_staleness < pushed - 1,
        f"trainer.atropos.max_staleness={max_staleness} with weight_sync.every={pushed}: training would wait for ever, "
        f"since the last update before a push needs samples that are {pushed - 1} updates old; raise the one or lower "
        "the other",
    )


def _transport(config: DictConfig) -> Rules:
    for transport in {named_transport(config) or WeightTransport, gpu_transport(config)}:
        yield from ((True, problem) for problem in transport.problems(config))


def _sessions(config: DictConfig, specs: Sequence[EnvironmentSpec]) -> Rules:
    yield (
        config.sessions.enabled is False and any(spec.program for spec in specs),
        "sessions.enabled=false: programs sample through the session server; leave it out",
    )
    if (config.sessions.renderer, config.sessions.tool_parser) == ("auto", None):
        return
    from renderers.configs import RendererConfig  # imported here: few runs name one
    from renderers.parsers import TOOL_PARSERS

    names = TypeAdapter(RendererConfig).json_schema()["discriminator"]["mapping"]
    for key, known in (("renderer", names), ("tool_parser", TOOL_PARSERS)):
        yield (
            config.sessions[key] not in (None, *known),
            f"sessions.{key}={config.sessions[key]}; choose one of {', '.join(sorted(known))}",
        )


def _shares(specs: Sequence[EnvironmentSpec], batch_size: int) -> Rules:
    """Groups of these environments fit into a batch of ``batch_size`` sequences, and each has a share of it."""
    for spec in specs:
        yield (
            spec.group_size > batch_size,
            f"{spec.key}.group_size={spec.group_size} is larger than the batch of {batch_size} sequences "
            "(data.train_batch_size groups x actor_rollout_ref.rollout.n); change either",
        )
    shares = {spec.key: spec.min_batch_allocation for spec in specs if spec.min_batch_allocation is not None}
    without, total = [spec.key for spec in specs if spec.key not in shares], sum(shares.values())
    listed = " + ".join(f"{key}.min_batch_allocation={share:g}" for key, share in shares.items())
    yield total > 1 + 1e-6, f"{listed} = {total:g} of a batch: together they may be 1 at most; lower one"
    yield (
        without and total > 1 - 1e-6,
        f"{listed} leaves nothing of a batch to {', '.join(without)}; give it a part, or leave it out",
    )


def _ignored(config: DictConfig, specs: Sequence[EnvironmentSpec]) -> Rules:
    """Yield settings that have no effect on the environments that the run starts."""
    several, own = bool(config.environments), config.environment
    for key, ignored, fix in (
        ("credit", several, "give environments.NAME.credit"),
        ("reward_bridge", several, "give environments.NAME.reward_bridge"),
        ("items", not several and not specs[0].program, "give environment.command or agent"),
        ("score", not several and not specs[0].program, "give environment.command"),
    ):
        yield ignored and own[key], f"environment.{key}={own[key]} has no effect here: {fix}, or leave it out"


def _joined(config: DictConfig) -> Rules:
    """Yield settings that have no effect because the run starts no environment of its own."""
    teacher = (config.environment.credit or {}).get("teacher")  # sessions ask none
    for key, value in (
        ("environment.args", dict(config.environment.args)),
        ("environment.reward_bridge", config.environment.reward_bridge),
        ("environment.credit", None if config.sessions.enabled and not teacher else config.environment.credit),
        ("environment.replicas", config.environment.replicas if config.environment.replicas > 1 else None),
        ("evaluation.every", config.evaluation.every),
    ):
        yield (
            value,
            f"{key}={value} has no effect with environment.target=null, which starts no environment: leave it out, and "
            "give it to the environment that joins, or name a target",
        )


def _check_shaping(spec: EnvironmentSpec) -> None:
    if spec.reward_bridge is not None:
        from recipe.atropos.algorithm.reward_bridge import parse_bridge  # imported here: few runs have a bridge

        parse_bridge(dict(spec.reward_bridge), f"{spec.key}.reward_bridge")
    _check_credit(spec.key, spec.credit, spec.python)


def _check_credit(key: str, given: Mapping[str, Any] | None, python: str | None = None) -> None:
    if given is not None:
        from recipe.atropos.credit.group import Credit

        credit = Credit.parse(dict(given), f"{key}.credit")
        for named in (credit, credit.teacher) if python is None else ():  # else its own interpreter has the functions
            named is None or named.function()


def _ignored_credit(config: DictConfig, specs: Sequence[EnvironmentSpec]) -> Rules:
    """Yield settings under which the advantages of ``credit`` would be computed, sent, and not used."""
    estimator, own = config.algorithm.adv_estimator, {spec.key: spec.credit for spec in specs}
    temperature = config.actor_rollout_ref.rollout.temperature
    given = own or {"environment": config.environment.credit}
    yield (
        None not in given.values() and not config.algorithm.norm_adv_by_std_in_grpo,
        "algorithm.norm_adv_by_std_in_grpo=false has no effect with environment.credit, which scales advantages "
        "itself; set it to true, or drop credit",
    )
    for key, credit in given.items():
        for ignored, setting, fix in (
            (
                not ESTIMATORS[estimator].token_advantages,
                f"algorithm.adv_estimator={estimator}, which reads no advantages of the environment",
                "choose grpo_atropos",
            ),
            (not config.trainer.atropos.use_advantages, "trainer.atropos.use_advantages=false", "set it to true"),
            (
                (credit or {}).get("teacher") is not None and temperature != 1,
                f"actor_rollout_ref.rollout.temperature={temperature}, because its teacher judges at 1",
                "set it to 1",
            ),
        ):
            yield credit is not None and ignored, f"{key}.credit has no effect with {setting}; {fix}, or drop credit"


def _algorithm(config: DictConfig) -> Rules:
    estimator, atropos = config.algorithm.adv_estimator, config.trainer.atropos
    needs, bounds = ESTIMATORS[estimator], atropos.advantage_clipping
    yield (
        "sum_pi_squared" in needs.tensors and not config.actor_rollout_ref.actor.calculate_sum_pi_squared,
        f"algorithm.adv_estimator={estimator} needs actor_rollout_ref.actor.calculate_sum_pi_squared=true",
    )
    yield (
        config.actor_rollout_ref.actor.calculate_sum_pi_squared and config.actor_rollout_ref.model.use_fused_kernels,
        "actor_rollout_ref.actor.calculate_sum_pi_squared=true needs whole logits, which "
        "actor_rollout_ref.model.use_fused_kernels=true does not make; drop one of them",
    )
    yield (
        "old_log_probs" in needs.tensors and config.algorithm.rollout_correction.bypass_mode,
        f"algorithm.adv_estimator={estimator} needs the forward pass that is saved by "
        "algorithm.rollout_correction.bypass_mode=true; set it to false",
    )
    yield (
        not (needs.token_advantages or atropos.fallback_to_grpo),
        f"trainer.atropos.fallback_to_grpo=false means nothing to algorithm.adv_estimator={estimator}, which reads no "
        "advantages of the environment; set it to true, or choose grpo_atropos",
    )
    yield (
        not (atropos.use_advantages or atropos.fallback_to_grpo),
        "trainer.atropos.use_advantages=false and fallback_to_grpo=false leave no advantage; set one to true",
    )
    yield (
        bounds is not None and bounds[0] >= bounds[1],
        f"trainer.atropos.advantage_clipping={bounds}: give [low, high], low below high",
    )


def _lora(config: DictConfig) -> Rules:
    model, contents = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.checkpoint.save_contents
    kept = ",".join(name for name in contents if name != "hf_model")
    yield (
        model.lora_rank > 0 and "hf_model" in contents,
        f"actor_rollout_ref.actor.checkpoint.save_contents={list(contents)} with lora_rank={model.lora_rank}: verl's "
        "hf_model names an adapter's tensors as no model does, and transformers loads random weights; give "
        f"save_contents=[{kept}], of which model holds base and adapter",
    )
    path = model.lora_adapter_path
    adapter = read_json(Path(path) / "adapter_config.json", {}) if path else {}
    yield (
        path and looks_local(path) and not adapter and not config.run.resume_from,  # which brings its own, later
        f"actor_rollout_ref.model.lora_adapter_path={path}: no adapter there (no adapter_config.json); give its whole "
        "path, without ~, or a hub name",
    )
    for key, name in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        yield (
            adapter.get(name, model[key]) != model[key],
            f"actor_rollout_ref.model.{key}={model[key]} with lora_adapter_path={path}, whose adapter has "
            f"{adapter.get(name)}, which would be trained: give that",
        )
    named, adapter_only = named_transport(config), model.lora_rank > 0 and not model.lora.merge
    for wrong, key, why in (
        (
            named is not None and not named.in_requests,
            f"trainer.atropos.weight_sync.transport={config.trainer.atropos.weight_sync.transport}",
            "an adapter travels inside the request that loads it; set it to auto",
        ),
        (
            config.inference.colocated,
            "inference.colocated=true",
            "the base weights would be lost with the memory that servers release, and are not pushed; set it to false",
        ),
    ):
        yield (
            adapter_only and wrong,
            f"actor_rollout_ref.model.lora.merge=false with {key}: {why}, or set lora.merge=true",
        )


def _distillation(config: DictConfig) -> Rules:
    distillation = config.trainer.atropos.distillation
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    yield (
        not (distillation.loss_coef or distillation.use_policy_loss),
        "trainer.atropos.distillation.use_policy_loss=false leaves no loss at loss_coef=0; give a loss_coef",
    )
    if not distillation.loss_coef:
        return
    for key, value, needed in (
        ("actor.ulysses_sequence_parallel_size", sequence_parallel(actor), 1),
        ("model.use_fused_kernels", model.use_fused_kernels, False),
        ("actor.fsdp_config.pad_to_length", actor.fsdp_config.pad_to_length, False),
    ):
        yield value != needed, f"actor_rollout_ref.{key}={value}: distillation needs whole logits; set it to {needed}"
    yield (
        not distillation.use_policy_loss and (actor.use_kl_loss or actor.entropy_coeff),
        "trainer.atropos.distillation.use_policy_loss=false leaves out the KL and entropy terms too; drop "
        "actor_rollout_ref.actor.use_kl_loss and entropy_coeff, or keep the policy loss",
    )


def _loss(config: DictConfig) -> Rules:
    actor = config.actor_rollout_ref.actor
    bypass = config.algorithm.rollout_correction.bypass_mode
    key, loss_mode = "actor_rollout_ref.actor.policy_loss.loss_mode", actor.policy_loss.loss_mode
    yield (
        loss_mode == "dro" and actor.policy_loss.dro_beta is None,
        f"{key}=dro needs actor_rollout_ref.actor.policy_loss.dro_beta",
    )
    yield (
        loss_mode == "sapo" and actor.loss_agg_mode != "seq-mean-token-mean",
        f"{key}=sapo with actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}: verl aggregates this loss by "
        "sequence in any case; set loss_agg_mode=seq-mean-token-mean",
    )
    yield (
        bypass and loss_mode not in ("vanilla", "bypass_mode"),
        "algorithm.rollout_correction.bypass_mode=true brings a loss of its own and would replace "
        f"{key}={loss_mode}; drop one of them",
    )
    yield (
        loss_mode == "bypass_mode" and not bypass,
        f"{key}=bypass_mode goes with algorithm.rollout_correction.bypass_mode=true; set it",
    )


def _micro_batches(config: DictConfig) -> Rules:
    longest = config.data.max_prompt_length + config.data.max_response_length
    actor, rollout, ref = (config.actor_rollout_ref[role] for role in ("actor", "rollout", "ref"))
    yield (
        actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz,
        f"actor_rollout_ref.rollout.log_prob_use_dynamic_bsz={rollout.log_prob_use_dynamic_bsz} with "
        f"actor.use_dynamic_bsz={actor.use_dynamic_bsz}: verl's actor has one for both; leave the former out",
    )
    # With an adapter, the actor computes the reference, without it.
    adapter = config.actor_rollout_ref.model.lora_rank > 0
    referenced = (actor.use_kl_loss or config.algorithm.use_kl_in_reward) and not adapter
    for section, name, dynamic, used in (
        (actor, "actor.ppo", actor.use_dynamic_bsz, True),
        (rollout, "rollout.log_prob", actor.use_dynamic_bsz, True),
        (ref, "ref.log_prob", ref.log_prob_use_dynamic_bsz, referenced),
    ):
        key, prefix = f"actor_rollout_ref.{name}", name.partition(".")[2]
        budget, size = (section[f"{prefix}_{each}_per_gpu"] for each in ("max_token_len", "micro_batch_size"))
        yield (
            used and not dynamic and size is None,
            f"{key}_micro_batch_size_per_gpu=null: micro-batches that are not filled by tokens have a fixed number of "
            "sequences; give it",
        )
        yield (
            used
            and dynamic
            and budget is not None
            and longest > budget * sequence_parallel(ref if section is ref else actor),
            f"{key}_max_token_len_per_gpu={budget} has no room for a row of data.max_prompt_length + "
            f"data.max_response_length = {longest} tokens; raise it",
        )


def _precision(config: DictConfig) -> Rules:
    for role in ("actor", "ref"):
        given = config.actor_rollout_ref[role].fsdp_config.get("mixed_precision") or {}
        yield from (
            (
                name not in _PRECISIONS,
                f"actor_rollout_ref.{role}.fsdp_config.mixed_precision.{name}: no such key; choose one of "
                f"{', '.join(_PRECISIONS)}",
            )
            for name in given
        )


_PRECISIONS = ("param_dtype", "reduce_dtype", "buffer_dtype")
_STATISTICS = tuple(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3"))
REJECTION_STATISTICS = (*_STATISTICS, "seq_max_k2", "seq_max_k3")


def correction_rules(correction: DictConfig) -> Rules:
    """Reject what verl would refuse only after the first batch; a test compares the two."""
    key, chosen = "algorithm.rollout_correction", correction.rollout_rs
    yield (
        correction.get("bypass_mode") and correction.get("rollout_is_batch_normalize"),
        f"{key}.rollout_is_batch_normalize=true with bypass_mode=true: verl would normalize over each micro-batch, so "
        "the loss would depend on how the batch is cut; set one of them to false",
    )
    if correction.rollout_is:
        threshold = correction.rollout_is_threshold
        yield (
            correction.get("bypass_mode") and "_" in str(threshold),
            f"{key}.rollout_is_threshold={threshold} with bypass_mode=true: where it leaves no token of a micro-batch "
            "a weight, verl divides by 0; set bypass_mode=false, or give one number",
        )
        yield threshold is None, f"{key}.rollout_is_threshold=null with rollout_is={correction.rollout_is}: give it"
        yield _bounds(f"{key}.rollout_is_threshold", str(threshold), range_allowed=True)
    yield (
        correction.get("bypass_mode") and chosen,
        f"{key}.rollout_rs={chosen} with bypass_mode=true: verl's loss rejects tokens, but divides by all of them; set "
        "bypass_mode=false, or rollout_rs=null",
    )
    if not chosen:
        return
    statistics = list(dict.fromkeys(part.strip() for part in chosen.split(",") if part.strip()))
    wrong = next((name for name in statistics if name not in REJECTION_STATISTICS), None if statistics else "it")
    yield wrong, f"{key}.rollout_rs={chosen}: {wrong} is none of {', '.join(REJECTION_STATISTICS)}"
    threshold = correction.rollout_rs_threshold
    yield threshold is None, f"{key}.rollout_rs_threshold=null with rollout_rs={chosen}: give it"
    bounds = [part.strip() for part in str(threshold).split(",") if part.strip()]
    yield (
        len(bounds) not in (1, len(statistics)),
        f"{key}.rollout_rs_threshold={threshold}: give one for all, or {len(statistics)}, comma-separated, one for "
        "each of rollout_rs",
    )
    for name, bound in zip(statistics, bounds * (len(statistics) if len(bounds) == 1 else 1), strict=True):
        yield _bounds(f"{key}.rollout_rs_threshold", bound, range_allowed=name.endswith("k1"), of=f" of {name}")


def _bounds(key: str, text: str, range_allowed: bool, of: str = "") -> tuple[Any, str]:
    """Return the rule that a bound is ``HIGH`` or ``LOW_HIGH``, above 0 and in order."""
    try:
        values = [float(part) for part in text.split("_", 1)]
    except ValueError:
        values = []
    wanted = "a number above 0, or LOW_HIGH" if range_allowed else "a number above 0"
    wrong = not values or min(values) <= 0 or values != sorted(values) or (len(values) > 1 and not range_allowed)
    return wrong, f"{key}={text}{of}: give {wanted}"
