r"""The tasks of ``benchmarks/credit.py``: environments in which an error costs a turn, and their first policies.

- ``ChainEnv``: ``17 + 5 - 3``, with the recipe's calculator, a call for each operation, which is answered by what is
  then left, ``22 - 3``. Any other call is answered by an error, and what is still left; the boxed number ends it.
- ``GridEnv``: ``2 3 to 4 1``, a move (``left``, ``right``, ``up``, ``down``) for each turn, answered with the new
  place; ``done`` ends the episode, which is right at the goal, N moves away.

An episode has at most N + 1 turns, so one error costs the outcome, though what follows it may be right. The first
policies know the language and err at random, in ``error`` of their turns. They are evaluated as they are trained,
sampled at temperature 1: what they do most often is right from the beginning.
"""

import random
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from recipe.atropos.demo.policies import CalculatorRecipe
from recipe.atropos.demo.small_policy import Chat
from recipe.atropos.environments.calculator import CalculatorEnv, CalculatorEnvConfig, tool_answers
from recipe.atropos.environments.calculator_tool import CLOSE, OPEN, answer
from recipe.atropos.environments.gsm8k import is_correct
from recipe.atropos.environments.single_turn import Conversation, Messages, message
from recipe.atropos.environments.word_problems import Row, gold_answer, split_of

SIZE = 12  # of the grid
ITEMS = 1000  # to train on; the shortest chains have 1,400
ERROR = "error: "
NUMBERS = re.compile(r"\d+( [+-] \d)*")
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, 1), "down": (0, -1)}


class TaskConfig(CalculatorEnvConfig):
    steps: int = Field(4, ge=1, description="Right decisions that an episode needs before the last one")


class Task(CalculatorEnv):
    """Conversations of ``steps`` checkable steps; +1 or -1 for the last turn."""

    env_config_cls = TaskConfig

    @classmethod
    def load(cls, config: TaskConfig) -> tuple[list[Row], list[Row]]:
        """Return the items; with a curriculum those to train on have every number of steps up to ``steps``."""
        levels = [config.steps] if config.curriculum_threshold is None else range(1, config.steps + 1)
        train = [row for steps in levels for row in cls.rows("train", ITEMS // len(levels), steps, config.seed)]
        return train, cls.rows("test", config.eval_size, config.steps, 0)

    @classmethod
    def rows(cls, split: str, size: int, steps: int, seed: int) -> list[Row]:
        """Return ``size`` items of a split, whose level is ``steps``, in an order given by ``seed``."""
        rng, found = random.Random(f"{cls.name} {split} {steps} {seed}"), dict[str, Row]()
        while len(found) < size:
            row = cls.row(steps, rng)
            if split_of(row["question"]) == split:
                found.setdefault(row["question"], row | {"level": steps})
        return list(found.values())

    @staticmethod
    def row(steps: int, rng: random.Random) -> Row:
        raise NotImplementedError

    def temperature(self, split: Literal["train", "eval"]) -> float:
        return self.config.temperature

    def is_right(self, problem: Row, conversation: Messages) -> bool:
        return is_correct(conversation[-1]["content"], gold_answer(problem))

    async def collect_trajectories(self, item: Row) -> tuple[Any, list[Row]]:
        conversations = await self.converse(item, self.config.group_size, "train")
        right = [self.is_right(item, one.messages) for one in conversations]
        self.percent_correct_buffer.extend(map(float, right))
        group = await self.score(item, [one.node for one in conversations])
        group["scores"] = [1.0 if each else -1.0 for each in right]
        return group, []

    async def eval_sample(self, problem: Row, conversation: Conversation) -> dict[str, Any]:
        right = self.is_right(problem, conversation.messages)
        return {"messages": conversation.messages, "correct": right, "score": int(right)}


class ChainEnv(Task):
    name = "chain"

    @staticmethod
    def row(steps: int, rng: random.Random) -> Row:
        total = rng.randint(10, 99)
        question = str(total)
        for _ in range(steps):
            sign = rng.choice("+-") if total > 9 else "+"
            operand = rng.randint(1, 9)
            total += operand if sign == "+" else -operand
            question += f" {sign} {operand}"
        return {"question": question, "answer": f"{steps} #### {total}"}

    def reply(self, problem: Row, messages: Messages) -> str | None:
        return reduced(left(problem, tool_answers(messages)), messages[-1]["content"])


def left(problem: Row, replies: list[str]) -> list[str]:
    """Return the words of what is left of a chain, as the last reply says."""
    return (replies[-1].removeprefix(ERROR) if replies else problem["question"]).split()


def reduced(words: list[str], text: str) -> str | None:
    """Return what is said to a turn when ``words`` are left; None if it calls nothing."""
    result = answer(text)
    if result is None:
        return None
    if text != f"{OPEN}{' '.join(words[:3])}{CLOSE}":
        return ERROR + " ".join(words)
    return " ".join([result, *words[3:]])


def shorter(problem: Row, text: str) -> float:
    """Return how much of a chain an episode's text has done, as ``reached`` does."""
    replies = [line for line in text.splitlines() if NUMBERS.fullmatch(line.removeprefix(ERROR))]
    steps = (len(problem["question"].split()) - 1) // 2
    return reached(steps, (len(left(problem, replies)) - 1) // 2, len(replies))


def reached(steps: int, missing: int, turns: int) -> float:
    """Return what was reached after ``turns``, from -1 at the beginning up to 1.

    It is -1 too as soon as the episode is lost, because more steps are missing than there are turns for them. Else the
    episode's last turn, right or not, would be blamed for the outcome, and its noise would exceed all other.
    """
    return -1.0 if missing > steps - turns else 2 * turns / (steps + 1) - 1


class GridEnv(Task):
    name = "grid"

    @staticmethod
    def row(steps: int, rng: random.Random) -> Row:
        while True:
            x, y, to_x, to_y = (rng.randrange(SIZE) for _ in range(4))
            if abs(x - to_x) + abs(y - to_y) == steps:
                return {"question": f"{x} {y} to {to_x} {to_y}", "answer": f"#### {steps}"}

    def reply(self, problem: Row, messages: Messages) -> str | None:
        move = messages[-1]["content"].strip()
        if move == "done":
            return None
        x, y = place(problem, tool_answers(messages))
        to_x, to_y = MOVES.get(move, (0, 0))
        return f"{min(max(x + to_x, 0), SIZE - 1)} {min(max(y + to_y, 0), SIZE - 1)}"

    def is_right(self, problem: Row, conversation: Messages) -> bool:
        return conversation[-1]["content"].strip() == "done" and not distance(problem, tool_answers(conversation))


def place(problem: Row, replies: list[str]) -> tuple[int, int]:
    """Return where the last reply says that the policy is."""
    x, y = (replies[-1] if replies else problem["question"]).split()[:2]
    return int(x), int(y)


def distance(problem: Row, replies: list[str]) -> int:
    x, y = place(problem, replies)
    to_x, to_y = map(int, problem["question"].split()[-2:])
    return abs(x - to_x) + abs(y - to_y)


def nearer(problem: Row, text: str) -> float:
    """Return how near the goal the last place in an episode's text is, as ``reached`` does."""
    places = [line for line in text.splitlines() if line.split() and all(word.isdigit() for word in line.split())]
    return reached(int(gold_answer(problem)), distance(problem, places), len(places))


VALUES = {"chain": "benchmarks.tasks.credit:shorter", "grid": "benchmarks.tasks.credit:nearer"}


@dataclass(frozen=True)
class TaskRecipe(CalculatorRecipe):
    """First policy of a task, which errs in ``error`` of its turns."""

    name: ClassVar[str] = "small-policy-credit"

    task: str = "chain"
    task_steps: int = 4
    error: float = 0.3
    problems: int = ITEMS
    vocabulary: int = 320
    steps: int = 500
    batch_size: int = 16

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        task: type[Task] = {"chain": ChainEnv, "grid": GridEnv}[self.task]
        demonstration = {"chain": self.calls, "grid": self.moves}[self.task]
        return [demonstration(row, rng) for row in self.items(task, 500_000 + seed)]

    def items(self, task: type[Task], seed: int) -> list[Row]:
        return task.rows("train", self.problems, self.task_steps, seed)

    def calls(self, row: Row, rng: random.Random) -> Chat:
        """A malformed call is made again; the chain never ends because of it."""
        chat, words = [message("user", row["question"])], row["question"].split()
        while len(words) > 1:
            call = f"{OPEN}{' '.join(words[: 3 if rng.random() >= self.error else 2])}{CLOSE}"
            chat += [message("assistant", call), message("tool", str(reduced(words, call)))]
            words = left(row, [chat[-1]["content"]])
        return [*chat, message("assistant", rf"\boxed{{{words[0]}}}")]

    def moves(self, row: Row, rng: random.Random) -> Chat:
        chat, (x, y) = [message("user", row["question"])], place(row, [])
        to_x, to_y = map(int, row["question"].split()[-2:])
        while (x, y) != (to_x, to_y) and len(chat) < 4 * self.task_steps + 2:
            good = [name for name, (dx, dy) in MOVES.items() if dx * (to_x - x) > 0 or dy * (to_y - y) > 0]
            name = rng.choice(good if rng.random() >= self.error else [one for one in MOVES if one not in good])
            x, y = (min(max(at + by, 0), SIZE - 1) for at, by in zip((x, y), MOVES[name], strict=True))
            chat += [message("assistant", name), message("tool", f"{x} {y}")]
        return [*chat, message("assistant", "done")]


@dataclass(frozen=True)
class LongTaskRecipe(TaskRecipe):
    """First policy of a long task, which is taught shorter ones too."""

    name: ClassVar[str] = "small-policy-long-credit"

    def items(self, task: type[Task], seed: int) -> list[Row]:
        size = self.problems // self.task_steps
        return [row for steps in range(1, self.task_steps + 1) for row in task.rows("train", size, steps, seed)]
