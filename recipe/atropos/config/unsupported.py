"""verl's keys that have no effect here, with the reason and what to set instead.

A key covers all keys below it, except those that ``schema`` documents. ``config.compose`` rejects any value but the
shipped one.
"""

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
_OWN_LOOP = ("this recipe has a training loop of its own", None)
_MEGATRON = ("only the FSDP engines are supported", None)

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
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": (_ENGINE[0], "inference.args.pp_size"),
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
    "actor_rollout_ref.actor.optim.total_training_steps": ("it is the trainer's", "trainer.total_training_steps"),
    "actor_rollout_ref.actor.optim.warmup_style": (
        "verl has deprecated it",
        "actor_rollout_ref.actor.optim.lr_scheduler_type",
    ),
    "actor_rollout_ref.actor.checkpoint.async_save": ("the FSDP engines save in place", None),
    "actor_rollout_ref.model.tokenizer_path": _TOKENIZER,
    "actor_rollout_ref.model.hf_config_path": _TOKENIZER,
    "actor_rollout_ref.model.custom_chat_template": _TOKENIZER,
    "actor_rollout_ref.model.mtp": _MEGATRON,
    "actor_rollout_ref.model.lora": (
        "it is the Megatron engine's",
        "actor_rollout_ref.model.lora_rank, lora_alpha, target_modules, exclude_modules or lora_adapter_path",
    ),
}
