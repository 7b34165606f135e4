"""Single-turn problems for Atropos: one question, a group of sampled answers, a score for each.

A plain ``BaseEnv``. A subclass defines the problems (``load``), the training scores (``scores``), and the evaluation
record of an answer (``eval_sample``); also ``messages``, if the prompt is more than ``system_prompt`` and the problem's
"question". ``gsm8k`` is an example to copy. Guarantees:

- Every training problem comes once per epoch, in a seeded order of that epoch; a resumed environment continues in it.
- Tokens, masks and logprobs come from the managed server: they are what the policy sampled, and never re-encoded.
- An answer may use the tokens that the problem leaves of ``max_token_length`` and of the trainer's limit. A problem
  that leaves none is skipped with a warning.
- Evaluation is greedy, on the same held-out problems for every seed, through the same server calls as the rollouts.
  A failed call raises; it does not count as a wrong answer.
"""

import asyncio
import logging
import random
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

from recipe.atropos.adapter.completion_cache import trained_spans
from recipe.atropos.adapter.reporting import EnvReport
from recipe.atropos.adapter.restore import group_of_nodes
from recipe.atropos.data.sampling import default_temperature

logger = logging.getLogger(__name__)

Problem = Any  # whatever ``load`` returns; ``messages`` reads its "question"
Messages = list[dict[str, str]]


class SingleTurnEnvConfig(BaseEnvConfig):
    """BaseEnv's options and those of all single-turn environments."""

    train_size: int | None = Field(None, ge=1, description="Use only the first problems of the train split")
    eval_size: int = Field(256, ge=1, description="Number of held-out problems, the first of the test split")
    seed: int = Field(0, description="Order of the training problems; of generated ones also their choice")
    system_prompt: str = Field("", description="Empty for none")
    temperature: float = Field(
        default_factory=default_temperature, description="Of sampling; by default the trainer's, 1 without a launcher"
    )
    max_answer_tokens: int | None = Field(None, description="Of one answer; by default what max_token_length leaves")


class Conversation(NamedTuple):
    """Conversation; ``messages`` end with the policy's last, ``node`` is the managed server's, of all turns' tokens."""

    messages: Messages
    node: Any
    finish_reason: str

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]


class SingleTurnEnv(BaseEnv):
    """Environment with one question and one answer per problem; see the module docstring."""

    env_config_cls = SingleTurnEnvConfig
    report: EnvReport  # the adapter's, where it is adapted

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not hasattr(self, "report"):
            self.report = EnvReport(type(self).__name__)
        self.position = 0  # of the next training problem, counted across epochs
        self.percent_correct_buffer: list[float] = []  # 1 if right, 0 if not; of environments that can tell
        self.eval_metrics: list[tuple[str, float]] = []

    @classmethod
    def config_init(cls) -> tuple[SingleTurnEnvConfig, list[APIServerConfig]]:
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
    def load(config: Any) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """Return the train and test splits. The test split must not depend on the seed, to keep runs comparable."""

    def messages(self, problem: Problem) -> Messages:
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return [*system, {"role": "user", "content": problem["question"]}]

    @abstractmethod
    async def scores(self, problem: Problem, answers: list[str], nodes: list[Any]) -> list[float]:
        """Return each answer's training score; ``nodes`` are the managed server's sequences that end in the answers."""

    @abstractmethod
    async def eval_sample(self, problem: Problem, conversation: Conversation) -> dict[str, Any]:
        """Return the ``samples.jsonl`` record of a greedy answer; ``eval_summary`` reads it."""

    def eval_summary(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        """Return the metrics of an evaluation; ``eval/total`` is added automatically."""
        return {"eval/percent_correct": sum(sample["correct"] for sample in samples) / len(samples)}

    # ------------------------------------------------------------------ problems

    async def setup(self) -> None:
        """Load both splits. Raises what ``load`` raises."""
        self.train, self.test = self.load(self.config)
        self._order: tuple[int, Sequence[int]] = (-1, [])

    @classmethod
    def check_config(cls, config: SingleTurnEnvConfig) -> None:
        """Try to load the problems; the launcher calls this before it starts anything."""
        cls.load(config)

    def order(self, epoch: int) -> Sequence[int]:
        """Return the order of the training problems in an epoch."""
        order = list(range(len(self.train)))
        random.Random(f"gsm8k order {self.config.seed} {epoch}").shuffle(order)  # old runs rely on this text
        return order

    async def get_next_item(self) -> Problem:
        """Return the next training problem, epoch after epoch, without end."""
        epoch, index = divmod(self.position, len(self.train))
        if self._order[0] != epoch:
            self._order = (epoch, self.order(epoch))
        self.position += 1
        return self.train[self._order[1][index]]

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save the position; BaseEnv sets saved items as attributes when a run resumes at ``step``."""
        super().save_checkpoint(step, {"position": self.position, **(data or {})})

    # ------------------------------------------------------------------ rollouts

    def answer_tokens(self, messages: Messages, more: int = 0) -> int:
        """Return the maximum answer length that keeps the sequence below the limits of BaseEnv and the trainer.

        ``more``: prompt tokens beyond the encoding of ``messages``.
        """
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        limit = self.config.max_token_length
        if self.max_token_len > 0:
            limit = min(limit, self.max_token_len)
        room = limit - 1 - len(self.tokenizer.encode(prompt)) - more
        return min(room, self.config.max_answer_tokens or room)

    async def converse(self, problem: Problem, n: int, split: Literal["train", "eval"]) -> list[Conversation]:
        """Run ``n`` conversations about a problem; greedy for "eval"."""
        messages = self.messages(problem)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=messages,
                n=n,
                max_tokens=self.answer_tokens(messages),
                temperature=self.config.temperature if split == "train" else 0.0,
                top_p=1.0,
                split=split,
            )
            nodes = managed.get_state()["nodes"]
        return [
            Conversation([*messages, message("assistant", choice.message.content)], node, choice.finish_reason)
            for choice, node in zip(completion.choices, nodes, strict=True)
        ]

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup | None, list[Problem]]:
        """Return a scored group for one problem; None if its prompt leaves no room for an answer."""
        messages = self.messages(item)
        if self.answer_tokens(messages) < 1:
            text = messages[-1]["content"]
            logger.warning("skipped a problem whose prompt leaves no room for an answer: %s", text[:80])
            return None, []
        conversations = await self.converse(item, self.config.group_size, "train")
        return await self.score(item, [conversation.node for conversation in conversations]), []

    async def score(self, item: Problem, nodes: list[Any]) -> ScoredDataGroup:
        """Return the group of the managed server's sequences, each scored by its last turn."""
        answers = [self.tokenizer.decode(_last_turn(node), skip_special_tokens=True) for node in nodes]
        return group_of_nodes(nodes, await self.scores(item, answers, nodes))

    # ------------------------------------------------------------------ evaluation

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Answer the held-out problems greedily; log metrics and a sample for each with ``evaluate_log``.

        Raises:
            ValueError: no problem leaves room for an answer.
        """
        started = time.time()
        limit = asyncio.Semaphore(self.config.max_eval_workers)

        async def answer(problem: Problem) -> dict[str, Any]:
            async with limit:
                [conversation] = await self.converse(problem, 1, "eval")
            return await self.eval_sample(problem, conversation)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(problem)) for problem in self._with_room(self.test)]
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

    def _with_room(self, problems: Sequence[Problem]) -> list[Problem]:
        fit = [problem for problem in problems if self.answer_tokens(self.messages(problem)) > 0]
        limit = f"--env.max_token_length={self.config.max_token_length}"
        if not fit:
            raise ValueError(f"none of the {len(problems)} held-out problems leaves room for an answer in {limit}")
        if len(fit) < len(problems):
            missing = len(problems) - len(fit)
            logger.warning("%d of %d held-out problems leave no room in %s", missing, len(problems), limit)
        return fit

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        wandb_metrics = {**(wandb_metrics or {}), **self.report.metrics(), **dict(self.eval_metrics)}
        if self.percent_correct_buffer:
            wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
        self.percent_correct_buffer, self.eval_metrics = [], []
        await super().wandb_log(wandb_metrics)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _last_turn(node: Any) -> list[int]:
    """Return the tokens of the policy's last turn."""
    *_, (start, end) = trained_spans(node.masked_tokens)
    return node.tokens[start:end]
