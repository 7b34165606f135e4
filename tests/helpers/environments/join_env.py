"""A stock environment: atroposlib's BaseEnv and its own command line, nothing of this recipe.

Half of a group scores 1, the other half -1, so that every group is sent. A list of one server: it reads ``--openai``.
"""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class StockEnv(BaseEnv):
    name = "stock"

    @classmethod
    def config_init(cls):
        env_config = BaseEnvConfig(tokenizer_name="no/such-model", group_size=4, steps_per_eval=0, wandb_name="stock")
        server = APIServerConfig(model_name="no/such-model", base_url="http://localhost:9004/v1", api_key="x")
        return env_config, [server]

    async def setup(self):
        self.count = 0

    async def get_next_item(self):
        self.count += 1
        return {"question": f"{self.count} and {self.count % 7}?"}

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=item["question"], n=self.config.group_size, max_tokens=8, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup()
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        group["scores"] = [1.0 if i % 2 else -1.0 for i in range(len(nodes))]
        return group, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    StockEnv.cli()
