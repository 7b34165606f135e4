"""An environment of several turns: guess a number that only "higher" and "lower" tell.

``way`` is how it calls its server, ``mood`` what becomes of it. Its items come from a counter, as those of most
environments do; `SeededGuessEnv` draws them by a seed of its own.
"""

import asyncio
import random
from typing import Any, Literal

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

RULES = "Guess my number. I say higher or lower."
TURNS = 4


class GuessEnvConfig(BaseEnvConfig):
    way: Literal["managed", "chat", "completion", "tokens"] = "managed"
    mood: str = ""
    max_tokens: int | None = 16
    stop: list[str] = Field(default_factory=list)


class GuessEnv(BaseEnv):
    name = "guess"
    env_config_cls = GuessEnvConfig

    def __init__(self, config, server_configs, slurm=True, testing=False):  # as upstream's gsm8k_server has it
        super().__init__(config, server_configs, slurm, testing)

    @classmethod
    def config_init(cls):
        return cls.env_config_cls(wandb_name=cls.name), APIServerConfig(server_type="sglang")

    async def setup(self):
        self.number = self.cancelled = self.cleaned = 0
        self.released = False
        if self.config.mood == "slow setup":
            await asyncio.sleep(60)
        if self.config.mood == "asks in setup":
            await self.server.chat_completion(messages=[{"role": "user", "content": "hi"}])

    async def evaluate(self, *args, **kwargs):
        pass

    async def get_next_item(self):
        self.number += 1
        if self.config.mood == "no item":
            return None
        return {"number": self.number}

    async def collect_trajectories(self, item):
        if self.config.mood == "asks nothing" or (self.config.mood == "skips odd" and item["number"] % 2):
            return None, []
        groups, backlog = await super().collect_trajectories(item)
        if self.config.mood == "drops equal":
            made = ScoredDataGroup()
            made.update(groups)
            return (None if len(set(groups["scores"])) == 1 else made), backlog
        if self.config.mood == "never scores" or (self.config.mood == "scores once" and item["number"] > 1):
            return None, backlog
        if self.config.mood == "too many scores":
            groups["scores"] = [1.0, 2.0]
        if self.config.mood == "own advantages":
            groups["advantages"] = [[0.5] * len(tokens) for tokens in groups["tokens"]]
        if self.config.mood == "list of groups":
            return [groups, None, groups | {"scores": [3.0]}], backlog
        if self.config.mood == "comes back" and item["number"] == 1:
            return groups, [{"number": 12}]
        return groups, backlog

    async def postprocess_histories(self, trajectories):
        if self.config.mood == "scores later":
            trajectories["scores"] = [10 * score for score in trajectories["scores"]]
        return trajectories

    async def cleanup(self):
        self.cleaned += 1

    async def collect_trajectory(self, item):
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "Begin."}]
        if self.config.mood == "few shots":
            messages[1:1] = [{"role": "user", "content": "Example."}, {"role": "assistant", "content": "8"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            try:
                if self.config.mood == "impatient":
                    return await asyncio.wait_for(self._play(item, messages, managed), 0.2)
                if self.config.mood == "waits for its calls":
                    play = asyncio.create_task(self._play(item, messages, managed))
                    try:
                        await asyncio.wait([play])
                    finally:
                        await asyncio.wait([play])
                return await self._play(item, messages, managed)
            except TimeoutError:
                return {"tokens": [1, 2], "masks": [-100, 2], "scores": -1.0}, []
            except asyncio.CancelledError:
                self.cancelled += 1
                if self.config.mood == "ignores the end":
                    while not self.released:
                        await asyncio.sleep(0.02)
                if self.config.mood == "asks again":
                    return await self._play(item, messages, managed)
                raise

    async def _play(self, item, messages, managed):
        tokens, masks, found = [], [], False
        for turn in range(TURNS):
            text, tokens, masks = await self._answer(managed, messages, tokens, masks)
            messages.append({"role": "assistant", "content": text})
            guess = int(text) if text.strip().isdecimal() else -1
            self._misbehave(turn)
            if found := guess == item["number"]:
                break
            messages.append({"role": "tool", "content": "higher" if guess < item["number"] else "lower"})
        score: Any = 1.0 if found else -1.0
        if self.config.mood == "no number":
            score = float("nan")
        return {"tokens": tokens, "masks": masks, "scores": score}, []

    def _misbehave(self, turn):
        if self.config.mood == "breaks" and turn == 1:
            raise KeyError("in the second turn")
        if self.config.mood == "exits":
            raise SystemExit(3)

    async def _answer(self, managed, messages, tokens, masks):
        """(text, all tokens, all masks) with one more answer."""
        call = {"max_tokens": self.config.max_tokens, "temperature": 0.7, "stop": self.config.stop, "n": 1}
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if self.config.mood == "hangs" and len(messages) > 2:
            await asyncio.sleep(3600)
        if self.config.mood == "prompt logprobs":
            await self.server.get_logprobs(prompt=prompt)
        if self.config.way == "managed":
            completion = await managed.chat_completion(messages=messages, **call)
            node = managed.get_state()["nodes"][-1]
            return completion.choices[0].message.content, node.tokens, node.masked_tokens
        if self.config.way == "tokens":
            prompt_ids, [answer], _, _ = await self.server.tokens_and_logprobs_completion(prompt=prompt, **call)
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
        else:
            if self.config.way == "chat":
                completion = await self.server.chat_completion(messages=messages, **call)
                text = completion.choices[0].message.content
            else:
                completion = await self.server.completion(prompt=prompt, **call)
                text = completion.choices[0].text
            prompt_ids, answer = self.tokenizer.encode(prompt), self.tokenizer.encode(text)
        return text, prompt_ids + answer, masks + [-100] * (len(prompt_ids) - len(masks)) + answer


class SeededGuessEnvConfig(GuessEnvConfig):
    seed: int = 0


class SeededGuessEnv(GuessEnv):
    env_config_cls = SeededGuessEnvConfig

    async def setup(self):
        await super().setup()
        self.rng = random.Random(self.config.seed)

    async def get_next_item(self):
        self.number = self.rng.randrange(10**6)
        return {"number": self.number}
