"""Estimate how much memory a configuration needs on each GPU: ``verl-atropos plan key=value ...``

No weights are loaded: the model is built on torch's meta device, and what its layers save for the backward pass is
counted as they run there. Persistent memory (parameters, optimizer) is accurate to 1 or 2 percent, the estimated peak
of activations to 25 percent. Not counted: the CUDA context (about 0.5 GiB), fragmentation, NCCL's buffers.

verl's memory use, from its source (workers/engine/fsdp/transformer_impl.py): parameters, gradients and Adam's moments
are float32 and sharded over the ranks; a layer is gathered in bfloat16 while it runs, and the next one is prefetched;
the embeddings and the head stay gathered. The reference policy is float32 too (``ref.fsdp_config.model_dtype``).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from recipe.atropos.config.compose import add_options, compose_overrides
from recipe.atropos.config.models import MODEL_KEY, SMALL_POLICIES, check_model
from recipe.atropos.config.transports import gpu_transport
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import SGLangLaunch
from recipe.atropos.launcher.placement import COLOCATED_SHARE
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.launcher.sglang import add_adapter
from recipe.atropos.utils.gpus import BUCKET_MEGABYTES, visible_gpus
from recipe.atropos.utils.machine import gpu_memory
from recipe.atropos.verl_ext.attention import flash_is_installed, set_micro_batches
from recipe.atropos.verl_ext.device import PrecisionType

GIB = 1 << 30
_ADAM_BYTES = 8  # two float32 moments
_COMPUTED = torch.bfloat16
_LARGEST_SHARE = 0.9  # of a GPU; the rest is for what is not counted
_SGLANG_SHARE = 0.85  # roughly SGLang's default
_KEPT_BY_SERVERS = 3 * GIB  # never released by colocated servers: context, graphs, workspaces (an estimate)


@dataclass(frozen=True)
class TrainerPlan:
    """Bytes on each trainer GPU.

    ``parts``, by name: parameters, optimizer and reference persist; gradients, gathered (embeddings, head, and two
    layers, in the compute dtype), activations and logits are temporary, and so are the buckets of a weight push, unless
    ``buckets_stay`` between pushes. ``resident``: of what persists, what is not offloaded while the servers generate.
    """

    parts: dict[str, int]
    buckets_stay: bool
    resident: int

    @property
    def peak(self) -> int:
        """The larger of an update's memory and that of a push, when the activations are freed."""
        parts, buckets = self.parts, self.parts["buckets"]
        moving = parts["gathered"] + parts["activations"] + parts["logits"] + (buckets if self.buckets_stay else 0)
        # verl loads offloaded state
        staying = parts["parameters"] + parts["optimizer"] + parts["reference"] + parts["gradients"]
        return staying + max(moving, buckets + parts["gathered"])


@dataclass(frozen=True)
class ServerPlan:
    """Bytes on each of a server's GPUs, and the number of tokens that fit in its KV cache."""

    weights: int
    cache: int
    tokens: int


@dataclass(frozen=True)
class MemoryPlan:
    trainer: TrainerPlan
    server: ServerPlan
    memory: int  # bytes of a GPU
    colocated: bool
    problems: list[str]


def plan_memory(config: DictConfig, memory: int | None = None) -> MemoryPlan:
    """Return the memory plan of ``config``. ``memory``: bytes of each GPU; None: this machine's.

    Raises:
        ConfigurationError: the model's configuration cannot be read, or there is no GPU here and ``memory`` is None.
    """
    if memory is None and (memory := gpu_memory()) is None:
        raise ConfigurationError("there is no GPU here: give --gpu-memory GIB, of each GPU that is to be used")
    model, colocated = _on_meta(config), config.inference.colocated
    if colocated is None:  # as the launcher decides; without GPUs here, assume separate GPUs
        needed = config.trainer.n_gpus_per_node + (config.inference.servers or 1) * _launch(config).gpus
        by_ray = config.trainer.nnodes > 1 or config.inference.placement == "ray"
        colocated = not by_ray and 0 < visible_gpus() < needed
    config = config.copy()
    config.trainer.device, config.inference.colocated = "cuda", colocated
    set_micro_batches(config, flash_is_installed())
    server = _server(config, model, memory)
    trainer = _trainer(config, model)  # last: it may add an adapter to the model
    return MemoryPlan(trainer, server, memory, colocated, list(_problems(config, trainer, server, memory)))


def _on_meta(config: DictConfig) -> PreTrainedModel:
    settings = config.actor_rollout_ref.model
    if settings.path in SMALL_POLICIES:
        raise ConfigurationError(
            f"{MODEL_KEY}={settings.path}: a small policy for a CPU, made when the run starts; give --model"
        )
    check_model(settings.path)  # transformers would ask a hub that cannot be reached for minutes
    try:
        found = AutoConfig.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{MODEL_KEY}={settings.path}: its configuration cannot be read: {error}") from error
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(found, dtype=_COMPUTED, attn_implementation="sdpa")
    except ValueError as error:
        raise ConfigurationError(f"{MODEL_KEY}={settings.path}: only language models are planned: {error}") from error


def parameters_of(model: torch.nn.Module) -> int:
    """Return the number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _adapt(config: DictConfig, model: PreTrainedModel) -> int:
    """Add an adapter to the model, and return the adapter's number of parameters."""
    with torch.device("meta"):
        add_adapter(model, config.actor_rollout_ref.model)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)


# ---------------------------------------------------------------- the trainer


def _trainer(config: DictConfig, model: PreTrainedModel) -> TrainerPlan:
    actor, settings = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    engine = actor.fsdp_config
    shards = _shards(config, engine)
    whole, size = parameters_of(model), _bytes(engine.model_dtype)
    trained = _adapt(config, model) if settings.lora_rank else whole
    held = whole + trained if settings.lora_rank else whole
    layers = [parameters_of(layer) for layer in decoder_layers(model)]
    parts = {
        "parameters": size * held // shards,
        "optimizer": _ADAM_BYTES * trained // shards,
        "reference": _reference_bytes(config) * whole // _shards(config, config.actor_rollout_ref.ref.fsdp_config),
        "buckets": _buckets(config, _COMPUTED.itemsize * whole),
        "gradients": size * trained // shards,
        "gathered": _COMPUTED.itemsize * (parameters_of(model) - sum(layers) + 2 * max(layers)),
        "activations": activations(model, actor.ppo_max_token_len_per_gpu, settings.enable_gradient_checkpointing),
        "logits": _logits(config, model, actor.ppo_max_token_len_per_gpu),
    }
    kept = {"parameters": not engine.param_offload, "optimizer": not engine.optimizer_offload, "reference": True}
    resident = sum(parts[name] for name, stays in kept.items() if stays)
    return TrainerPlan(parts, gpu_transport(config).keeps_buckets, resident)


def _shards(config: DictConfig, engine: DictConfig) -> int:
    """Return the number of ranks that share a model; as in verl, all of them if ``fsdp_size`` is not below."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    return engine.fsdp_size if 0 < engine.fsdp_size < ranks else ranks


def _reference_bytes(config: DictConfig) -> int:
    """Return the bytes of a parameter of the reference policy; 0 if there is none, or not in the GPU's memory."""
    engine = config.actor_rollout_ref.ref.fsdp_config
    asked = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    stays = asked and not config.actor_rollout_ref.model.lora_rank and not engine.param_offload
    return _bytes(engine.model_dtype) if stays else 0


def _buckets(config: DictConfig, weights: int) -> int:
    """Return the bytes of a push's buckets; ``weights``: of all that is pushed."""
    model, pushes = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.checkpoint_engine
    if model.lora_rank and not model.lora.merge:
        return 0  # an adapter is sent inside a request
    if gpu_transport(config).shares_memory and _launch(config).gpus > 1:
        return weights  # SGLang's ranks still read one bucket while the next is filled
    return 2 * min((pushes.update_weights_bucket_megabytes or BUCKET_MEGABYTES["cuda"]) << 20, weights)


def _bytes(dtype: str | None) -> int:
    return PrecisionType.to_dtype(dtype or "fp32").itemsize


def _logits(config: DictConfig, model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of logits in verl's ``logprobs_from_logits``: flash-attn works in place, torch keeps copies."""
    if config.actor_rollout_ref.model.use_fused_kernels:
        return 0
    one = tokens * model.config.get_text_config().vocab_size * _COMPUTED.itemsize
    copies = 1 if flash_is_installed() else 3  # logits, their log softmax, the gradient of both
    if config.actor_rollout_ref.rollout.temperature != 1:
        copies += 1
    if config.actor_rollout_ref.actor.entropy_coeff or config.actor_rollout_ref.actor.calculate_entropy:
        copies += 2
    return copies * one


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the layers that FSDP wraps one by one: the ModuleList with the most ``_no_split_modules``."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    names = set(model._no_split_modules or ())
    return max(lists, key=lambda found: sum(type(layer).__name__ in names for layer in found))


def activations(model: PreTrainedModel, tokens: int, checkpointed: bool) -> int:
    """Return the bytes that a forward pass over ``tokens`` packed tokens saves for the backward pass, without logits.

    With gradient checkpointing, each layer saves its input, and one layer at a time saves everything it computes.
    """
    kept = _kept_by_layers(model, tokens)
    if not checkpointed:
        return sum(kept)
    hidden = model.config.get_text_config().hidden_size
    return len(kept) * tokens * hidden * _COMPUTED.itemsize + max(kept)


def _kept_by_layers(model: PreTrainedModel, tokens: int) -> list[int]:
    kept: list[int] = []
    # Storages by address; they are kept alive, since the address of a freed one could be reused.
    seen = {storage._cdata: storage for storage in (each.untyped_storage() for each in model.parameters())}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            kept[-1] += storage.nbytes()
        return tensor

    def begin(*_: object) -> None:
        kept.append(0)

    handles = [layer.register_forward_pre_hook(begin) for layer in decoder_layers(model)]
    before, model.config._attn_implementation = model.config._attn_implementation, _name_of_attention()
    size = (1, tokens, model.config.get_text_config().hidden_size)
    try:
        model.train()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            begin()  # before the first layer
            embedded = torch.zeros(size, dtype=_COMPUTED, device="meta", requires_grad=True)
            model.base_model(inputs_embeds=embedded, use_cache=False)
    finally:
        model.config._attn_implementation = before
        for handle in handles:
            handle.remove()
    return kept[1:]


def _name_of_attention() -> str:
    """Register an attention that saves what FlashAttention does: inputs, output, a float32 for each token and head."""

    def attend(module, query, key, value, *_: object, **__: object):
        width = value.shape[-1]
        if width < query.shape[-1]:  # it takes one width alone
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return output[..., :width].transpose(1, 2), None

    AttentionInterface.register("memory_plan", attend)
    return "memory_plan"


# ---------------------------------------------------------------- the servers


def _launch(config: DictConfig) -> SGLangLaunch:
    return SGLangLaunch("", extra_args=config.inference.args)


def _server(config: DictConfig, model: PreTrainedModel, memory: int) -> ServerPlan:
    text = model.config.get_text_config()
    flags = _launch(config).extra_args
    gpus = int(flags.get("tp_size") or 1)  # each data-parallel rank has all of it
    weights = _bytes(config.inference.dtype) * parameters_of(model) // gpus
    share = float(
        flags.get("mem_fraction_static")
        or config.inference.mem_fraction_static
        or (COLOCATED_SHARE if config.inference.colocated else _SGLANG_SHARE)
    )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * max(1, heads // gpus) * width * _bytes(config.inference.dtype)
    tokens = max(0, int(share * memory) - weights) // token
    tokens = min(tokens, int(flags.get("max_total_tokens") or tokens))
    return ServerPlan(weights, tokens * token, tokens)


def _problems(config: DictConfig, trainer: TrainerPlan, server: ServerPlan, memory: int) -> Iterator[str]:
    """Yield what does not fit, each with the setting to change."""
    room, colocated = int(_LARGEST_SHARE * memory), config.inference.colocated
    kept = _KEPT_BY_SERVERS if colocated else 0
    if trainer.peak + kept > room:
        largest = max(trainer.parts, key=trainer.parts.__getitem__)
        yield (
            f"an update takes {trainer.peak / GIB:.1f} GiB of {memory / GIB:.0f}, most of it {largest} "
            f"({trainer.parts[largest] / GIB:.1f}); {_CHANGES[largest]}"
        )
    if colocated and trainer.resident + server.weights + server.cache + kept > room:
        total = (trainer.resident + server.weights + server.cache + kept) / GIB
        yield (
            f"while the colocated servers generate, they and the trainer take {total:.1f} GiB of {memory / GIB:.0f}; "
            "lower inference.mem_fraction_static, or set actor_rollout_ref.actor.fsdp_config.param_offload=true and "
            "optimizer_offload=true"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if server.tokens < longest:
        yield (
            f"a server's KV cache has room for {server.tokens:,} tokens, and one sequence may have {longest:,}; raise "
            "inference.mem_fraction_static, or give it more GPUs (inference.args.tp_size)"
        )


_FEWER = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_CHANGES = {
    "parameters": "train on more GPUs, or a LoRA adapter (model.lora_rank)",
    "optimizer": "train on more GPUs, or a LoRA adapter (model.lora_rank)",
    "gradients": "train on more GPUs, or a LoRA adapter (model.lora_rank)",
    "reference": "set actor_rollout_ref.ref.fsdp_config.param_offload=true, or actor.use_kl_loss=false",
    "buckets": "lower rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "gathered": "set model.enable_gradient_checkpointing=true, or train on GPUs with more memory",
    "activations": f"set model.enable_gradient_checkpointing=true, or {_FEWER}",
    "logits": f"{_FEWER}, or set model.use_fused_kernels=true",
}


# ---------------------------------------------------------------- output


def show(plan: MemoryPlan, console: Console) -> None:
    table = Table("of each GPU", "GiB", box=None)
    rows = {f"trainer: {name}": value for name, value in plan.trainer.parts.items() if value} | {
        "trainer: while servers generate": plan.trainer.resident,
        "trainer: peak": plan.trainer.peak,
        "server: weights": plan.server.weights,
        f"server: KV cache, {plan.server.tokens:,} tokens": plan.server.cache,
        "the GPU": plan.memory,
    }
    for name, value in rows.items():
        table.add_row(name, f"{value / GIB:.2f}")
    console.print(table)
    console.print("servers and trainer share GPUs" if plan.colocated else "servers and trainer have GPUs of their own")
    for problem in plan.problems:
        console.print(f"[bold red]does not fit[/] {problem}", soft_wrap=True)
    if not plan.problems:
        console.print("[bold green]fits[/]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="of each GPU; default: this machine's")


def main(given: argparse.Namespace) -> int:
    """Return exit status 0 only if everything fits."""
    memory = None if given.gpu_memory is None else int(given.gpu_memory * GIB)
    found = plan_memory(plan_run(compose_overrides(given), begins=False).config, memory)
    show(found, Console(highlight=False))
    return 1 if found.problems else 0
