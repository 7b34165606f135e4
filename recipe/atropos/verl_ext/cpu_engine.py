"""verl's FSDP engine for the platform "cpu", registered under device "cpu" on import.

Only the wrapping is specific to CPUs: there is nothing to offload to, and FSDP1's ``sync_module_states`` rejects CPU
parameters, so rank 0's weights are broadcast here. ``PushedWeights`` and ``RowTemperature`` do not depend on the
platform.
"""

from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from verl.utils.fsdp_utils import (
    MixedPrecisionPolicy,
    apply_fsdp2,
    fsdp2_load_full_state_dict,
    get_fsdp_wrap_policy,
)
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import get_sharding_strategy

from recipe.atropos.verl_ext.engines import PushedWeights, RowTemperature

# fp16 underflows without gradient scaling, which needs an accelerator; a CPU runs fp32, or bf16 slowly.
_DEFAULT_PRECISION = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUFSDPEngine(RowTemperature, PushedWeights, FSDPEngineWithLMHead):
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
