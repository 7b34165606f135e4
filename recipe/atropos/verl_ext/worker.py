"""verl's workers, and the decorators with which the driver calls their methods."""

from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
