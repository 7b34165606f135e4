"""An environment whose answers take very different times: ``python length_env.py serve --env.KEY=VALUE ...``

Item n has the prompt "item n" and answers of exactly ``answer_length(n)`` tokens: one item in four is long.
"""

from pathlib import Path

from pydantic import Field

from helpers.environments.item_env import ItemEnv, ItemEnvConfig
from recipe.atropos.adapter.cli import adapt

SHORT, LONG = 8, 160


def answer_length(number: int) -> int:
    return LONG if number % 4 == 0 else SHORT


class LengthEnvConfig(ItemEnvConfig):
    cancelled_path: str = Field("", description="A line for each item whose sampling was cancelled")


class LengthEnv(ItemEnv):
    name = "length"
    env_config_cls = LengthEnvConfig

    @classmethod
    def config_init(cls):
        return LengthEnvConfig(use_wandb=False, wandb_name=cls.name), super().config_init()[1]

    async def evaluate(self, *args, **kwargs):
        pass

    async def answer(self, number, **sampling):
        try:
            return await super().answer(number, max_tokens=answer_length(number), **sampling)
        except BaseException:
            with Path(self.config.cancelled_path).open("a") as file:
                file.write(f"{number}\n")
            raise


if __name__ == "__main__":
    adapt(LengthEnv).cli()
