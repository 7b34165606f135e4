"""An environment whose answers take very different times: ``python length_env.py serve --env.KEY=VALUE ...``

Item n has the prompt "item n" and answers of exactly ``answer_length(n)`` tokens: one item in four is long.
"""

from pathlib import Path

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

from recipe.atropos.adapter.cli import adapt

SHORT, LONG = 8, 160


def answer_length(number: int) -> int:
    return LONG if number % 4 == 0 else SHORT


class LengthEnvConfig(BaseEnvConfig):
    cancelled_path: str = Field("", description="A line for each item whose sampling was cancelled")


class LengthEnv(BaseEnv):
    name = "length"
    env_config_cls = LengthEnvConfig

    @classmethod
    def config_init(cls):
        server = APIServerConfig(
            model_name="m", base_url="http://127.0.0.1:1/v1", api_key="x", server_type="sglang", health_check=False
        )
        return LengthEnvConfig(use_wandb=False, wandb_name=cls.name), [server]

    async def setup(self):
        self.number = 0

    async def evaluate(self, *args, **kwargs):
        pass

    async def get_next_item(self):
        self.number += 1
        return {"number": self.number - 1}

    async def collect_trajectories(self, item):
        try:
            prompt, outputs, logprobs, _ = await self.server.tokens_and_logprobs_completion(
                prompt=f"item {item['number']}",
                n=self.config.group_size,
                max_tokens=answer_length(item["number"]),
                temperature=1.0,
                ignore_eos=True,
            )
        except BaseException:
            with Path(self.config.cancelled_path).open("a") as file:
                file.write(f"{item['number']}\n")
            raise
        masked = [-100] * len(prompt)
        return (
            ScoredDataGroup(
                tokens=[prompt + output for output in outputs],
                masks=[masked + output for output in outputs],
                inference_logprobs=[[1.0] * len(prompt) + values for values in logprobs],
                scores=[float(i % 2) for i in range(len(outputs))],
                group_overrides={},
            ),
            [],
        )


if __name__ == "__main__":
    adapt(LengthEnv).cli()
