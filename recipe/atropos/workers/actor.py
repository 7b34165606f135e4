"""Worker group through which the trainer calls the actor's FSDP ranks under Ray.

Guarantees:

- Each call has a timeout, after which ``RankTimeout`` names the ranks that did not respond; verl waits forever.
- If a rank exits or raises, the call fails at once with that rank's error.
- The reference policy runs in the same ranks: as the actor without its adapter, or as a second model.
"""

import math
import tempfile
import time
import uuid
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
import torch
from omegaconf import DictConfig
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from recipe.atropos.algorithm.mini_batches import micro_batch_size, update_actor, without_padding
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.fsdp_workers import AtroposActorWorker
from recipe.atropos.utils.hosts import cluster_address
from recipe.atropos.utils.private_process import is_loopback
from recipe.atropos.verl_ext.batch import DataProto, no_padding_2_padding
from recipe.atropos.verl_ext.batch import tensordict_utils as tu
from recipe.atropos.verl_ext.device import get_device_name
from recipe.atropos.verl_ext.ranks import (
    RayClassWithInitArgs,
    RayResourcePool,
    get_platform,
    need_reference_policy,
    sort_placement_group_by_node_ip,
)
from recipe.atropos.verl_ext.worker_group import LimitedWorkerGroup

# The parts of a batch that the ranks need; the rest stays on the driver.
_FORWARD_KEYS = ["prompts", "responses", "input_ids", "attention_mask", "response_mask"]
_FORWARD_KEYS += ["row_temperature"]  # if rows were sampled at different temperatures
_UPDATE_KEYS = ["old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights", "teacher_ids", "teacher_logprobs"]
_UPDATE_KEYS += ["trajectory_share"]  # if a trajectory has several rows
_RESERVE_SECONDS = 10.0  # for a Ray that no node joins to reserve what it has
_QUIET_SECONDS = 5.0  # of the wait for nodes


class DevicePool(RayResourcePool):
    """A CPU and, if the platform has one, an accelerator per rank; ``ranks`` lists the number of ranks on each node.

    verl requests three CPUs per rank, for worker groups that this trainer does not have, and waits without a timeout.

    ``grows``: nodes may join Ray meanwhile, and after 5 s a line says so; where they may not, 10 s suffice.

    Raises:
        ConfigurationError: Ray cannot place the ranks within ``timeout`` seconds.
    """

    def __init__(self, ranks: list[int], name: str, timeout: float, grows: bool):
        super().__init__(ranks, use_gpu=True, name_prefix=name, max_colocate_count=1)
        self.timeout, self._grows = timeout if grows else min(timeout, _RESERVE_SECONDS), grows
        self._wanted = f"trainer.nnodes={len(ranks)} with trainer.n_gpus_per_node={ranks[0]}"
        self.pgs = self._reserve()

    def _reserve(self) -> list[PlacementGroup]:
        bundle = {"CPU": 1, get_platform().ray_resource_name(): 1}
        groups = [
            placement_group([bundle] * ranks, strategy="STRICT_PACK", name=f"{self.name_prefix}{node}")
            for node, ranks in enumerate(self.store)
        ]
        begun, told = time.monotonic(), _QUIET_SECONDS
        # A call of ``wait`` cannot be interrupted.
        while not (found := all(group.wait(1) for group in groups)) and time.monotonic() < begun + self.timeout:
            if self._grows and time.monotonic() > begun + told:
                told = math.inf
                print(f"{self._wanted} waits at most {self.timeout:g} s for nodes; {_free(bundle)}", flush=True)
        if found:
            return sort_placement_group_by_node_ip(groups)
        for group in groups:
            remove_placement_group(group)
        raise ConfigurationError(
            f"{self._wanted}: Ray found no room for all ranks of a node on one within {self.timeout:g} s; "
            f"{_free(bundle)}; lower them, or give nodes more CPUs (ray_kwargs.ray_init.num_cpus, if Ray is started "
            "here)"
        )

    def check_reach(self, urls: list[str]) -> None:
        """Raise ConfigurationError if a server is at this machine's loopback, and rank 0 pushes from another one."""
        own, number = ray.util.get_node_ip_address(), placement_group_table(self.pgs[0])["bundles_to_node_id"][0]
        [node] = [each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == number]
        if node != own and (local := [url for url in urls if is_loopback(urlsplit(url).hostname or "")]):
            raise ConfigurationError(
                f"{local[0]}: the trainer's rank 0, which pushes the weights, is on node {node} and does not reach "
                f"this machine there: set inference.host={own} (in inference.urls, give that address)"
            )


class ActorGroup(LimitedWorkerGroup):
    """The ranks that ``config`` requests, with the model loaded.

    Raises:
        ConfigurationError: Ray lacks the resources for them, or rank 0 cannot reach the servers.
        RankTimeout: the model was not loaded in time.
    """

    def __init__(self, config: DictConfig):
        self.settings = settings = config.actor_rollout_ref
        settings.rollout.checkpoint_engine.engine_kwargs = {"atropos": engine_settings(config)}
        has_adapter = settings.model.lora_rank > 0 or settings.model.get("lora_adapter_path") is not None
        self.computes_reference = need_reference_policy(config)
        self._has_second_model = self.computes_reference and not has_adapter
        trainer = config.trainer
        self.pool = DevicePool(
            [trainer.n_gpus_per_node] * trainer.nnodes,
            # Placement group names are shared by all jobs of a Ray cluster.
            name=f"{config.run.name}_{uuid.uuid4().hex[:8]}_",
            timeout=trainer.ray_wait_register_center_timeout,
            grows=cluster_address(config.ray_kwargs.ray_init) is not None,
        )
        self.pool.check_reach(config.inference.urls)
        super().__init__(
            self.pool,
            RayClassWithInitArgs(
                cls=ray.remote(AtroposActorWorker),
                config=settings,
                role="actor_ref" if self._has_second_model else "actor",
                distillation=trainer.atropos.distillation,
            ),
            ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
            device_name=get_device_name(),
            limit=trainer.atropos.step_timeout,
        )
        self.init_model()

    def check_shared(self, folder: Path) -> None:
        """Check that all ranks see ``folder`` as this process does: each reads what this one writes, and answers there.

        Raises:
            ConfigurationError: names the nodes that have another folder of that name, or none.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".shared-") as probe:
            nodes = self.answer_in(probe)
            apart = sorted({node for rank, node in enumerate(nodes) if not Path(probe, str(rank)).exists()})
        if apart:
            raise ConfigurationError(
                f"trainer.default_local_dir={folder} is not one folder for this machine and {', '.join(apart)}, so no "
                "checkpoint would be whole: mount a shared file system there on every node, or set run.dir to one"
            )

    def data_parallel_size(self, mesh: str = "actor") -> int:
        """Return the data-parallel size (each sequence-parallel group is 1) of "actor", or of a second model, "ref"."""
        if mesh not in self._dispatch_info:
            self._dispatch_info[mesh] = self._query_dispatch_info(mesh)
        return max(self._dispatch_info[mesh]) + 1

    @property
    def rows_multiple(self) -> int:
        """Number that must divide each rank's row count; a second model may have more data-parallel ranks."""
        multiple, ranks = micro_batch_size(self.settings), self.data_parallel_size()
        others = self.data_parallel_size("ref") if self._has_second_model else ranks
        return math.lcm(ranks * multiple, others * multiple) // ranks

    def log_probs(self, batch: DataProto) -> tuple[dict[str, torch.Tensor], float]:
        """Return the policy's ``old_log_probs`` and ``entropys`` of the responses, (B, R) float32, and the MFU.

        With ``actor.calculate_sum_pi_squared``, also return ``sum_pi_squared``, which some estimators need.
        """
        names = {"old_log_probs": "log_probs", "entropys": "entropy"}
        if squared := bool(self.settings.actor.get("calculate_sum_pi_squared", False)):
            names["sum_pi_squared"] = "sum_pi_squared"
        data = _without_padding(batch, calculate_entropy=True, calculate_sum_pi_squared=squared)
        output = self.compute_log_prob(data)
        found = {name: _padded(output, key, data) for name, key in names.items()}
        return found, tu.get(output, "metrics")["mfu"]

    def reference_log_probs(self, batch: DataProto) -> torch.Tensor:
        """Return the reference policy's logprobs of the responses, (B, R) float32."""
        data = _without_padding(batch, calculate_entropy=False)
        tu.assign_non_tensor(data, no_lora_adapter=not self._has_second_model)
        compute = self.compute_ref_log_prob if self._has_second_model else self.compute_log_prob
        return _padded(compute(data), "log_probs", data)

    def save(self, folder: Path, step: int) -> dict[str, str]:
        """Save the ranks' part of the checkpoint ``folder``; return the digests of their files, by name in it."""
        return dict(ChainMap(*self.save_checkpoint(str(folder / "actor"), None, step)))

    def update(self, batch: DataProto, learned: torch.Tensor, meanwhile: Callable[[], object]) -> dict[str, Any]:
        """Run the optimizer steps of one batch; return metrics for verl's ``reduce_metrics``. See ``mini_batches``.

        ``learned``, (B,) bool, are the rows that the loss depends on. ``meanwhile`` is called while the ranks work.
        """
        self.meanwhile.append(meanwhile)
        return update_actor(
            self,
            _select(batch, _FORWARD_KEYS + _UPDATE_KEYS),
            learned,
            self.settings.actor,
            mini_batches=batch.meta_info.get("mini_batches", 1),
            ranks=self.data_parallel_size(),
        )


def _free(bundle: dict[str, int]) -> str:
    free = [{key: node.get(key, 0) for key in bundle} for node in available_resources_per_node().values()]
    return f"each rank takes {bundle}, free are {free}"


def _without_padding(batch: DataProto, **options: bool) -> Any:
    data = without_padding(_select(batch, _FORWARD_KEYS))
    tu.assign_non_tensor(data, compute_loss=False, **options)
    return data


def _padded(output: Any, key: str, data: Any) -> torch.Tensor:
    return no_padding_2_padding(tu.get(output, key), data).float()


def _select(batch: DataProto, keys: list[str]) -> DataProto:
    return batch.select(batch_keys=[key for key in keys if key in batch.batch], non_tensor_batch_keys=[])


def engine_settings(config: DictConfig) -> dict[str, Any]:
    """Return the settings of the ranks' ``AtroposCheckpointEngine``, by the names of its parameters."""
    inference, model, settings = config.inference, config.actor_rollout_ref.model, config.trainer.atropos.weight_sync
    return {
        **{name: settings[name] for name in ("transport", "directory", "pause_mode", "verify", "timeout")},
        "urls": list(inference.urls),
        "colocated": inference.colocated,
        "api_key": inference.api_key,
        "dtype": inference.dtype,
        "model_path": model.path,
        "trust_remote_code": model.trust_remote_code,
        "lora_rank": model.lora_rank,
        "lora_merge": model.lora.merge,
    }
