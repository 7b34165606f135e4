"""Environment for checks with random models: scores an answer's share of even token ids, which any policy can change.

A plain ``BaseEnv``, which the launcher adapts. A model with a chat template is prompted with messages, any other with
a plain prompt.
"""

from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

from recipe.atropos.adapter.restore import group_of_nodes


class EvenTokensEnvConfig(BaseEnvConfig):
    question_characters: int = Field(12, gt=0, description="Of each question: of a byte tokenizer so many tokens")
    answer_tokens: int = Field(24, gt=0, description="Of each answer; it does not end earlier")


class EvenTokensEnv(BaseEnv):
    name = "even_tokens"
    env_config_cls = EvenTokensEnvConfig

    @classmethod
    def config_init(cls) -> tuple[EvenTokensEnvConfig, list[APIServerConfig]]:
        return cls.env_config_cls(wandb_name=cls.name, steps_per_eval=0), [APIServerConfig(server_type="sglang")]

    async def setup(self) -> None:
        self.count = 0

    async def get_next_item(self) -> str:
        self.count += 1
        length = self.config.question_characters
        return (f"{self.count} and {self.count % 7}? " * length)[:length]

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[Any]]:
        sampling = {
            "n": self.config.group_size,
            "max_tokens": self.config.answer_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            if self.tokenizer.chat_template:
                await managed.chat_completion(messages=[{"role": "user", "content": item}], **sampling)
            else:
                await managed.completion(prompt=item, **sampling)
            nodes = managed.get_state()["nodes"]
        answers = [[token for token in node.masked_tokens if token != -100] for node in nodes]
        scores = [sum(token % 2 == 0 for token in answer) / len(answer) for answer in answers]
        return group_of_nodes(nodes, scores), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass
