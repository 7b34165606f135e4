"""Keys without effect: verl's that have none here, with the reason and what to set instead; and those that have one
only beside a value of another key.

A key of the former covers all keys below it, except those that ``schema`` documents. ``config.compose`` rejects any
value but the shipped one.
"""

from typing import Any

_PROMPTS = ("environments bring their own prompts", "an option of the environment, environment.args.KEY")
_SCORES = ("environments score what is sampled", "environment.target, or environment.reward_bridge")
_EVALUATED = ("environments evaluate", "evaluation.every")
_ENGINE = ("SGLang is a server of its own", "inference.args.FLAG, a flag of sglang.launch_server")
_SAMPLING = ("environments choose how they sample", "an option of the environment, environment.args.KEY")
_TOKENIZER = (
    "servers and environments take tokenizer, chat template and configuration from the model's folder as well",
    "actor_rollout_ref.model.path, a folder that has them",
)
_PROFILER = ("verl's profiler is not started by this recipe's training loop", None)
_QAT = ("unquantized weights are pushed", None)
_OWN_LOOP = ("this recipe has a training loop of its own", None)
_MEGATRON = ("only the FSDP engines are supported", None)
_REFERENCE = ("the reference policy computes no entropies", None)
_NOT_TRAINED = ("the reference policy is not trained", None)
_ROLE = ("the actor is trained, and the reference policy is not", None)

UNSUPPORTED: dict[str, tuple[str, str | None]] = {
    "data": _PROMPTS,
    "data.seed": (_PROMPTS[0], "seed"),
    "custom_reward_function": _SCORES,
    "reward": _SCORES,
    "reward_model": _SCORES,
    "sandbox_fusion": _SCORES,
    "critic": ("no critic is trained", "algorithm.adv_estimator, a critic-free one"),
    "distillation": ("teachers' logprobs come with the environment's groups", "trainer.atropos.distillation"),
    "transfer_queue": _OWN_LOOP,
    "skip": _OWN_LOOP,
    "global_profiler": _PROFILER,
    "ray_kwargs.timeline_json_file": ("no timeline is written", None),
    "algorithm.lam": ("only GAE reads it", None),
    "algorithm.filter_groups": ("environments send groups as they are done", "environment.args.KEY"),
    "algorithm.use_pf_ppo": _OWN_LOOP,
    "algorithm.pf_ppo": _OWN_LOOP,
    "trainer.test_freq": _EVALUATED,
    "trainer.val_before_train": _EVALUATED,
    "trainer.val_only": _EVALUATED,
    "trainer.log_val_generations": _EVALUATED,
    "trainer.validation_data_dir": _EVALUATED,
    "trainer.total_epochs": ("there is no dataset to pass through", "trainer.total_training_steps"),
    "trainer.critic_warmup": ("no critic is trained", None),
    "trainer.max_critic_ckpt_to_keep": ("no critic is trained", "trainer.max_actor_ckpt_to_keep"),
    "trainer.checkpoint_callback_class": _OWN_LOOP,
    "trainer.del_local_ckpt_after_load": ("checkpoints are not copied before they are loaded", None),
    "trainer.default_hdfs_dir": ("verl cannot resume from it", "trainer.default_local_dir"),
    "trainer.use_v1": _OWN_LOOP,
    "trainer.v1": _OWN_LOOP,
    "model_engine": _MEGATRON,
    "actor_rollout_ref.hybrid_engine": _OWN_LOOP,
    "actor_rollout_ref.nccl_timeout": ("no worker reads it", "trainer.atropos.weight_sync.timeout"),
    "actor_rollout_ref.rollout": _ENGINE,
    "actor_rollout_ref.rollout.dtype": (_ENGINE[0], "inference.dtype"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": (_ENGINE[0], "inference.mem_fraction_static"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": (_ENGINE[0], "inference.args.tp_size"),
    "actor_rollout_ref.rollout.data_parallel_size": (_ENGINE[0], "inference.servers"),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": (_ENGINE[0], "inference.args.tp_size"),
    "actor_rollout_ref.rollout.expert_parallel_size": (_ENGINE[0], "inference.args.ep_size"),
    "actor_rollout_ref.rollout.max_model_len": (_ENGINE[0], "inference.args.context_length"),
    "actor_rollout_ref.rollout.max_num_seqs": (_ENGINE[0], "inference.args.max_running_requests"),
    "actor_rollout_ref.rollout.prompt_length": ("it is the trainer's", "data.max_prompt_length"),
    "actor_rollout_ref.rollout.response_length": ("it is the trainer's", "data.max_response_length"),
    "actor_rollout_ref.rollout.seed": ("each server gets a seed of its own", "seed"),
    "actor_rollout_ref.rollout.top_p": _SAMPLING,
    "actor_rollout_ref.rollout.top_k": _SAMPLING,
    "actor_rollout_ref.rollout.do_sample": _SAMPLING,
    "actor_rollout_ref.rollout.ignore_eos": _SAMPLING,
    "actor_rollout_ref.rollout.val_kwargs": _EVALUATED,
    "actor_rollout_ref.rollout.multi_turn": ("environments hold the conversations", "environment.target"),
    "actor_rollout_ref.rollout.agent": ("environments hold the conversations", "environment.target"),
    "actor_rollout_ref.rollout.profiler": _PROFILER,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": (
        "verl has deprecated it",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    ),
    "actor_rollout_ref.rollout.checkpoint_engine": ("the recipe brings its own", "trainer.atropos.weight_sync"),
    "actor_rollout_ref.actor.profiler": _PROFILER,
    "actor_rollout_ref.ref.profiler": _PROFILER,
    "actor_rollout_ref.actor.rollout_n": ("it follows the group size", "actor_rollout_ref.rollout.n"),
    "actor_rollout_ref.ref.rollout_n": ("it follows the group size", "actor_rollout_ref.rollout.n"),
    "actor_rollout_ref.actor.grad_clip": ("the FSDP engines do not read it", "actor_rollout_ref.actor.optim.clip_grad"),
    "actor_rollout_ref.actor.use_remove_padding": (
        "the engine reads the model's",
        "actor_rollout_ref.model.use_remove_padding",
    ),
    "actor_rollout_ref.actor.use_fused_kernels": (
        "the engine reads the model's",
        "actor_rollout_ref.model.use_fused_kernels",
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": (
        "verl has deprecated it",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    ),
    "actor_rollout_ref.ref.log_prob_micro_batch_size": (
        "verl has deprecated it",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    ),
    "actor_rollout_ref.actor.data_loader_seed": ("mini-batches are whole groups in the order of their arrival", None),
    "actor_rollout_ref.actor.use_prefix_grouper": _OWN_LOOP,
    "actor_rollout_ref.actor.freeze_vision_tower": ("only language models are trained", None),
    "actor_rollout_ref.actor.qat": _QAT,
    **{
        f"actor_rollout_ref.ref.{section}{key}": _REFERENCE
        for section in ("", "fsdp_config.")
        for key in (
            "entropy_from_logits_with_chunking",
            "entropy_from_logits_chunk_size",
            "entropy_checkpointing",
            "use_torch_compile",
        )
    },
    "actor_rollout_ref.ref.fsdp_config.optimizer_offload": _NOT_TRAINED,
    "actor_rollout_ref.ref.fsdp_config.use_no_sync_for_gradient_accumulation": _NOT_TRAINED,
    **{
        f"actor_rollout_ref.{role}.fsdp_config.{key}": why
        for role in ("actor", "ref")
        for key, why in (
            (
                "dtype",
                (
                    "the FSDP engines do not read it",
                    f"actor_rollout_ref.{role}.fsdp_config.mixed_precision.param_dtype",
                ),
            ),
            ("strategy", ("it is overwritten", f"actor_rollout_ref.{role}.strategy")),
            ("forward_only", _ROLE),
            ("turbo_config", _MEGATRON),
            ("qat", _QAT),
        )
    },
    "actor_rollout_ref.actor.optim.total_training_steps": ("it is the trainer's", "trainer.total_training_steps"),
    "actor_rollout_ref.actor.optim.warmup_style": (
        "verl has deprecated it",
        "actor_rollout_ref.actor.optim.lr_scheduler_type",
    ),
    "actor_rollout_ref.actor.checkpoint.async_save": ("the FSDP engines save in place", None),
    "actor_rollout_ref.actor.checkpoint.strict": _MEGATRON,
    "actor_rollout_ref.model.tokenizer_path": _TOKENIZER,
    "actor_rollout_ref.model.hf_config_path": _TOKENIZER,
    "actor_rollout_ref.model.custom_chat_template": _TOKENIZER,
    "actor_rollout_ref.model.mtp": _MEGATRON,
    "actor_rollout_ref.model.tiled_mlp": ("the FSDP engines do not read it", None),
    "actor_rollout_ref.model.lora": (
        "it is the Megatron engine's",
        "actor_rollout_ref.model.lora_rank, lora_alpha, target_modules, exclude_modules or lora_adapter_path",
    ),
}

_CORRECTION, _ACTOR, _LOSS = "algorithm.rollout_correction.", "actor_rollout_ref.actor.", "policy_loss.loss_mode"
# A key; those of its values beside which others have an effect (none listed: all but null and 0); and these others,
# without their prefix.
_CONDITIONS: tuple[tuple[str, tuple[Any, ...], tuple[str, ...], str], ...] = (
    ("algorithm.use_kl_in_reward", (True,), ("kl_ctrl.kl_coef", "kl_ctrl.type", "kl_penalty"), "algorithm."),
    ("algorithm.kl_ctrl.type", ("adaptive",), ("horizon", "target_kl"), "algorithm.kl_ctrl."),
    (
        "algorithm.adv_estimator",
        ("grpo_atropos", "grpo", "grpo_passk", "grpo_vectorized"),
        ("norm_adv_by_std_in_grpo",),
        "algorithm.",
    ),
    ("algorithm.adv_estimator", ("reinforce_plus_plus",), ("gamma",), "algorithm."),
    (f"{_CORRECTION}rollout_is", (), ("rollout_is_threshold", "rollout_is_batch_normalize"), _CORRECTION),
    (f"{_CORRECTION}rollout_rs", (), ("rollout_rs_threshold",), _CORRECTION),
    (f"{_CORRECTION}bypass_mode", (True,), ("loss_type",), _CORRECTION),
    (f"{_ACTOR}use_kl_loss", (True,), ("kl_loss_coef", "kl_loss_type"), _ACTOR),
    (f"{_ACTOR}loss_agg_mode", ("seq-mean-token-sum-norm",), ("loss_scale_factor",), _ACTOR),
    (
        _ACTOR + _LOSS,
        ("vanilla", "bypass_mode", "clip_cov", "cispo", "dppo_kl", "dppo_tv", "gspo"),
        ("clip_ratio", "clip_ratio_low", "clip_ratio_high"),
        _ACTOR,
    ),
    (_ACTOR + _LOSS, ("vanilla", "bypass_mode", "dppo_kl", "dppo_tv"), ("clip_ratio_c",), _ACTOR),
    (_ACTOR + _LOSS, ("sapo",), ("tau_pos", "tau_neg"), _ACTOR),
    (_ACTOR + _LOSS, ("dro",), ("dro_beta",), f"{_ACTOR}policy_loss."),
    (_ACTOR + _LOSS, ("clip_cov",), ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), f"{_ACTOR}policy_loss."),
    (_ACTOR + _LOSS, ("kl_cov",), ("kl_cov_ratio", "ppo_kl_coef"), f"{_ACTOR}policy_loss."),
    (
        f"{_ACTOR}optim.lr_scheduler_type",
        ("cosine",),
        ("min_lr_ratio", "num_cycles", "zero_indexed_step"),
        f"{_ACTOR}optim.",
    ),
    (f"{_ACTOR}use_dynamic_bsz", (True,), ("ppo_max_token_len_per_gpu",), _ACTOR),
    (f"{_ACTOR}use_dynamic_bsz", (False,), ("ppo_micro_batch_size_per_gpu",), _ACTOR),
    *(
        (f"{role}.log_prob_use_dynamic_bsz", (dynamic,), (f"log_prob_{size}_per_gpu",), f"{role}.")
        for role in ("actor_rollout_ref.rollout", "actor_rollout_ref.ref")
        for dynamic, size in ((True, "max_token_len"), (False, "micro_batch_size"))
    ),
    *(
        (f"actor_rollout_ref.{role}.strategy", (strategy,), keys, f"actor_rollout_ref.{role}.fsdp_config.")
        for role in ("actor", "ref")
        for strategy, keys in (
            ("fsdp", ("use_orig_params", "wrap_policy.min_num_params")),
            ("fsdp2", ("offload_policy",)),
        )
    ),
    *(
        (f"{_ACTOR}fsdp_config.{switch}", (True,), keys, _ACTOR)
        for switch, keys in (
            (
                "entropy_from_logits_with_chunking",
                ("entropy_from_logits_chunk_size", "fsdp_config.entropy_from_logits_chunk_size"),
            ),
        )
    ),
    (
        "actor_rollout_ref.model.use_remove_padding",
        (True,),
        ("actor.pad_to_length", "actor.fsdp_config.pad_to_length", "actor.ulysses_sequence_parallel_size"),
        "actor_rollout_ref.",
    ),
    (
        "actor_rollout_ref.model.use_fused_kernels",
        (True,),
        ("fused_kernel_options.impl_backend",),
        "actor_rollout_ref.model.",
    ),
    (
        "actor_rollout_ref.model.lora_rank",
        (),
        (
            *(f"model.{key}" for key in ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")),
            "model.lora.merge",
            "actor.checkpoint.save_lora_only",
        ),
        "actor_rollout_ref.",
    ),
)
CONDITIONAL = {prefix + key: (switch, values) for switch, values, keys, prefix in _CONDITIONS for key in keys}
