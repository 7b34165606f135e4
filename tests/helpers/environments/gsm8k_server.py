r"""An environment of the shape of Atropos' own gsm8k_server, for a policy that writes ``\boxed{NUMBER}``.

One server configuration of no server type, GSM8K from the hub, the managed server, numpy's scores, no overrides.
"""

import numpy as np
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from datasets import load_dataset


class GSM8kEnv(BaseEnv):
    name = "gsm8k"

    @classmethod
    def config_init(cls):
        env_config = BaseEnvConfig(tokenizer_name="no/such-model", group_size=8, total_steps=1000, wandb_name="gsm8k")
        server = APIServerConfig(model_name="no/such-model", base_url="http://localhost:9001/v1", api_key="x")
        return env_config, server

    async def setup(self):
        self.train = load_dataset("gsm8k", "main", split="train").shuffle(seed=42)
        self.test = load_dataset("gsm8k", "main", split="test")
        self.iter = 0

    async def get_next_item(self):
        self.iter += 1
        return self.train[self.iter % len(self.train)]

    async def answers(self, item, n):
        """(text, node) of n answers."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completions = await managed.chat_completion(
                messages=[{"role": "user", "content": item["question"]}], n=n, max_tokens=50, temperature=1.0
            )
            texts = [choice.message.content for choice in completions.choices]
            return list(zip(texts, managed.get_state()["nodes"], strict=True))

    @staticmethod
    def right(text, item):
        return rf"\boxed{{{item['answer'].split('#')[-1].strip()}}}" in text

    async def collect_trajectories(self, item):
        found = await self.answers(item, self.config.group_size)
        group = ScoredDataGroup()
        group["tokens"] = [node.tokens for _, node in found]
        group["masks"] = [node.masked_tokens for _, node in found]
        group["inference_logprobs"] = [node.logprobs for _, node in found]
        group["scores"] = [np.float32(1 if self.right(text, item) else -1) for text, _ in found]
        return group, []

    async def evaluate(self, *args, **kwargs):
        right = [self.right((await self.answers(item, 1))[0][0], item) for item in self.test]
        metrics = {"eval/percent_correct": sum(right) / len(right)}
        await self.evaluate_log(metrics=metrics, samples=[{"correct": correct} for correct in right])
