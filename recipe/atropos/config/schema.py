"""Types, ranges and choices of the configuration: of all keys of this recipe, and of verl's keys that it documents.

Defaults are only in ``trainer.yaml``. Rules across several keys are in ``preflight``. Guarantees:

- imports no other package than pydantic, so that a wrong value is reported quickly;
- strict: ``"8"`` is not a number, ``true`` is not a number, NaN and infinity are rejected;
- this recipe's sections accept no other keys; verl's do, and ``config.compose`` checks those against verl's own tree.
"""

import functools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from recipe.atropos.algorithm.estimators import ESTIMATORS
from recipe.atropos.watchdog.alarms import Name as AlarmName


def _declared(name: Any) -> str:
    if name not in (choices := sorted(ESTIMATORS)):
        raise PydanticKnownError("literal_error", {"expected": ", ".join(choices)})
    return name


EstimatorName = Annotated[str, PlainValidator(_declared), WithJsonSchema({"enum": sorted(ESTIMATORS)})]
# verl's names are repeated here, so that verl need not be imported; a test compares them with verl's registries.
PolicyLoss = Literal[
    "advantage_weighted_sft",
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "vanilla",
]
KL = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLLoss = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
Tracker = Literal[
    "wandb",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "tensorboard",
    "console",
    "clearml",
    "trackio",
    "file",
    "rl_insight",
]

Text = Annotated[str, Field(min_length=1)]
Name = Text | int | float  # a name like 2024 is parsed as a number
Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
URL = Annotated[str, Field(pattern=r"^https?://.+")]
Device = Literal["auto", "cuda", "cpu"]
Dtype = Literal["bfloat16", "float16", "float32"]
TorchDtype = Literal["fp32", "float32", "fp16", "float16", "bf16", "bfloat16"]


class Section(BaseModel):
    """A mapping of this recipe's own keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class VerlSection(Section):
    """A mapping of verl's keys; only those named here are checked."""

    model_config = ConfigDict(extra="ignore")


def about(text: str) -> Any:
    """Return the field of a key with its meaning. Its default is in ``trainer.yaml``."""
    return Field(description=text)


class RunSection(Section):
    name: Name = about("Name of the run")
    dir: Text = about("Folder of the run; an unfinished run in it is resumed")
    resume_from: Text | None = about("RUN[@STEP]: begin with that run's weights, a new optimizer and step 0")


class APISection(Section):
    host: Text | None = about("Address of the Trajectory API; null: see inference.host")
    port: Port | None = about("Its port; null: 8000, or a free one")
    start_timeout: Seconds = about("Seconds until it must answer")
    max_restarts: Limit = about("Restarts before the run ends")
    retention: Literal["all", "committed"] = about(
        "Batches kept in run.dir/trajectories: all, or those in no checkpoint"
    )


class InferenceSection(Section):
    urls: list[URL] = about("Servers that the trainer pushes to; the launcher sets it")
    gateway: URL | None = about("Their gateway; null: the trainer starts one")
    servers: Count | None = about("Servers to start; null: 1, colocated as many as the GPUs hold")
    max_restarts: Limit = about("Restarts of each server and the gateway before the run ends")
    python: Text | None = about("Interpreter of SGLang's environment; null: $ATROPOS_SGLANG_PYTHON, else .venv-sglang")
    device: Device = about("Where the servers compute")
    host: Text | None = about(
        "Address of servers and gateway; null: 127.0.0.1, or the head's, if Ray places an environment"
    )
    port: Port | None = about("First server's port, the others follow; null: free ones")
    gateway_port: Port | None = about("The gateway's port; null: 9001, or a free one")
    dtype: Dtype = about("Of the served weights; set float32 on a CPU")
    placement: Literal["launcher", "ray"] | None = about(
        "Who starts the servers: the launcher, beside it, or Ray, anywhere; null: Ray, on a cluster, if trainer.nnodes "
        "> 1 or GPUs are too few here"
    )
    colocated: bool | None = about("Servers share the trainer's GPUs; null: if they are too few for both")
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = about(
        "Share of a GPU for weights and KV cache; null: SGLang's choice, colocated 0.4"
    )
    api_key: Text | None = about("The trainer's key; the launcher makes one for each start")
    start_timeout: Seconds = about("Seconds until every server must generate")
    args: dict[str, Any] = about("Further flags of sglang.launch_server")


class EnvironmentSection(Section):
    target: Text | None = about("MODULE[:Class] or FILE.py[:Class]; null: none is started, others join")
    command: Text | None = about("Instead of target: a program that calls the model (docs/agents.md)")
    agent: Text | None = about("Instead of target: MODULE:function, async agent(item, base_url, api_key) -> reward")
    items: Text | None = about("Of command or agent: a .jsonl file, or a data set's folder or hub name")
    score: Text | None = about("Of command: MODULE:function(item, output) -> reward; null: the program prints it")
    python: Text | None = about("Its own interpreter; null: the recipe's")
    group_size: Count = about("Sequences of a group")
    args: dict[str, Any] = about("The environment's own flags, without env.")
    reward_bridge: dict[str, Any] | None = about("Shapes its scores (docs/reward_bridge.md)")
    credit: dict[str, Any] | None = about("Advantages of its turns (docs/token-advantages.md)")
    weight: Positive = about("Its part of what is not allocated, relative to other environments'")
    min_batch_allocation: Share | None = about("The least part of each batch that it has")
    replicas: Count = about("Processes, each with its part of the items")
    placement: Literal["launcher", "ray"] | None = about(
        "As inference.placement; null: Ray, on a cluster, if replicas > 1"
    )
    max_restarts: Limit = about("Restarts of each replica before it is abandoned")
    start_timeout: Seconds = about("Seconds until it must have registered")
    evaluate: bool = about("Evaluate with its own evaluate()")


class SessionsSection(Section):
    enabled: bool | None = about("Start the session server; null: if an environment has a command or agent")
    port: Port | None = about("Its port; null: a free one")
    renderer: Text = about("Chat format: a name of the package renderers, auto (by the model's name) or default")
    tool_parser: Text | None = about("Format of tool calls with renderer default: qwen3, qwen3.5, glm, ...")
    thinking: Literal["kept", "as_template"] = about("Earlier replies' thinking: kept, or where the template keeps it")


def _each_optional(section: type[Section], name: str) -> type[Section]:
    fields: dict[str, Any] = {
        key: (
            Annotated[info.annotation, info.description, *info.metadata] | None,
            Field(None, description=info.description),
        )
        for key, info in section.model_fields.items()
    }
    return create_model(name, __base__=Section, **fields)


OneOfSeveral = _each_optional(EnvironmentSection, "OneOfSeveral")  # ``environment`` has what an entry omits
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class EvaluationSection(Section):
    every: Count | None = about("Updates between evaluations; null: only before the first and after the last")
    timeout: Seconds | None = about("Seconds for one evaluation; null: 300, or more where answers are long")
    evaluated_file: Text | None = about("Marker file that the launcher sets")


class WatchdogSection(Section):
    stop_on: list[AlarmName] = about("Alarms that end the run; the others are reported")
    silent_after: Seconds = about("Seconds without an end before an environment or server may count as silent")


class DataSection(VerlSection):
    train_batch_size: Count = about("Groups per step")
    max_prompt_length: Count = about("Tokens; with the response's, the limit of a row; no prompt is cut")
    max_response_length: Count = about("Tokens; for longer rows see trainer.atropos.overlong")


class KLControlSection(VerlSection):
    type: Literal["fixed", "adaptive"] = about("How the coefficient changes")
    kl_coef: NotNegative = about("(Initial) coefficient of the KL penalty in the reward")
    horizon: Count = about("Of the adaptive controller")
    target_kl: Positive = about("Of the adaptive controller")


class RolloutCorrectionSection(VerlSection):
    rollout_is: Literal["token", "sequence"] | None = about("Importance weights; null: none")
    rollout_is_threshold: float | str | None = about("Where they are truncated, or LOW_HIGH: dropped outside")
    rollout_is_batch_normalize: bool = about("Scale the weights to mean 1 over a batch")
    rollout_rs: Text | None = about("Rejection by these statistics, comma-separated; null: none")
    rollout_rs_threshold: float | str | None = about("Bounds of each statistic")
    bypass_mode: bool = about("Take the engine's logprobs for the policy's before the update")
    loss_type: Literal["ppo_clip", "reinforce"] = about("Loss in bypass mode")


class AlgorithmSection(VerlSection):
    adv_estimator: EstimatorName = about("The environment's advantages, else GRPO; or one of verl's")
    norm_adv_by_std_in_grpo: bool = about("Divide by the group's standard deviation")
    gamma: Fraction = about("Discount factor of reinforce_plus_plus")
    use_kl_in_reward: bool = about("Subtract a KL penalty from the rewards")
    kl_penalty: KL = about("Estimator of that KL")
    kl_ctrl: KLControlSection
    rollout_correction: RolloutCorrectionSection


class LoRASection(VerlSection):
    merge: bool = about("Push base and adapter merged; false: the adapter alone")


class ModelSection(VerlSection):
    path: Text = about("A local folder in Hugging Face format, or a hub name")
    trust_remote_code: bool = about("Allow code that comes with the model")
    use_remove_padding: bool = about("Train on packed sequences")
    enable_gradient_checkpointing: bool = about("Recompute activations in the backward pass")
    enable_activation_offload: bool = about("Keep activations in host memory")
    use_liger: bool = about("Liger kernels")
    use_fused_kernels: bool = about("verl's fused logprob and entropy kernels")
    override_config: dict[str, Any] = about("Overrides of the model's own configuration")
    lora_rank: Limit = about("Above 0: train a LoRA adapter of this rank")
    lora_alpha: Positive = about("Scale of the adapter: lora_alpha / lora_rank")
    target_modules: Text | list[Text] = about("Modules that get an adapter")
    exclude_modules: Text | list[Text] | None = about("Modules that get none")
    lora_adapter_path: Text | None = about("Begin with this adapter")
    lora: LoRASection


class OptimizerSection(VerlSection):
    lr: NotNegative = about("Learning rate")
    lr_scheduler_type: Literal["constant", "cosine"] = about("Schedule after the warmup")
    lr_warmup_steps: int = about("Updates of linear warmup, the first at 0; 0 or less: by lr_warmup_steps_ratio")
    lr_warmup_steps_ratio: Fraction = about("Warmup as a share of all updates")
    min_lr_ratio: Fraction | None = about("Lowest learning rate of the cosine schedule / lr")
    num_cycles: Positive = about("Of the cosine schedule")
    weight_decay: NotNegative = about("AdamW's")
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = about("AdamW's")
    clip_grad: Positive = about("Largest norm of the gradient")


class FSDPSection(VerlSection):
    param_offload: bool = about("Keep parameters in host memory between uses")
    reshard_after_forward: bool = about("Free gathered parameters after the forward pass")
    fsdp_size: int = about("Ranks that share one copy of the parameters; -1: all")
    model_dtype: TorchDtype = about("Of the parameters that the optimizer updates")
    seed: int = about("Of a new LoRA adapter")


class TrainedFSDPSection(FSDPSection):
    optimizer_offload: bool = about("The optimizer's state in host memory")


CheckpointContents = list[Literal["model", "optimizer", "extra", "hf_model"]]


class CheckpointSection(VerlSection):
    save_contents: CheckpointContents = about("What a checkpoint holds; extra: scheduler and random state")
    load_contents: CheckpointContents = about("What is read from it on resumption")
    save_lora_only: bool = about("Checkpoints leave out the base model")


class PolicyLossSection(VerlSection):
    loss_mode: PolicyLoss = about("Policy loss")
    dro_beta: Positive | None = about("Of loss_mode=dro")


class ActorSection(VerlSection):
    strategy: Literal["fsdp", "fsdp2"] = about("Engine that shards the policy")
    ppo_mini_batch_size: Count = about("Groups per optimizer step")
    ppo_micro_batch_size_per_gpu: Count | None = about("Sequences per forward pass, where use_dynamic_bsz=false")
    use_dynamic_bsz: bool = about("Fill micro-batches by tokens")
    ppo_max_token_len_per_gpu: Count | None = about(
        "Tokens of a micro-batch; null: 16384, without FlashAttention 4096, at least a row's"
    )
    ppo_epochs: Count = about("Passes over a batch")
    shuffle: bool = about("Shuffle mini-batches: must be false, they are whole groups in the order of arrival")
    clip_ratio: NotNegative = about("PPO's clip range")
    clip_ratio_low: Fraction = about("Lower clip range")
    clip_ratio_high: NotNegative = about("Upper clip range")
    clip_ratio_c: Annotated[float, Field(gt=1)] = about("Dual-clip bound for negative advantages")
    policy_loss: PolicyLossSection
    loss_agg_mode: LossAggregation = about("How token losses become one number")
    loss_scale_factor: Positive | None = about("Divisor of seq-mean-token-sum-norm")
    entropy_coeff: float = about("Weight of the entropy bonus")
    calculate_entropy: bool = about("Report the entropy")
    calculate_sum_pi_squared: bool = about("For the optimal-token baselines")
    use_kl_loss: bool = about("Add KL(policy, reference) to the loss")
    kl_loss_coef: NotNegative = about("Its weight")
    kl_loss_type: KLLoss = about("Its estimator; with +: its unbiased gradient")
    use_torch_compile: bool = about("Compile the computation of entropies")
    ulysses_sequence_parallel_size: Count = about("Ranks that share a sequence")
    optim: OptimizerSection
    fsdp_config: TrainedFSDPSection
    checkpoint: CheckpointSection


class LogProbSection(VerlSection):
    log_prob_micro_batch_size_per_gpu: Count | None = about("Sequences per forward pass")
    log_prob_use_dynamic_bsz: bool = about("Fill these micro-batches by tokens")
    log_prob_max_token_len_per_gpu: Count | None = about("Tokens of such a micro-batch")


class ReferenceSection(LogProbSection):
    fsdp_config: FSDPSection


class CheckpointEngineSection(VerlSection):
    update_weights_bucket_megabytes: Count | None = about("Size of a bucket of weights; null: by device")


class RolloutSection(LogProbSection):
    name: Literal["sglang"] = about("The inference engine")
    n: Count = about("Sequences of a group")
    temperature: Positive = about("Temperature of sampling and of the trainer's logprobs")
    checkpoint_engine: CheckpointEngineSection


class ActorRolloutRefSection(VerlSection):
    model: ModelSection
    actor: ActorSection
    ref: ReferenceSection
    rollout: RolloutSection


class DistillationSection(Section):
    loss_coef: NotNegative = about("Weight of KL(teacher || policy); 0: off")
    use_policy_loss: bool = about("Keep the policy loss; false: distillation alone")


class WeightSyncSection(Section):
    transport: Text = about("disk, distributed, tensor, or one of your own; auto: the fastest")
    directory: Text = about("For disk")
    pause_mode: Literal["auto", "abort", "retract", "in_place"] = about("What becomes of running requests")
    every: Count = about("Push after every so many updates")
    verify: Literal["version", "probe"] = about("What is compared after a push; probe: logprobs too")
    timeout: Seconds = about("Seconds for one request of a push to one server; for a push, twice that")


class AtroposSection(Section):
    api_url: URL = about("The Trajectory API; the launcher sets it")
    timeout: Seconds = about("Seconds for one request to the API")
    retry_attempts: Count = about("Attempts to reach the API at first, with exponential backoff")
    retry_delay: Seconds = about("Seconds before the second attempt")
    startup_timeout: Seconds = about("Seconds for the servers to answer before the first push")
    max_wait_time: Seconds | None = about("Longest wait for a batch, in seconds; null: 600, or more for long answers")
    join_timeout: Seconds = about("The same where environment.target=null: for environments to join or return")
    max_restarts: Limit = about("Restarts of the trainer before the run ends")
    step_timeout: Seconds = about(
        "Seconds without a trained step, after which the run ends; waits for a batch do not count"
    )
    max_empty_batches: Count = about("Batches in a row with nothing to train on before the run ends")
    prefetch: Count = about("Batches fetched ahead while one is trained on")
    max_staleness: Limit | None = about("Updates that a sample may be old; 0: on-policy; null: any number")
    sampling_mismatch: Literal["error", "per_row", "warn"] = about("What rows of another temperature do")
    allow_truncated_sampling: bool = about("Train on rows of truncated or penalized sampling")
    logprob_tolerance: Positive | None = about("Nats on fresh samples; null: by inference.dtype")
    overlong: Literal["drop", "truncate", "error"] = about("Rows longer than both lengths together")
    use_advantages: bool = about("Use the environment's advantages, with grpo_atropos")
    fallback_to_grpo: bool = about("Compute missing ones; false: an error")
    advantage_normalization: Literal["none", "batch", "global"] = about("Over the batch's tokens, or the run's")
    advantage_clipping: Annotated[list[float], Field(min_length=2, max_length=2)] | None = about(
        "[low, high], after normalizing"
    )
    distillation: DistillationSection
    replay: Text | None = about("A run's folder trajectories/: train on its batches, without API and servers")
    weight_sync: WeightSyncSection


class TrainerSection(VerlSection):
    project_name: Name = about("Project in the tracker")
    experiment_name: Name = about("Run in the tracker")
    nnodes: Count = about("Machines with ranks of the trainer")
    n_gpus_per_node: Count = about("Ranks on each; on a CPU, processes")
    device: Device = about("Of trainer and servers; auto: GPUs if there is one")
    total_training_steps: Count = about("Updates to train")
    save_freq: int = about("Updates between checkpoints, one after the last too; 0 or less: at SIGUSR1 only")
    max_actor_ckpt_to_keep: Count | None = about("Newest checkpoints kept, beside the best; null: all")
    logger: list[Tracker] = about("Where metrics also go")
    default_local_dir: Text = about("Folder of the checkpoints")
    resume_mode: Literal["auto", "disable", "resume_path"] = about("From the newest checkpoint, none, or a given one")
    resume_from_path: Text | None = about("Folder global_step_N, with resume_mode=resume_path")
    balance_batch: bool = about("Balance tokens over the ranks")
    rollout_data_dir: Text | None = about("Folder of the sampled texts; null: not kept")
    ray_wait_register_center_timeout: Seconds = about("Seconds until the workers must be up")
    atropos: AtroposSection


class Configuration(VerlSection):
    """The whole configuration."""

    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = about("Of the data, the sampling and the small policy")
    run: RunSection
    api: APISection
    inference: InferenceSection
    environment: EnvironmentSection
    environments: dict[EnvironmentName, OneOfSeveral] = about(
        "Several, by name: the keys of environment, its values as defaults, except args, reward_bridge and credit"
    )
    sessions: SessionsSection
    evaluation: EvaluationSection
    watchdog: WatchdogSection
    data: DataSection
    algorithm: AlgorithmSection
    actor_rollout_ref: ActorRolloutRefSection
    trainer: TrainerSection


@functools.cache
def documented() -> dict[str, FieldInfo]:
    """Return every key of the schema by its dotted name; those of several environments are environments.NAME.KEY."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in section.model_fields.items():
            inner = OneOfSeveral if name == "environments" else field.annotation
            yield prefix + name, field
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from walk(inner, f"{prefix}{name}.{'NAME.' if name == 'environments' else ''}")

    return dict(walk(Configuration, ""))
