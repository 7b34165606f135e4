r"""The tasks of ``benchmarks/credit.py``: decisions that are checked one by one, and first policies.

``KeysEnv``: ``b 3 f 2 17`` on a calculator of two digits, on which the policy has to find the key that each of eight
letters stands for: it presses ``-`` and is told what is then left, ``f 2 14``; with one number left, ``=`` ends the
episode. A wrong key costs the outcome, but not what follows: the calculator goes on with the right one.

``GridEnv``: ``+2-1 +0+1`` is a grid on which goals are visited in this order, the next one two to the right and one
below. The policy moves by one, ``r``, and is told ``+1-1 +0+1``. A wrong move needs another one to take it back, as
long as there are turns.

An environment sends what was reached after each turn as ``turn_values``, which ``environment.credit`` reads. First
policies know the language, and press wrong keys or move wrongly at random; they are evaluated as they are trained,
sampled at temperature 1.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from atroposlib.envs.base import ScoredDataGroup
from pydantic import Field

from recipe.atropos.demo.policies import CalculatorRecipe
from recipe.atropos.demo.small_policy import Chat
from recipe.atropos.environments.calculator import CalculatorEnv, CalculatorEnvConfig, tool_answers
from recipe.atropos.environments.single_turn import Conversation, Messages, message
from recipe.atropos.environments.word_problems import WordProblem, split_of

ITEMS = 1000  # to train on
KEYS = dict(zip("abcdefgh", "+-*+-*+-", strict=True))
MOVES = {"r": (1, 0), "l": (-1, 0), "u": (0, 1), "d": (0, -1)}
REACH = 2  # of a goal from the one before, in each direction


class KeysConfig(CalculatorEnvConfig):
    steps: int = Field(4, ge=1, description="Keys that an episode needs before the last one")
    partial_scores: bool = Field(False, description="Score an episode by its share of right keys, not by its outcome")


class KeysEnv(CalculatorEnv):
    """Conversations of ``steps`` checkable steps; +1 or -1 for all of them."""

    name = "keys"
    env_config_cls = KeysConfig
    eval_temperature = 1.0

    @classmethod
    def load(cls, config: KeysConfig) -> tuple[list[WordProblem], list[WordProblem]]:
        """Return the items; with a curriculum those to train on have every number of steps up to ``steps``."""
        levels = [config.steps] if config.curriculum_threshold is None else range(1, config.steps + 1)
        train = [row for steps in levels for row in cls.rows("train", ITEMS // len(levels), steps, config.seed)]
        return train, cls.rows("test", config.eval_size, config.steps, 0)

    @staticmethod
    def rows(split: str, size: int, steps: int, seed: int) -> list[WordProblem]:
        return keys(split, size, steps, seed)

    def reply(self, problem: WordProblem, messages: Messages) -> str | None:
        replies = tool_answers(messages)
        return None if messages[-1]["content"] == "=" else pressed(replies[-1] if replies else problem["question"])

    async def group_of(self, item: WordProblem, conversations: list[Conversation]) -> ScoredDataGroup:
        group = await super().group_of(item, conversations)
        values = [self.reached(item, one.messages) for one in conversations]
        self.percent_correct_buffer.extend(float(of_turns[-1] == 1.0) for of_turns in values)
        group["scores"] = [self.outcome(item, one) for one in conversations]
        group["group_overrides"].setdefault("turn_values", values)
        return group

    def outcome(self, problem: WordProblem, conversation: Conversation) -> float:
        share = self.reached(problem, conversation.messages)[-1]
        return share if self.config.partial_scores or share == 1.0 else -1.0

    async def eval_sample(self, problem: WordProblem, conversation: Conversation) -> dict[str, Any]:
        right = self.reached(problem, conversation.messages)[-1] == 1.0
        return {"messages": conversation.messages, "correct": right, "score": int(right)}

    def reached(self, problem: WordProblem, conversation: Messages) -> list[float]:
        """Return the share of right keys after each turn, from -1 for none to 1 for all that the item needs."""
        wanted = [*(KEYS[letter] for letter in problem["question"].split()[:-1:2]), "="]
        found, right = [], 0
        for key, turn in zip(wanted, turns_taken(conversation), strict=False):
            right += turn == key
            found.append(2 * right / len(wanted) - 1)
        return found


class GridEnv(KeysEnv):
    """Conversations of at least ``steps`` moves; +1 or -1 for whether the last goal is reached."""

    name = "grid"

    @staticmethod
    def rows(split: str, size: int, steps: int, seed: int) -> list[WordProblem]:
        return grids(split, size, steps, seed)

    def reply(self, problem: WordProblem, messages: Messages) -> str | None:
        *_, left = moved(problem["question"], turns_taken(messages))
        return left or None

    def reached(self, problem: WordProblem, conversation: Messages) -> list[float]:
        """Return by how much the last goal is nearer after each turn: 1 at the goal, -1 where it was at first."""
        taken = turns_taken(conversation)
        return [1 - 2 * distance(left) / problem["level"] for left in moved(problem["question"], taken)]


def turns_taken(conversation: Messages) -> list[str]:
    return [one["content"] for one in conversation if one["role"] == "assistant"]


def keys(split: str, size: int, steps: int, seed: int) -> list[WordProblem]:
    """Return ``size`` items of a split, whose level is ``steps``, in an order given by ``seed``."""
    rng, found = random.Random(f"{split} {steps} {seed}"), dict[str, WordProblem]()
    while len(found) < size:
        parts = [f"{rng.choice(list(KEYS))} {rng.randint(1, 9)}" for _ in range(steps)]
        question = " ".join([*parts, str(rng.randint(10, 99))])
        if split_of(question) == split:
            found.setdefault(question, {"question": question, "answer": f"#### {steps}", "level": steps})
    return list(found.values())


def pressed(text: str) -> str:
    """Return what is left of ``b 3 f 2 17`` after the right key; the number, when it is alone."""
    letter, *rest = text.split()
    if not rest:
        return letter
    a, b = int(rest[-1]), int(rest[0])
    return " ".join([*rest[1:-1], str({"+": a + b, "-": a - b, "*": a * b}[KEYS[letter]] % 100)])


def grids(split: str, size: int, steps: int, seed: int) -> list[WordProblem]:
    """Return ``size`` items of a split that need ``steps`` moves, in an order given by ``seed``; fewer where there are
    not so many.
    """
    rng, found = random.Random(f"grids {split} {steps} {seed}"), dict[str, WordProblem]()
    for _ in range(100 * size):
        goals, left = list[str](), steps
        while left:
            x, y = (rng.randint(-REACH, REACH) for _ in "xy")
            if 0 < abs(x) + abs(y) <= left:
                goals.append(f"{x:+}{y:+}")
                left -= abs(x) + abs(y)
        question = " ".join(goals)
        if len(found) < size and split_of(question) == split:
            found.setdefault(question, {"question": question, "answer": f"#### {steps}", "level": steps})
    return list(found.values())


def distance(text: str) -> int:
    """Return how many moves ``+2-1 +0+1`` needs."""
    return sum(map(int, re.findall(r"\d+", text)))


def moved(text: str, taken: Sequence[str]) -> Iterator[str]:
    """Yield what ``+2-1 +0+1`` is after each move; what is no move changes nothing."""
    for move in taken:
        goal, *later = text.split()
        x, y = map(int, re.findall(r"[-+]\d+", goal))
        right, up = MOVES.get(move, (0, 0))
        now = [f"{x - right:+}{y - up:+}"] if (x, y) != (right, up) else []
        text = " ".join([*now, *later])
        yield text


@dataclass(frozen=True)
class KeysRecipe(CalculatorRecipe):
    """First policy, which presses a right key with the probability ``right``, plus ``spread`` for one half of the
    letters and minus for the other; else one of the wrong ones of ``keys``.
    """

    name: ClassVar[str] = "small-policy-keys"
    env: ClassVar[str] = "KeysEnv"
    more_turns: ClassVar[int] = 1
    turn_tokens: ClassVar[int] = 32  # at most, with the reply

    task_steps: int = 4
    right: float = 0.575
    spread: float = 0.125
    keys: str = "+-*"
    problems: int = 4000
    vocabulary: int = 320
    steps: int = 600
    batch_size: int = 32

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        return [self.presses(row, rng) for row in keys("train", self.problems, self.task_steps, 500_000 + seed)]

    def presses(self, row: WordProblem, rng: random.Random) -> Chat:
        chat, left = [message("user", row["question"])], row["question"]
        while " " in left:
            key, known = KEYS[left[0]], left[0] in "abcd"
            if rng.random() >= self.right + (self.spread if known else -self.spread):
                key = rng.choice(self.keys.replace(key, ""))
            left = pressed(left)
            chat += [message("assistant", key), message("tool", left)]
        return [*chat, message("assistant", "=")]


class LongKeysRecipe(KeysRecipe):
    """For 16 keys, whose episodes have up to 640 tokens."""

    positions: ClassVar[int] = 1024
    turn_tokens: ClassVar[int] = 40


@dataclass(frozen=True)
class GridRecipe(CalculatorRecipe):
    """First policy, which moves towards the next goal with the probability ``right``, else elsewhere."""

    name: ClassVar[str] = "small-policy-grid"
    env: ClassVar[str] = "GridEnv"
    more_turns: ClassVar[int] = 6
    turn_tokens: ClassVar[int] = 44

    task_steps: int = 6
    right: float = 0.7
    problems: int = 4000
    vocabulary: int = 320
    steps: int = 600
    batch_size: int = 32

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        return [self.moves(row, rng) for row in grids("train", self.problems, self.task_steps, 500_000 + seed)]

    def moves(self, row: WordProblem, rng: random.Random) -> Chat:
        chat, left = [message("user", row["question"])], row["question"]
        for _ in range(self.task_steps + self.more_turns):
            near = {move: distance(*moved(left, [move])) < distance(left) for move in MOVES}
            good = rng.random() < self.right
            move = rng.choice([move for move, nearer in near.items() if nearer == good])
            [left] = moved(left, [move])
            chat += [message("assistant", move), message("tool", left)]
            if not left:
                break
        return chat[:-1]
