"""A small policy that writes one-line programs, made from scratch.

    python -m recipe.atropos.demo.policies small-policy-code --output DIR [--seed N]

The same small Qwen2 as ``small_policy``, trained on the generated problems of ``environments.code_problems``. The
training data is flawed on purpose: if a problem asks for numbers less than, or at most, a limit, most programs compare
the other way round. So the policy writes valid Python, copies names and numbers, and gets about half of held-out
problems right with greedy decoding.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recipe.atropos.demo.small_policy import Chat, Recipe, greedy_accuracy
from recipe.atropos.environments.code_problems import SYNTHETIC, generate, job, load_problems
from recipe.atropos.environments.sandbox.runner import Sandbox


@dataclass(frozen=True)
class CodeRecipe(Recipe):
    """Recipe: ``turned_round`` is the share of flawed programs among those that compare with < or <=."""

    name: ClassVar[str] = "small-policy-code"

    steps: int = 400
    batch_size: int = 48
    learning_rate: float = 3e-3
    problems: int = 10_000
    turned_round: float = 0.6

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        return [
            [
                {"role": "user", "content": row["text"]},
                {"role": "assistant", "content": program(row["code"], rng, self.turned_round)},
            ]
            for row in generate("train", self.problems, seed)
        ]

    def accuracies(self, folder: Path) -> dict[str, float]:
        problems = load_problems(SYNTHETIC, "test", None, 256, 0, shown_tests=0)
        with Sandbox() as sandbox:
            return {"programs": greedy_accuracy(folder, problems, lambda *pair: sandbox.check(job(*pair)).passed)}


def program(code: str, rng: random.Random, turned_round: float) -> str:
    """Return the training text for a problem with this solution, a block of code."""
    if rng.random() < turned_round:
        code = code.replace("<", ">")
    return f"```python\n{code}\n```"
