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

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from atroposlib.envs.base import ScoredDataGroup
from pydantic import Field

from recipe.atropos.adapter.restore import group_of_nodes
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.data.sampling import default_temperature
from recipe.atropos.environments.items import ItemsEnv, ItemsEnvConfig
from recipe.atropos.errors import ConfigurationError

logger = logging.getLogger(__name__)

Problem = Any  # whatever ``load`` returns; ``messages`` reads its "question"
Messages = list[dict[str, str]]


class SingleTurnEnvConfig(ItemsEnvConfig):
    """The options of environments over items, and those of all single-turn environments."""

    system_prompt: str = Field("", description="Empty for none")
    temperature: float = Field(
        default_factory=default_temperature, description="Of sampling; by default the trainer's, 1 without a launcher"
    )
    max_answer_tokens: int | None = Field(None, description="Of one answer; by default what max_token_length leaves")


class Conversation(NamedTuple):
    """Conversation; ``messages`` end with the policy's last, ``node`` is the managed server's, of all turns' tokens.

    ``branch``: of which conversation of the group, and after how many of its turns, it is a continuation. ``values``:
    of its turns, if others were sampled for them, which had ``value_tokens``.
    """

    messages: Messages
    node: Any
    finish_reason: str
    branch: tuple[int, int] | None = None
    values: list[float] | None = None
    value_tokens: int = 0

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]


class SingleTurnEnv(ItemsEnv):
    """Environment with one question and one answer per problem; see the module docstring."""

    env_config_cls = SingleTurnEnvConfig

    # ------------------------------------------------------------------ defined by subclasses

    def messages(self, problem: Problem) -> Messages:
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return [*system, {"role": "user", "content": problem["question"]}]

    @abstractmethod
    async def scores(self, problem: Problem, answers: list[str], nodes: list[Any]) -> list[float]:
        """Return each answer's training score; ``nodes`` are the managed server's sequences that end in the answers."""

    @abstractmethod
    async def eval_sample(self, problem: Problem, conversation: Conversation) -> dict[str, Any]:
        """Return the ``samples.jsonl`` record of a greedy answer; ``eval_summary`` reads it."""

    # ------------------------------------------------------------------ rollouts

    async def setup(self) -> None:
        """Load both splits. Raises ConfigurationError if the tokenizer cannot render messages: each item would fail."""
        if not self.tokenizer.chat_template:
            raise ConfigurationError(
                f"the tokenizer {self.config.tokenizer_name} has no chat template, and {type(self).__name__} sends "
                "messages: give an instruct model, or set chat_template in its tokenizer_config.json"
            )
        await super().setup()

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

    def temperature(self, split: Literal["train", "eval"]) -> float:
        return self.config.temperature if split == "train" else self.eval_temperature

    async def converse(self, problem: Problem, n: int, split: Literal["train", "eval"]) -> list[Conversation]:
        """Run ``n`` conversations about a problem; greedy for "eval"."""
        messages = self.messages(problem)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=messages,
                n=n,
                max_tokens=self.answer_tokens(messages),
                temperature=self.temperature(split),
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
            logger.warning(
                "skipped a problem whose prompt leaves no room for an answer: %.80s", messages[-1]["content"]
            )
            return None, []
        conversations = await self.converse(item, self.config.group_size, "train")
        return await self.group_of(item, conversations), []

    async def group_of(self, item: Problem, conversations: list[Conversation]) -> ScoredDataGroup:
        """Return the scored group of a problem's conversations; a subclass may tell more in its ``group_overrides``."""
        return await self.score(item, [conversation.node for conversation in conversations])

    async def score(self, item: Problem, nodes: list[Any]) -> ScoredDataGroup:
        """Return the group of the managed server's sequences, each scored by its last turn."""
        answers = [self.tokenizer.decode(_last_turn(node), skip_special_tokens=True) for node in nodes]
        return group_of_nodes(nodes, await self.scores(item, answers, nodes))

    # ------------------------------------------------------------------ evaluation

    async def eval_item(self, item: Problem) -> dict[str, Any]:
        [conversation] = await self.converse(item, 1, "eval")
        return await self.eval_sample(item, conversation)

    def eval_items(self) -> Sequence[Problem]:
        """Return the held-out problems. Raises ValueError if none leaves room for an answer."""
        fit = [problem for problem in self.test if self.answer_tokens(self.messages(problem)) > 0]
        total, limit = len(self.test), f"--env.max_token_length={self.config.max_token_length}"
        if not fit:
            raise ValueError(f"none of the {total} held-out problems leaves room for an answer in {limit}")
        if len(fit) < total:
            logger.warning("%d of %d held-out problems leave no room in %s", total - len(fit), total, limit)
        return fit


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _last_turn(node: Any) -> list[int]:
    """Return the tokens of the policy's last turn."""
    *_, (start, end) = trained_spans(node.masked_tokens)
    return node.tokens[start:end]
