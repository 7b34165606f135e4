"""verl's worker groups under Ray."""

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import sort_placement_group_by_node_ip
from verl.trainer.ppo.utils import need_reference_policy
