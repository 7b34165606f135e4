"""A plain BaseEnv whose every group is sent: ``item_env.py:ItemEnv`` as the adapter's target.

Item n has the prompt "item n" and answers of 8 tokens, which score 0 and 1 in turn. ``evaluate`` samples 4 fixed items
greedily and says what it found in one of the ways that environments have.
"""

import asyncio

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field


class ItemEnvConfig(BaseEnvConfig):
    says: str = Field("log", description="How evaluate says what it found: log, attribute, return, nothing or never")
    slow: float = Field(0.0, description="Seconds that evaluate takes at least")
    no_registration: bool = Field(False, description="Whether setup never ends")


class ItemEnv(BaseEnv):
    name = "item"
    env_config_cls = ItemEnvConfig

    @classmethod
    def config_init(cls):
        server = APIServerConfig(
            model_name="m", base_url="http://127.0.0.1:1/v1", api_key="x", server_type="sglang", health_check=False
        )
        return ItemEnvConfig(use_wandb=False, wandb_name="its own", min_batch_allocation=0.9), [server]

    async def setup(self):
        self.number = 0
        if self.config.no_registration:
            await asyncio.sleep(1000)

    async def answer(self, number, max_tokens=8, **sampling):
        prompt, outputs, logprobs, _ = await self.server.tokens_and_logprobs_completion(
            prompt=f"item {number}", max_tokens=max_tokens, ignore_eos=True, **sampling
        )
        return prompt, outputs, logprobs

    async def evaluate(self, *args, **kwargs):
        if self.config.says == "never":
            raise NotImplementedError
        outputs = [(await self.answer(number, n=1, temperature=0.0))[1][0] for number in range(4)]
        await asyncio.sleep(self.config.slow)
        metrics = {"eval/spread": len(set(map(tuple, outputs))) / 4, "eval/total": 4}
        if self.config.says == "log":
            samples = [{"item": number, "output": output} for number, output in enumerate(outputs)]
            await self.evaluate_log(metrics=metrics, samples=samples)
        elif self.config.says == "attribute":
            self.eval_metrics = list(metrics.items())
        elif self.config.says == "return":
            return metrics

    async def get_next_item(self):
        self.number += 1
        return {"number": self.number - 1}

    async def collect_trajectories(self, item):
        size = self.config.group_size
        prompt, outputs, logprobs = await self.answer(item["number"], n=size, temperature=1.0)
        masked = [-100] * len(prompt)
        group = ScoredDataGroup(
            tokens=[prompt + output for output in outputs],
            masks=[masked + output for output in outputs],
            inference_logprobs=[[1.0] * len(prompt) + values for values in logprobs],
            scores=[float(i % 2) for i in range(size)],
            group_overrides={},
        )
        return group, []


if __name__ == "__main__":
    ItemEnv.cli()
