r"""A small policy that calls a calculator, made from scratch.

    python -m recipe.atropos.demo.policies small-policy-calculator --output DIR [--seed N]

The same small Qwen2 as ``small_policy``, trained on word problems of two or three steps whose arithmetic the tool of
``environments.calculator_tool`` does: one call per turn, the tool's reply next, and the final number in ``\boxed{}``.
The training data is flawed on purpose: before a third step the second result is usually boxed and the call omitted;
sometimes a digit is copied wrongly, or a call is malformed, answered with the tool's error, and written again. So the
policy knows the syntax and how to copy numbers, and gets between a fifth and a half of held-out problems right with
greedy decoding.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recipe.atropos.demo.small_policy import Chat, Recipe, boxes_the_answer, greedy_accuracy, greedy_answers
from recipe.atropos.environments.calculator_tool import CLOSE, OPEN, answer
from recipe.atropos.environments.word_problems import SYNTHETIC_STEPS, generate


@dataclass(frozen=True)
class CalculatorRecipe(Recipe):
    """Recipe: ``forgotten_call`` is a share of three-step problems, ``miscopied`` and ``malformed`` of calls."""

    name: ClassVar[str] = "small-policy-calculator"

    steps: int = 450
    batch_size: int = 48
    learning_rate: float = 3e-3
    problems: int = 8000
    vocabulary: int = 768
    forgotten_call: float = 0.6
    miscopied: float = 0.03
    malformed: float = 0.03
    wrong_operation: float = 0.0

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        rows = generate("train", self.problems, seed, SYNTHETIC_STEPS)
        return [demonstration(row, rng, self) for row in rows]

    def accuracies(self, folder: Path) -> dict[str, float]:
        problems = generate("test", 256, dataset=SYNTHETIC_STEPS)
        found = greedy_accuracy(folder, problems, boxes_the_answer, answers_with_tool)
        return {"word problems with a calculator": found}


def demonstration(row: dict[str, str], rng: random.Random, recipe: CalculatorRecipe) -> Chat:
    """Return a conversation about a problem with the tool's own replies and the recipe's flaws."""
    chat = [{"role": "user", "content": row["question"]}]

    def call(expression: str) -> str:
        content = f"{OPEN}{expression}{CLOSE}"
        chat.append({"role": "assistant", "content": content})
        chat.append({"role": "tool", "content": answer(content)})
        return chat[-1]["content"]

    steps = re.findall(r"<<(\d+)([-+*])(\d+)=", row["answer"])
    result = steps[0][0]
    for number, (_, operator, operand) in enumerate(steps, 1):
        if number == 3 and rng.random() < recipe.forgotten_call:
            break
        if rng.random() < recipe.malformed:
            call(f"{result} {operator} ")
        if rng.random() < recipe.miscopied:
            place = rng.randrange(len(operand))
            operand = operand[:place] + rng.choice("123456789") + operand[place + 1 :]
        result = call(f"{result} {operator} {operand}")
    chat.append({"role": "assistant", "content": rf"\boxed{{{result}}}"})
    return chat


def answers_with_tool(folder: Path, chats: list[Chat], max_turns: int = 6) -> list[str]:
    """Return the last message of each conversation, continued by transformers and the tool alone."""
    for _ in range(max_turns):
        running = [chat for chat in chats if chat[-1]["role"] != "assistant"]
        for chat, text in zip(running, greedy_answers(folder, running) if running else (), strict=True):
            chat.append({"role": "assistant", "content": text})
            if (reply := answer(text)) is not None:
                chat.append({"role": "tool", "content": reply})
    return [chat[-1]["content"] for chat in chats]
