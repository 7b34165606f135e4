"""What the trainer's ranks take of Ray's resources."""

from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
from verl.single_controller.ray.base import sort_placement_group_by_node_ip

from recipe.atropos.errors import ConfigurationError


@dataclass
class DevicePoolManager(ResourcePoolManager):
    """A CPU and, where the platform has one, an accelerator for each rank, waited for ``timeout`` seconds at most.

    verl asks for three CPUs a rank, for worker groups that this trainer does not have, and waits without a limit.
    """

    max_colocate_count: int = 1
    timeout: float = 300.0

    def create_resource_pool(self) -> None:
        """Raises ConfigurationError: Ray has no room for the ranks."""
        super().create_resource_pool()
        for pool in self.resource_pool_dict.values():
            pool.pgs = self._reserve(pool)

    def _check_resource_available(self) -> None:
        resource = get_platform().ray_resource_name()
        wanted, available = self.get_n_gpus(), int(ray.available_resources().get(resource, 0))
        if available < wanted:
            more = "raise ray_kwargs.ray_init.num_cpus" if resource == "CPU" else "set trainer.device=cpu"
            raise ConfigurationError(
                f"trainer.nnodes * trainer.n_gpus_per_node = {wanted} ranks, but Ray has {available} {resource}s free; "
                f"lower them or {more}"
            )

    def _reserve(self, pool: RayResourcePool) -> list[PlacementGroup]:
        bundle = {"CPU": 1, get_platform().ray_resource_name(): 1}
        groups = [
            placement_group([bundle] * ranks, strategy="STRICT_PACK", name=f"{pool.name_prefix}{node}")
            for node, ranks in enumerate(pool.store)
        ]
        ready, _ = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=self.timeout)
        if len(ready) == len(groups):
            return sort_placement_group_by_node_ip(groups)
        for group in groups:
            remove_placement_group(group)
        free = [{key: node.get(key, 0) for key in bundle} for node in available_resources_per_node().values()]
        raise ConfigurationError(
            f"trainer.nnodes={len(pool.store)} with trainer.n_gpus_per_node={pool.store[0]}: Ray found no room for all "
            f"ranks of a node on one within {self.timeout:g} s; each takes {bundle}, free are {free}; lower them, or "
            "give the cluster's nodes more CPUs"
        )
