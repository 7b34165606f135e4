"""verl's utilities for the driver: configuration, trackers, timers."""

from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.debug import marked_timer
from verl.utils.tracking import Tracking
