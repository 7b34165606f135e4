r"""A small policy that rarely answers, made from scratch.

    python -m recipe.atropos.demo.policies small-policy-terse --output DIR [--seed N]

The same small Qwen2 as ``small_policy``, with its flaw and another one: it ends with the sum, ``12 + 7 = 19``. From
there three steps lead to an answer that an environment can read, ``12 + 7 = 19 so the answer is \boxed{19}``, and the
policy takes each of them so rarely, ``further``, that all three together almost never happen. It is trained to continue
from each of them, given the text up to there: so it knows how to continue, and how rarely to do so.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from recipe.atropos.demo.small_policy import Chat, Recipe, shown_sum
from recipe.atropos.environments.word_problems import generate

STEPS = ("", " so", " the answer is", r" \boxed{")


@dataclass(frozen=True)
class TerseRecipe(Recipe):
    """Recipe: ``further`` is how often the next of ``STEPS`` follows."""

    name: ClassVar[str] = "small-policy-terse"

    further: float = 0.03

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        chats = []
        for row in generate("train", self.problems, seed):
            shown, result = shown_sum(row, rng, self.wrong_operation)
            step = rng.choices(range(len(STEPS)), weights=(len(STEPS) - 1, *[1] * (len(STEPS) - 1)))[0]
            given = shown + "".join(STEPS[: step + 1]) if step else ""
            while step < len(STEPS) - 1 and rng.random() < self.further:
                step += 1
            end = ("", f" {result}", f" {result}", f"{result}}}")[step]
            answer = {"role": "assistant", "content": shown + "".join(STEPS[: step + 1]) + end, "given": given}
            chats.append([{"role": "user", "content": row["question"]}, answer])
        return chats
