"""An environment with a fault that no error ends: each of its items raises, or has equal scores, or never ends."""

import asyncio
from typing import Literal

from pydantic import Field

from helpers.environments.item_env import ItemEnv, ItemEnvConfig

LAST = 6  # item that ends, of an environment that falls silent


class AlarmEnvConfig(ItemEnvConfig):
    fault: Literal["none", "raises", "equal", "silent"] = Field("none", description="What becomes of its items")


class AlarmEnv(ItemEnv):
    env_config_cls = AlarmEnvConfig

    @classmethod
    def config_init(cls):
        return AlarmEnvConfig(use_wandb=False, wandb_name="its own"), super().config_init()[1]

    async def collect_trajectories(self, item):
        if self.config.fault == "raises":
            raise ValueError(f"no answer for item {item['number']}")
        if self.config.fault == "silent" and item["number"] > LAST:
            await asyncio.sleep(1000)
        group, backlog = await super().collect_trajectories(item)
        if self.config.fault == "equal":
            group["scores"] = [1.0] * len(group["scores"])
        return group, backlog
