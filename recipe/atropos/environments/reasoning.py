"""reasoning-gym for Atropos: ``python -m recipe.atropos.environments.reasoning serve|evaluate|process [flags]``.

Its hundred tasks generate their problems and score the answers; this environment asks the policy for an answer between
``<answer>`` and ``</answer>`` and uses the task's own score, from 0 to 1. Tokens, masks and logprobs come from the
managed server: they are what the policy sampled, and never re-encoded.

The held-out problems are the same for every seed, and no training problem is among them. Since some tasks' problems
depend on Python's hashes, this holds for processes with ``PYTHONHASHSEED=0``, as the launcher starts them; without it
there is a warning.
"""

import logging
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from pydantic import Field

from recipe.atropos.adapter.cli import adapt
from recipe.atropos.environments.plain_answers import is_plain
from recipe.atropos.environments.single_turn import Conversation, SingleTurnEnv, SingleTurnEnvConfig

logger = logging.getLogger(__name__)

Problem = dict[str, Any]  # reasoning-gym's question, answer, metadata

_HELD_OUT_SEED = 1_000_000
_SEEDS_APART = 1_000_003  # reasoning-gym's problem i of seed s is problem 0 of seed s + i
_SEEDS = 2**32 - 2**24  # some tasks accept only 32 bits


class ReasoningEnvConfig(SingleTurnEnvConfig):
    """The options of single-turn environments and this environment's own."""

    task: str = Field("chain_sum", description="Name of the task in reasoning-gym")
    task_config: str = Field("{}", description="The task's own settings, as JSON or YAML: {min_terms: 2}")
    train_size: int = Field(10_000, ge=1, description="Number of training problems in an epoch")
    eval_size: int = Field(
        256, ge=1, description="Number of held-out problems; fewer where a task has fewer different ones"
    )
    system_prompt: str = Field(
        "Answer the question, step by step if that helps. Put the final answer, and nothing else, between <answer> and "
        "</answer>.",
        description="Empty for none",
    )


class ReasoningEnv(SingleTurnEnv):
    """Single-turn problems of one task of reasoning-gym."""

    name = "reasoning"
    env_config_cls = ReasoningEnvConfig

    @staticmethod
    def load(config: ReasoningEnvConfig) -> tuple[Sequence[Problem], list[Problem]]:
        """Return the training problems, generated on access, and the held-out ones.

        Raises:
            ValueError: reasoning-gym has no such task, or the task rejects its settings; names them.
        """
        if sys.flags.hash_randomization:
            logger.warning(
                "PYTHONHASHSEED is not 0: some tasks, such as isomorphic_strings, have other held-out problems in each "
                "process; set PYTHONHASHSEED=0"
            )
        return (
            dataset(config.task, config.task_config, config.train_size, config.seed),
            held_out(config.task, config.task_config, config.eval_size),
        )

    async def setup(self) -> None:
        """Load both sets of problems. Raises ValueError as ``load``, or if the task cannot score its own answer."""
        await super().setup()
        self._held_out = {problem["question"] for problem in self.test}
        right = self.test[0]["answer"]
        if right is not None and score(self.train, f"<answer>{right}</answer>", self.test[0]) is None:
            task = self.config.task
            raise ValueError(f"--env.task={task}: the task cannot score its own answer {right!r}; take another")

    def order(self, epoch: int) -> Sequence[int]:
        """Return the indices unshuffled: generated problems come in no particular order."""
        return range(len(self.train))

    async def get_next_item(self) -> Problem:
        """Return the next training problem, epoch after epoch, skipping held-out ones.

        Raises:
            ValueError: all are held out.
        """
        for _ in range(self.config.train_size):
            problem = await super().get_next_item()
            if problem["question"] not in self._held_out:
                return problem
        raise ValueError(
            f"--env.task={self.config.task} --env.task_config={self.config.task_config}: all of the "
            f"{self.config.train_size} training problems are among the {len(self.test)} held-out ones; lower "
            "--env.eval_size, or make the task larger"
        )

    async def scores(self, problem: Problem, answers: list[str], nodes: list[Any]) -> list[float]:
        return [self.task_score(answer, problem) for answer in answers]

    def task_score(self, answer: str, problem: Problem) -> float:
        """Return the task's score, in [0, 1]; 0 if nothing is between the tags, or nothing that it can read."""
        found = score(self.train, answer, problem)
        if found is None:
            self.report.count("unreadable_answers")
        return found or 0.0

    async def eval_sample(self, problem: Problem, conversation: Conversation) -> dict[str, Any]:
        return {
            "question": problem["question"],
            "gold": problem["answer"],
            "answer": conversation.answer,
            "score": self.task_score(conversation.answer, problem),
        }

    def eval_summary(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        """Return the share of full scores, and the mean score."""
        return {
            "eval/accuracy": sum(sample["score"] == 1 for sample in samples) / len(samples),
            "eval/mean_score": sum(sample["score"] for sample in samples) / len(samples),
        }


class Problems(Sequence[Problem]):
    """A task's problems, each generated on access and the same each time, given Python's hash seed."""

    def __init__(self, task: Any):
        self._task, self.score_answer = task, task.score_answer

    def __len__(self) -> int:
        return len(self._task)

    def __iter__(self) -> Iterator[Problem]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Problem:
        state = random.getstate()
        random.seed(self._task.seed + index)  # some tasks draw from the global generator
        try:
            return self._task[index]
        finally:
            random.setstate(state)


def dataset(task: str, settings: str, size: int, seed: int) -> Problems:
    """Return ``size`` problems of a task; item i is a Problem. Another ``seed`` gives others.

    Raises:
        ValueError: reasoning-gym has no such task, or the task rejects its settings; names them.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"--env.task={task}: reasoning-gym has no such task; it has {', '.join(sorted(DATASETS))}")
    try:
        given = yaml.safe_load(settings) or {}
        made = Problems(reasoning_gym.create_dataset(task, **given, size=size, seed=seed * _SEEDS_APART % _SEEDS))
        made[0]  # some settings are checked only here
        return made
    except (yaml.YAMLError, TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"--env.task_config={settings} does not suit --env.task={task}: {error}") from error


def held_out(task: str, settings: str, size: int) -> list[Problem]:
    """Return at most ``size`` distinct problems, the same whatever the seed of a run."""
    found: dict[str, Problem] = {}
    for problem in dataset(task, settings, 4 * size, _HELD_OUT_SEED):
        found.setdefault(problem["question"], problem)
        if len(found) == size:
            break
    return list(found.values())


def score(task: Any, text: str, problem: Problem) -> float | None:
    """Return the score of a task (a ``dataset``); if nothing, or code, is between the tags, that of no answer.

    None if the task raises, as some do for an answer in an unexpected format.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(text.rpartition("</think>")[2])
    if answer is not None and not is_plain(answer, problem, task.score_answer):
        answer = None
    try:
        return float(task.score_answer(answer, problem))
    except Exception:  # whatever its parser raises
        return None


if __name__ == "__main__":
    adapt(ReasoningEnv).cli()
