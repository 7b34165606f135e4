"""Environments over a set of items: the order of training, a resumable position, and greedy evaluation.

Guarantees:

- Every training item comes once per epoch, in a seeded order of that epoch; a resumed environment continues in it.
- Evaluation is on the same held-out items for every seed. A failed call raises; it does not count as a wrong answer.
"""

import asyncio
import random
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

from recipe.atropos.adapter.reporting import EnvReport

Item = Any


class ItemsEnvConfig(BaseEnvConfig):
    """BaseEnv's options and those of all environments over a set of items."""

    train_size: int | None = Field(None, ge=1, description="Use only the first problems of the train split")
    eval_size: int = Field(256, ge=1, description="Number of held-out problems, the first of the test split")
    seed: int = Field(0, description="Order of the training problems; of generated ones also their choice")


class ItemsEnv(BaseEnv):
    """See the module docstring. A subclass defines ``load``, ``eval_item`` and ``collect_trajectories``."""

    env_config_cls = ItemsEnvConfig
    report: EnvReport  # the adapter's, where it is adapted

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not hasattr(self, "report"):
            self.report = EnvReport(type(self).__name__)
        self.position = 0  # of the next training problem, counted across epochs
        self.percent_correct_buffer: list[float] = []  # 1 if right, 0 if not; of environments that can tell
        self.eval_metrics: list[tuple[str, float]] = []

    @classmethod
    def config_init(cls) -> tuple[ItemsEnvConfig, list[APIServerConfig]]:
        """Return defaults; only with a list of one server does BaseEnv, unadapted, read ``--openai.base_url``."""
        env_config = cls.env_config_cls(
            tokenizer_name="Qwen/Qwen2.5-1.5B-Instruct",
            group_size=8,
            use_wandb=False,
            max_token_length=2048,
            wandb_name=cls.name,  # also the name that the environment registers with
        )
        server = APIServerConfig(
            model_name=env_config.tokenizer_name,
            base_url="http://localhost:9001/v1",
            api_key="x",
            server_type="sglang",
            health_check=False,
        )
        return env_config, [server]

    # ------------------------------------------------------------------ defined by subclasses

    @staticmethod
    @abstractmethod
    def load(config: Any) -> tuple[Sequence[Item], Sequence[Item]]:
        """Return the train and test splits. The test split must not depend on the seed, to keep runs comparable."""

    @abstractmethod
    async def eval_item(self, item: Item) -> dict[str, Any]:
        """Return the ``samples.jsonl`` record of a greedy answer; ``eval_summary`` reads it."""

    def eval_items(self) -> Sequence[Item]:
        """Return the items to evaluate on."""
        return self.test

    def eval_summary(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        """Return the metrics of an evaluation; ``eval/total`` is added automatically."""
        return {"eval/percent_correct": sum(sample["correct"] for sample in samples) / len(samples)}

    # ------------------------------------------------------------------ items

    async def setup(self) -> None:
        """Load both splits. Raises what ``load`` raises."""
        self.train, self.test = self.load(self.config)
        self._order: tuple[int, Sequence[int]] = (-1, [])

    @classmethod
    def check_config(cls, config: ItemsEnvConfig) -> None:
        """Try to load the problems; the launcher calls this before it starts anything."""
        cls.load(config)

    def order(self, epoch: int) -> Sequence[int]:
        """Return the order of the training problems in an epoch."""
        order = list(range(len(self.train)))
        random.Random(f"gsm8k order {self.config.seed} {epoch}").shuffle(order)  # old runs rely on this text
        return order

    async def get_next_item(self) -> Item:
        """Return the next training problem, epoch after epoch, without end."""
        epoch, index = divmod(self.position, len(self.train))
        if self._order[0] != epoch:
            self._order = (epoch, self.order(epoch))
        self.position += 1
        return self.train[self._order[1][index]]

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save the position; BaseEnv sets saved items as attributes when a run resumes at ``step``."""
        super().save_checkpoint(step, {"position": self.position, **(data or {})})

    # ------------------------------------------------------------------ evaluation

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Answer the held-out items greedily; log metrics and a sample for each with ``evaluate_log``."""
        started = time.time()
        limit = asyncio.Semaphore(self.config.max_eval_workers)

        async def answer(item: Item) -> dict[str, Any]:
            async with limit:
                return await self.eval_item(item)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(item)) for item in self.eval_items()]
        samples = [task.result() for task in tasks]
        metrics = {**self.eval_summary(samples), "eval/total": len(samples)}
        self.eval_metrics.extend(metrics.items())
        await self.evaluate_log(
            metrics=metrics,
            samples=samples,
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        wandb_metrics = {**(wandb_metrics or {}), **self.report.metrics(), **dict(self.eval_metrics)}
        if self.percent_correct_buffer:
            wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
        self.percent_correct_buffer, self.eval_metrics = [], []
        await super().wandb_log(wandb_metrics)
