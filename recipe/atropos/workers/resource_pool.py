"""Ray resources of the trainer's ranks."""

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.verl_ext.ranks import RayResourcePool, get_platform, sort_placement_group_by_node_ip


class DevicePool(RayResourcePool):
    """A CPU and, if the platform has one, an accelerator per rank; ``ranks`` lists the number of ranks on each node.

    verl requests three CPUs per rank, for worker groups that this trainer does not have, and waits without a timeout.

    Raises:
        ConfigurationError: Ray cannot place the ranks within ``timeout`` seconds.
    """

    def __init__(self, ranks: list[int], name: str, timeout: float):
        super().__init__(ranks, use_gpu=True, name_prefix=name, max_colocate_count=1)
        self.timeout = timeout
        self._check_available()
        self.pgs = self._reserve()

    def _check_available(self) -> None:
        resource = get_platform().ray_resource_name()
        wanted, available = sum(self.store), int(ray.available_resources().get(resource, 0))
        if available < wanted:
            more = "raise ray_kwargs.ray_init.num_cpus" if resource == "CPU" else "set trainer.device=cpu"
            raise ConfigurationError(
                f"trainer.nnodes * trainer.n_gpus_per_node = {wanted} ranks, but Ray has {available} {resource}s free; "
                f"lower them or {more}"
            )

    def _reserve(self) -> list[PlacementGroup]:
        bundle = {"CPU": 1, get_platform().ray_resource_name(): 1}
        groups = [
            placement_group([bundle] * ranks, strategy="STRICT_PACK", name=f"{self.name_prefix}{node}")
            for node, ranks in enumerate(self.store)
        ]
        ready, _ = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=self.timeout)
        if len(ready) == len(groups):
            return sort_placement_group_by_node_ip(groups)
        for group in groups:
            remove_placement_group(group)
        free = [{key: node.get(key, 0) for key in bundle} for node in available_resources_per_node().values()]
        raise ConfigurationError(
            f"trainer.nnodes={len(self.store)} with trainer.n_gpus_per_node={self.store[0]}: Ray found no room for all "
            f"ranks of a node on one within {self.timeout:g} s; each takes {bundle}, free are {free}; lower them, or "
            "give the cluster's nodes more CPUs"
        )
