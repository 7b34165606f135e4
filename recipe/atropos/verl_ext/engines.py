"""Mixins that change verl's FSDP engines for this recipe, and the engines for NVIDIA GPUs and CPUs built with them.

``ConfiguredOffload``: the reference policy stays on its device unless ``ref.fsdp_config`` sets ``param_offload`` (or
``offload_policy``). verl 0.9.1 offloads every forward-only model regardless of its configuration, which makes its
forward pass 40 to 70 times slower.

``PushedWeights``: the weights that are pushed. verl gives packed experts of any MoE model the names of Qwen's
checkpoints; here every tensor has the name and the shape that it has in the model's own checkpoint.

With a LoRA adapter and ``model.lora.merge``, servers get merged weights, base + scaling * B @ A, under the base model's
names; without it, A and scaling * B of each adapted layer, under PEFT's names.
verl merges the adapter into the model, reads the model, rounds the result to bf16, and restores the base weights from
copies (``merged_lora_context``). Here the model is not modified: sums are computed outside it, a tensor at a time. So:

- what is pushed is what the trainer computes with, in the trainer's precision;
- a push only reads: base weights, adapter and optimizer stay bit for bit the same, even where FSDP holds gathered
  copies of them (``reshard_after_forward=false``), and a push that fails midway leaves nothing to restore;
- every rank builds every tensor, because gathering is a collective.

``ConfiguredOptimizer``: a resumed run has the learning rate, the schedule and the optimizer's other numbers from its
configuration. verl takes those of the checkpoint, so that a change would be shown and have no effect.

``CompactBatches``: what the driver did not need to send (``mini_batches.without_padding``) is made here; and a separate
temperature per row. verl's engine supports this, but verl's trainer overwrites the temperatures with one value for the
whole batch.

On a CPU only the wrapping differs: there is nothing to offload to, and FSDP1's ``sync_module_states`` rejects CPU
parameters, so rank 0's weights are broadcast here.

A new adapter depends only on the engine's ``seed``, not on the strategy or the number of ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import Linear, LoraLayer
from tensordict import TensorDict
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import (
    MixedPrecisionPolicy,
    apply_fsdp2,
    fsdp2_load_full_state_dict,
    fsdp_version,
    get_fsdp_wrap_policy,
    load_fsdp_model_to_gpu,
    offload_fsdp_model_to_cpu,
)
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import get_sharding_strategy

from recipe.atropos.tensors.format import FUSED, TENSOR_NAMES, CheckpointFormat
from recipe.atropos.tensors.lora_layers import ADAPTER, adapted_layers, merged_weights
from recipe.atropos.utils.files import write_json

# fp16 underflows without gradient scaling, which needs an accelerator; a CPU runs fp32, or bf16 slowly.
_DEFAULT_PRECISION = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


class ConfiguredOffload:
    """Mixin; must precede one of verl's FSDP engines in the MRO."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap the module; verl reads ``forward_only`` here only to decide whether to offload."""
        config = self.engine_config
        forward_only = config.forward_only
        config.forward_only = forward_only and bool(config.param_offload or config.offload_policy)
        try:
            return super()._build_fsdp_module(module)
        finally:
            config.forward_only = forward_only


class ConfiguredOptimizer:
    """Mixin; must precede one of verl's FSDP engines in the MRO."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint: weights, the optimizer's moments, and the schedule's position."""
        configured = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        super().load_checkpoint(*args, **kwargs)
        schedule = self.lr_scheduler
        schedule.base_lrs = [group["initial_lr"] for group in configured]
        for group, own, factor in zip(self.optimizer.param_groups, configured, schedule.lr_lambdas, strict=True):
            group |= own | {"lr": own["initial_lr"] * factor(schedule.last_epoch)}

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate of the update before, where verl returns that of the next."""
        used: float = self.optimizer.param_groups[0]["lr"]
        super().lr_scheduler_step()
        return used


class CompactBatches:
    """Mixin; must precede one of verl's FSDP engines in the MRO.

    Makes a batch's ``input_ids`` int64, and its ``position_ids``, which count from 0 in each row. If it has
    ``row_temperature``, (B,) float32, that replaces the batch's ``temperature`` in logprobs, entropies and the logits
    that losses see.
    """

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        ids = micro_batch["input_ids"].long()
        offsets = ids.offsets()
        positions = torch.arange(len(ids.values()), device=ids.device)
        positions -= offsets[:-1].repeat_interleave(offsets.diff())
        micro_batch["input_ids"] = ids
        micro_batch["position_ids"] = torch.nested.nested_tensor_from_jagged(positions, offsets)
        if "row_temperature" in micro_batch:
            micro_batch["temperature"] = micro_batch["row_temperature"]
        return super().prepare_model_inputs(micro_batch=micro_batch)


class PushedWeights:
    """Mixin; must precede one of verl's FSDP engines in the MRO.

    ``checkpoint_format`` is the model's, and is set when the model is built.
    """

    checkpoint_format: CheckpointFormat

    @property
    def adapter_only(self) -> bool:
        """Whether an adapter is pushed without the base weights."""
        return self.model_config.lora_rank > 0 and not self.model_config.lora.get("merge", False)

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        self.checkpoint_format = CheckpointFormat(module)
        return module

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Add the adapter to ``module``.

        Raises:
            ValueError: the adapter cannot be pushed: it has more than A and B of linear layers or, if it is not
                merged, layers outside the decoder or several ranks.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.engine_config.seed)
            module = super()._build_lora_module(module)
        _check_mergeable(module)
        if self.adapter_only:
            _check_servable(module)
        return module

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save verl's checkpoint, the weights' names in the model's checkpoint, and an adapter's PEFT configuration."""
        # ``export`` needs the latter two, which are known only while the model is loaded.
        super().save_checkpoint(local_path, *args, **kwargs)
        if dist.get_rank() == 0:
            write_json(Path(local_path) / TENSOR_NAMES, list(self.checkpoint_format.shapes))
            adapter = getattr(self.module, "peft_config", {}).get(ADAPTER)  # FSDP forwards to the module that it wraps
            if adapter is not None:
                adapter.save_pretrained(local_path)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Return (name, full tensor) pairs to push, in the trained dtype; every rank must iterate to the end."""
        return self._pushed(self.adapter_only), None

    def _pushed(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        # FSDP2 gathers shards from any device; only the arithmetic of an adapter needs them on the accelerator.
        adapted = self.model_config.lora_rank > 0
        staged = (adapted or fsdp_version(self.module) == 1) and not self._uses_fsdp2_cpu_offload_policy
        if staged:
            load_fsdp_model_to_gpu(self.module)
        try:
            layers, state = adapted_layers(self.module), self.module.state_dict()
            if adapter_only:
                yield from _adapter_weights(layers, state)
            else:
                yield from self.checkpoint_format.stream(merged_weights(layers, state, _full))
        finally:
            if staged and self._is_offload_param:
                offload_fsdp_model_to_cpu(self.module)


def _adapter_weights(layers: Mapping[str, Linear], state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield PEFT's name and the full tensor of A, (r, in), and of scaling * B, (out, r), of every adapted layer.

    Yields zeros for a layer without an adapter that SGLang fuses with an adapted layer.
    """
    for name, layer in layers.items():
        a, b = (_full(state[f"{name}.lora_{factor}.{ADAPTER}.weight"]) for factor in "AB")
        yield f"{name}.lora_A.weight", a
        yield f"{name}.lora_B.weight", b * layer.scaling[ADAPTER]
        for part in _missing_parts(name, layers):
            weight = state.get(f"{part}.weight")
            if weight is not None:  # else the model has no such layer
                yield f"{part}.lora_A.weight", torch.zeros_like(a)
                yield f"{part}.lora_B.weight", b.new_zeros(weight.shape[0], len(a))


def _missing_parts(name: str, layers: Iterable[str]) -> list[str]:
    """Return the layers without an adapter that SGLang fuses with ``name``, if it is the first adapted one among them.

    SGLang rejects an adapter for only part of ``qkv_proj``, and crashes on one for only part of ``gate_up_proj``.
    """
    parent, _, own = name.rpartition(".")
    group = next((group for group in FUSED.values() if own in group), (own,))
    parts = [f"{parent}.{part}" for part in group]
    first = next(part for part in parts if part in layers)
    return [part for part in parts if part not in layers] if name == first else []


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor; if it is sharded, gather it on the current device, which is a collective."""
    return tensor.to(get_device_id()).full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_mergeable(module: torch.nn.Module) -> None:
    """Raise ValueError unless only A and B of linear layers are trained, none of them tied to the embedding."""
    factors = tuple(f".lora_{factor}.{ADAPTER}.weight" for factor in "AB")
    others = [name for name, p in module.named_parameters() if p.requires_grad and not name.endswith(factors)]
    embedding = module.get_input_embeddings().weight
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            plain = isinstance(layer, Linear) and not layer.lora_variant
            if not plain or layer.get_base_layer().weight is embedding:
                others.append(name)
    if others:
        raise ValueError(
            f"this adapter cannot be merged into what the servers load: {', '.join(others[:5])} "
            f"({len(others)} in all); give actor_rollout_ref.model.target_modules linear layers by name, such as "
            "[q_proj,k_proj,v_proj,o_proj], and not the output layer of a model with tied embeddings; all-linear, the "
            "default, includes packed experts, which are no such layers"
        )


def _check_servable(module: torch.nn.Module) -> None:
    """Raise ValueError unless all adapted layers are in the decoder and have the same rank, as SGLang requires."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    outside = [name for name in layers if ".layers." not in name]
    ranks = {layer.r[ADAPTER] for layer in layers.values()}
    if outside or len(ranks) != 1:
        raise ValueError(
            "actor_rollout_ref.model.lora.merge=false with an adapter that SGLang cannot take alone: layers outside "
            f"the decoder {outside[:5]}, ranks {sorted(ranks)}; set lora.merge=true, or give other target_modules"
        )


# verl looks for an engine of the vendor before its own, which is registered by device only.
@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class AtroposFSDPEngine(ConfiguredOffload, ConfiguredOptimizer, CompactBatches, PushedWeights, FSDPEngineWithLMHead):
    """FSDP1 ("fsdp") and FSDP2 ("fsdp2") on NVIDIA GPUs."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUFSDPEngine(ConfiguredOptimizer, CompactBatches, PushedWeights, FSDPEngineWithLMHead):
    """FSDP1 ("fsdp") and FSDP2 ("fsdp2") over gloo. ``mixed_precision`` defaults to fp32 throughout."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        precision = {**_DEFAULT_PRECISION, **(self.engine_config.mixed_precision or {})}
        param_dtype, reduce_dtype, buffer_dtype = (
            PrecisionType.to_dtype(precision[key]) for key in ("param_dtype", "reduce_dtype", "buffer_dtype")
        )
        if param_dtype == torch.float16:
            raise ValueError("mixed_precision.param_dtype=fp16 needs a gradient scaler; on a CPU use fp32 or bf16")
        self._autocast_dtype = param_dtype
        self.scaler = None
        self._is_offload_param = self._is_offload_optimizer = False  # the weights are already in host memory

        if self.engine_config.strategy == "fsdp2":
            full_state = module.state_dict()
            policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=True)
            kwargs = {
                "mesh": self.device_mesh,
                "mp_policy": policy,
                "offload_policy": None,
                "reshard_after_forward": self.engine_config.reshard_after_forward,
            }
            apply_fsdp2(module, kwargs, self.engine_config)
            fsdp2_load_full_state_dict(module, full_state, self.device_mesh, None)
            return module

        _broadcast_from_rank0(module)
        wrapped = FSDP(
            module,
            auto_wrap_policy=get_fsdp_wrap_policy(
                module=module, config=self.engine_config.wrap_policy, is_lora=self.model_config.lora_rank > 0
            ),
            device_id=torch.device("cpu"),
            sharding_strategy=get_sharding_strategy(
                self.device_mesh, zero3_enable=self.engine_config.reshard_after_forward
            ),
            mixed_precision=MixedPrecision(
                param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype
            ),
            sync_module_states=False,
            device_mesh=self.device_mesh,
            use_orig_params=self.engine_config.use_orig_params,
        )
        # The same types as in verl, whose checkpoint manager and weight export expect them.
        if dist.get_world_size() == 1:
            FSDP.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, FullStateDictConfig())
        else:
            FSDP.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())
        return wrapped


def _broadcast_from_rank0(module: torch.nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0; verl builds the other ranks on the meta device."""
    if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        module.to_empty(device="cpu")
    for tensor in chain(module.parameters(), module.buffers()):
        dist.broadcast(tensor.data, src=0)
