"""An environment that says with which configuration it was started, and ends."""

import json
import os

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ServerBaseline


class SaidEnv(BaseEnv):
    name = "said"

    @classmethod
    def config_init(cls):
        """``SERVERS`` says in which of the forms that environments use."""
        model = os.environ["MODEL"]
        common = {"model_name": model, "api_key": "x", "timeout": 77}
        first, second = (APIServerConfig(**common, base_url=f"http://{name}:1/v1") for name in ("first", "second"))
        servers = {
            "one": first,
            "list": [first],
            "two": [first, second],
            "baseline": ServerBaseline(model_name=model, timeout=77),
        }
        return BaseEnvConfig(tokenizer_name=model, use_wandb=False), servers[os.environ.get("SERVERS", "one")]

    async def setup(self):
        if os.environ.get("FAIL"):
            raise FileNotFoundError("no dataset at /data/nowhere")

    async def get_next_item(self):
        return {}

    async def evaluate(self, *args, **kwargs):
        self._say()

    async def env_manager(self):
        await self.setup()
        self._say()

    async def process_manager(self):
        await self.setup()
        self._say()

    def _say(self):
        servers = [server.config.model_dump() for server in self.server.servers]
        kind = type(self.server.servers[0]).__name__
        said = {"config": self.config.model_dump(mode="json"), "servers": servers, "kind": kind}
        print("SAID", json.dumps(said), flush=True)
