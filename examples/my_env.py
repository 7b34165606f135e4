"""A first environment: the policy repeats a word. docs/first-environment.md walks through it.

python -m recipe.atropos train --model MODEL environment.target=examples/my_env.py
"""

import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

WORDS = ("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket")


class RepeatConfig(BaseEnvConfig):
    answer_tokens: int = Field(16, gt=0, description="Tokens of an answer, at most")


class RepeatEnv(BaseEnv):
    name = "repeat"
    env_config_cls = RepeatConfig

    @classmethod
    def config_init(cls) -> tuple[RepeatConfig, list[APIServerConfig]]:
        """Return defaults; the launcher sets model, addresses, key and sizes."""
        return RepeatConfig(wandb_name="repeat"), [APIServerConfig(server_type="sglang")]

    async def setup(self) -> None:
        """Load data, once."""
        self.random = random.Random(0)

    async def get_next_item(self) -> str:
        """Return the next problem to roll out."""
        return self.random.choice(WORDS)

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[Any]]:
        """Return one scored group for a problem, and problems to try again (none)."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=self.messages(item), n=self.config.group_size, max_tokens=self.config.answer_tokens
            )
            nodes = managed.get_state()["nodes"]  # one for each answer, with what was sampled
        group = ScoredDataGroup()
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        group["scores"] = [self.score(item, self.answer(node.masked_tokens)) for node in nodes]
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log held-out metrics of greedy answers; here over all words."""
        scores = []
        for word in WORDS:
            reply = await self.server.chat_completion(
                messages=self.messages(word), n=1, max_tokens=self.config.answer_tokens, temperature=0.0, split="eval"
            )
            scores.append(self.score(word, reply.choices[0].message.content))
        await self.evaluate_log(metrics={"eval/mean_score": sum(scores) / len(scores), "eval/total": len(scores)})

    def messages(self, word: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Repeat this word: {word}"}]

    def answer(self, masked_tokens: list[int]) -> str:
        """Decode the trained tokens: those that the mask does not hide (-100)."""
        return self.tokenizer.decode([token for token in masked_tokens if token != -100], skip_special_tokens=True)

    @staticmethod
    def score(word: str, answer: str) -> float:
        """Return the share of the word's letters in the answer, minus a little for each character too many."""
        found = sum(letter in answer for letter in set(word)) / len(set(word))
        return found - 0.01 * max(0, len(answer) - len(word))
