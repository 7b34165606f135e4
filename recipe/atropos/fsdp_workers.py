"""verl's workers for this recipe: an actor, together with the reference policy if one is needed.

Three things differ from verl's ``ActorRolloutRefWorker``: there is no rollout engine in the process (SGLang runs behind
HTTP), padding rows do not count as sequences in the loss, and the loss can include a distillation term. Weights are
pushed through the checkpoint engine of ``weight_sync``.
"""

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict

import recipe.atropos.verl_ext.engines  # noqa: F401  (registers the engines)
from recipe.atropos.algorithm.losses import atropos_loss
from recipe.atropos.checkpoint.shards import tensors_only
from recipe.atropos.checkpoint.store import digests_of, verify
from recipe.atropos.utils.hosts import interface_variables
from recipe.atropos.utils.private_process import bind_rendezvous, is_loopback
from recipe.atropos.verl_ext.batch import tensordict_utils as tu
from recipe.atropos.verl_ext.device import get_device_id, get_device_name, get_torch_device
from recipe.atropos.verl_ext.worker import (
    ActorRolloutRefWorker,
    Dispatch,
    TrainingWorker,
    aggressive_empty_cache,
    initialize_global_process_group_ray,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class AtroposTrainingWorker(TrainingWorker):
    """Training worker that divides sequence-mean losses by the trained trajectories, not the configured batch size."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        trained = (data["response_mask"].sum(dim=-1) > 0).sum()
        trained = data.get("trajectory_share", trained).sum().to(get_device_id())  # of a trajectory's rows, 1 in all
        torch.distributed.all_reduce(trained, group=self.engine.get_data_parallel_group())
        tu.assign_non_tensor(data, global_batch_size=max(1, round(trained.item())))
        tu.assign_non_tensor(data, distillation_use_topk="teacher_ids" in data)  # the engine then requests the KL
        return super().train_batch(data)


class AtroposActorWorker(ActorRolloutRefWorker):
    """Actor (role "actor") or actor and reference policy in one process (role "actor_ref")."""

    actor_worker_cls = AtroposTrainingWorker

    def __init__(self, config: DictConfig, role: str, distillation: DictConfig, **kwargs: Any):
        # verl's check does not allow an actor with a reference but no rollout; init_model reads only self.role.
        super().__init__(config, "actor", **kwargs)
        self.role = role
        self._is_ref = role == "actor_ref"
        self.distillation = distillation

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        bind_rendezvous()
        if not is_loopback(own := ray.util.get_node_ip_address()):
            os.environ |= interface_variables(own)
        if get_device_name() == "cpu":
            # verl would name the device twice ("cpu:gloo,cpu:gloo"), but it keeps an existing process group.
            initialize_global_process_group_ray(backend="gloo")
        super().init_model()
        self.actor.set_loss_fn(partial(atropos_loss, **self.loss_fn.keywords, distillation=self.distillation))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answer_in(self, folder: str) -> str:
        """Write a file named as this rank into ``folder``, if that exists here; return the node's address."""
        with contextlib.suppress(OSError):
            Path(folder, str(self.rank)).touch()
        return ray.util.get_node_ip_address()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, *args: Any) -> dict[str, str]:
        """Save this rank's part of a checkpoint to ``local_path``, its ``actor/``; return the digests of its files."""
        torch.serialization.set_crc32_options(False)  # takes half of torch.save's time, and torch.load never looks
        super().save_checkpoint(local_path, *args)
        return digests_of(Path(local_path).parent, self._own_files)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load this rank's part of a checkpoint; no code that it holds is run.

        Raises:
            CheckpointDamaged, ShardsError: a file of this rank is not as it was saved, or holds more than tensors.
        """
        verify(Path(local_path).parent, self._own_files)
        with tensors_only(Path(local_path)):
            super().load_checkpoint(local_path, *args, **kwargs)

    @property
    def _own_files(self) -> str:
        return f"actor/*_rank_{self.rank}.pt"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_weight_names(self) -> None:
        """Compare names and shapes of the tensors that will be pushed with the model's checkpoint; gathers nothing.

        Raises:
            WeightNamesError, CheckpointError: they differ, or the checkpoint cannot be read.
        """
        if not self.actor.engine.adapter_only:
            self.checkpoint_engine.expect(self.actor.engine.checkpoint_format)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, urls: list[str], adapter: str | None = None) -> dict[str, float]:
        """Push the weights to the servers of ``urls``; see ``AtroposCheckpointEngine.send_weights``."""
        weights, _ = self.actor.engine.get_per_tensor_param()
        return await self.checkpoint_engine.send_weights(weights, global_steps, urls, adapter)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty_cache(self) -> None:
        """Release the GPU memory that torch has cached, for a server on the same GPU."""
        get_torch_device().ipc_collect()  # memory shared with servers, which have read it
        aggressive_empty_cache(force_sync=True)
