"""Environments over a set of items: the order of training, a resumable position, and greedy evaluation.

Guarantees:

- Every training item comes once per epoch, in a seeded order of that epoch; a resumed environment continues in it from
  its last checkpoint: with the items that were in flight there, then with what was begun since, which comes again.
- Of N replicas each has every N-th item, in the same order, and epochs, pools and a curriculum of its own.
- With ``difficulty_pools`` an item whose last group had equal scores is left out of an epoch unless a seeded draw lets
  it come; with ``curriculum_threshold`` so is one of a level that has not begun. Both follow the environment's own
  scores, before any shaping. A checkpoint has them. What comes is reproducible given the groups that have come back,
  not from run to run, since how soon they do depends on how long they take.
- Evaluation is on the same held-out items for every seed. A failed call raises; it does not count as a wrong answer.
"""

import asyncio
import hashlib
import json
import logging
import random
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

from recipe.atropos.data.scored_group import trajectory_numbers
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.run.reporting import EnvReport
from recipe.atropos.utils.files import write_atomic
from recipe.atropos.utils.tasks import together

logger = logging.getLogger(__name__)

_WINDOW = 32  # groups of a level over which its mean score is taken

Item = Any


class ItemsEnvConfig(BaseEnvConfig):
    """BaseEnv's options and those of all environments over a set of items."""

    train_size: int | None = Field(None, ge=1, description="Use only the first problems of the train split")
    eval_size: int = Field(256, ge=1, description="Number of held-out problems, the first of the test split")
    seed: int = Field(0, description="Order of the training problems; of generated ones also their choice")
    difficulty_pools: float | None = Field(
        None,
        ge=0.01,
        lt=1,
        description="How often an item comes whose last group had equal scores (solved always or never), a share of "
        "epochs; null: in each. Depends on which groups have come back, so that runs are not repeated exactly",
    )
    curriculum_threshold: float | None = Field(
        None,
        description=f"Easy items first: those of the next level, a number in each item's 'level', come once the last "
        f"{_WINDOW} groups of the highest so far have at least this mean score; null: all at once. Depends on which "
        "groups have come back",
    )


class ItemsEnv(BaseEnv):
    """See the module docstring. A subclass defines ``load``, ``eval_item`` and ``collect_trajectories``."""

    env_config_cls = ItemsEnvConfig
    report: EnvReport  # the adapter's, where it is adapted
    eval_temperature = 0.0  # of ``eval_item``; an evaluation is shown as greedy where it is 0
    shard = (0, 1)  # (K, N): every N-th item from the K-th on; the adapter sets it, see adapter.replicas

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not hasattr(self, "report"):
            self.report = EnvReport(type(self).__name__)
        self.position = 0  # of the next training problem, counted across epochs
        self._asked_at: dict[str, int] = {}  # the position at which an item came last, by its digest
        self.pool: dict[str, float] = {}  # the score of each item whose last group had equal ones, by its digest
        self.stage, self.stage_scores = 0, list[float]()  # of the curriculum: number of the highest level; its groups'
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
        """Load both splits. Raises what ``check_config`` raises, and ConfigurationError if no item is left for it."""
        self.train, self.test = self._load(self.config)
        replica, replicas = self.shard
        self._own = range(replica, len(self.train), replicas)
        if not self._own:
            raise ConfigurationError(f"replicas={replicas}: there are {len(self.train)} items; give at most as many")
        self._levels = levels(self.config, (self.train[index] for index in self._own))
        self._order: tuple[int, Sequence[int]] = (-1, [])

    @classmethod
    def check_config(cls, config: ItemsEnvConfig) -> None:
        """Try to load the problems; the launcher calls this before it starts anything.

        Raises:
            ConfigurationError: a split is empty, or an item has no level, which the curriculum needs; and what ``load``
                raises.
        """
        levels(config, cls._load(config)[0])

    @classmethod
    def _load(cls, config: ItemsEnvConfig) -> tuple[Sequence[Item], Sequence[Item]]:
        train, test = cls.load(config)
        if not (len(train) and len(test)):
            raise ConfigurationError(
                f"{cls.__name__}.load() returns {len(train)} items to train on and {len(test)} held-out ones, with "
                f"--env.train_size={config.train_size} and --env.eval_size={config.eval_size}: each needs one at least"
            )
        return train, test

    def order(self, epoch: int) -> Sequence[int]:
        """Return the order of the training problems in an epoch."""
        order = list(range(len(self.train)))
        random.Random(f"gsm8k order {self.config.seed} {epoch}").shuffle(order)  # old runs rely on this text
        return order

    async def get_next_item(self) -> Item:
        """Return the next training problem, epoch after epoch, without end."""
        while True:
            epoch, item = self._item_at(self.position)
            self.position += 1
            if self._comes(item, epoch):
                return item

    def _item_at(self, position: int) -> tuple[int, Item]:
        """Return the epoch and the training problem at a position."""
        epoch, index = divmod(position, len(self._own))
        if self._order[0] != epoch:
            self._order = (epoch, [each for each in self.order(epoch) if each in self._own])
        item = self.train[self._order[1][index]]
        self._asked_at[_digest(item)] = position
        return epoch, item

    def _comes(self, item: Item, epoch: int) -> bool:
        """Return whether an item is asked in an epoch. One that its pool leaves out counts for the curriculum as it
        was scored last, since a level's mean would otherwise be that of what is neither solved always nor never.
        """
        if self._levels and item["level"] > self._levels[self.stage]:
            return False
        if (share := self.config.difficulty_pools) is None or (key := _digest(item)) not in self.pool:
            return True
        if random.Random(f"difficulty pools {self.config.seed} {epoch} {key}").random() < share:
            return True
        self._count_for_level(item, self.pool[key])
        return False

    def _count_for_level(self, item: Item, score: float) -> None:
        """Count a group's mean score; begin the next level if those of the highest are high enough."""
        if not self._levels or item["level"] != self._levels[self.stage]:
            return
        self.stage_scores = [*self.stage_scores[1 - _WINDOW :], score]
        solved = len(self.stage_scores) == _WINDOW and fmean(self.stage_scores) >= self.config.curriculum_threshold
        if solved and self.stage + 1 < len(self._levels):
            self.stage, self.stage_scores = self.stage + 1, []

    async def handle_env(self, item_uuid: str) -> Any:
        """Roll out an item; what comes next depends on its scores."""
        item = (self.running_items.get(item_uuid) or {}).get("item")
        groups = await super().handle_env(item_uuid)
        if self.config.difficulty_pools is not None or self._levels:
            for group in filter(None, groups if isinstance(groups, list) else [groups]):
                numbers = trajectory_numbers(group.get("group_overrides") or {}, len(group["scores"]))
                scores = [*map(float, dict(zip(numbers, group["scores"], strict=True)).values())]
                if len(scores) >= min(2, self.config.group_size):  # the only one that is left says nothing
                    self._follow(item, scores)
        return groups

    def _follow(self, item: Item, scores: Sequence[float]) -> None:
        """Take account of the scores of an item's group, one for each trajectory."""
        self.pool.pop(_digest(item), None)
        if self.config.difficulty_pools is not None and len(set(scores)) == 1:
            self.pool[_digest(item)] = scores[0]
        self._count_for_level(item, fmean(scores))

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save what decides which items come, and ``data``; ``load_checkpoint`` sets them as attributes.

        ``unfinished`` are the positions of the training problems in the backlog and in flight.
        """
        own = {name: getattr(self, name) for name in ("position", "pool", "stage", "stage_scores")}
        begun = [*self.backlog, *(running["item"] for running in self.running_items.values())]
        own["unfinished"] = [self._asked_at[key] for key in map(_digest, begun) if key in self._asked_at]
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        write_atomic(self._checkpoints / f"step-{step}.json", json.dumps({**own, **(data or {})}).encode())

    def load_checkpoint(self) -> None:
        """Continue from the newest checkpoint up to the current step: the trainer's may be between two of them."""
        steps = [int(path.stem.removeprefix("step-")) for path in self._checkpoints.glob("step-*.json")]
        step = max((step for step in steps if step <= self.curr_step), default=None)
        if step is None:
            logger.warning("%s: none up to step %d, so items begin anew", self._checkpoints, self.curr_step)
            return
        saved = json.loads((self._checkpoints / f"step-{step}.json").read_bytes())
        self.backlog = [self._item_at(position)[1] for position in saved.pop("unfinished", ())]  # older ones have none
        for name, value in saved.items():
            setattr(self, name, value)

    @property
    def _checkpoints(self) -> Path:
        return Path(self.checkpoint_dir, "env_checkpoints", self.wandb_prepend)

    # ------------------------------------------------------------------ evaluation

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Answer the held-out items greedily; log metrics and a sample for each with ``evaluate_log``."""
        started = time.time()
        limit = asyncio.Semaphore(self.config.max_eval_workers)

        async def answer(item: Item) -> dict[str, Any]:
            async with limit:
                return await self.eval_item(item)

        samples = await together(answer(item) for item in self.eval_items())
        metrics = {**self.eval_summary(samples), "eval/total": len(samples)}
        self.eval_metrics.extend(metrics.items())
        await self.evaluate_log(
            metrics=metrics,
            samples=samples,
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": self.eval_temperature},
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        wandb_metrics = {**(wandb_metrics or {}), **self.report.metrics(), **dict(self.eval_metrics)}
        if self.percent_correct_buffer:
            wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
        self.percent_correct_buffer, self.eval_metrics = [], []
        await super().wandb_log(wandb_metrics)


def levels(config: ItemsEnvConfig, train: Iterable[Item]) -> list[float]:
    """Return the levels of the items in ascending order; without a curriculum [].

    Raises:
        ConfigurationError: an item has none; names it.
    """
    if config.curriculum_threshold is None:  # then nothing is read: some items are generated as they are read
        return []
    items = list(train)
    for number, item in enumerate(items, 1):
        if not isinstance(item, Mapping) or not isinstance(item.get("level"), int | float):
            raise ConfigurationError(
                f"--env.curriculum_threshold={config.curriculum_threshold:g}: item {number} has no number 'level': "
                f"{str(item)[:200]}; give each item one, or leave the curriculum out"
            )
    return sorted({item["level"] for item in items})


def _digest(item: Item) -> str:
    return hashlib.blake2b(repr(item).encode(), digest_size=8).hexdigest()
