"""A small policy for two environments at once, made from scratch: word problems, and sums of reasoning-gym.

    python -m recipe.atropos.demo.policies small-policy-two-tasks --output DIR [--seed N]

The same small Qwen2 as ``small_policy``, and half of its training data is the same. The other half are sums of two or
three digits (reasoning-gym's ``chain_sum``), solved step by step, with the result between ``<answer>`` and
``</answer>``; these solutions have another flaw: most of those with three digits stop after the second. So there are
two habits to correct, each in its own environment.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recipe.atropos.demo.small_policy import Chat, Recipe, greedy_accuracy

TASK, SETTINGS = "chain_sum", "{min_terms: 2, max_terms: 3, max_digits: 1}"
HELD_OUT = 256

_TEACHING_SEED = 500_000  # distinct from those of the environments


@dataclass(frozen=True)
class TwoTaskRecipe(Recipe):
    """Recipe: ``forgotten_term`` is the share of flawed sums among those of three digits."""

    name: ClassVar[str] = "small-policy-two-tasks"

    steps: int = 900
    forgotten_term: float = 0.65

    def chats(self, seed: int, rng: random.Random) -> list[Chat]:
        from recipe.atropos.environments.reasoning import dataset, held_out  # imported here: atroposlib takes seconds

        kept_back = {problem["question"] for problem in held_out(TASK, SETTINGS, HELD_OUT)}
        sums = [
            [
                {"role": "user", "content": problem["question"]},
                {"role": "assistant", "content": sum_solution(problem["question"], rng, self.forgotten_term)},
            ]
            for problem in dataset(TASK, SETTINGS, self.problems, _TEACHING_SEED + seed)
            if problem["question"] not in kept_back
        ]
        chats = [*super().chats(seed, rng), *sums]
        rng.shuffle(chats)
        return chats

    def accuracies(self, folder: Path) -> dict[str, float]:
        from recipe.atropos.environments.reasoning import dataset, held_out, score

        task = dataset(TASK, SETTINGS, 1, 0)
        sums = greedy_accuracy(
            folder, held_out(TASK, SETTINGS, HELD_OUT), lambda problem, text: score(task, text, problem) == 1
        )
        return {**super().accuracies(folder), "sums": sums}


def sum_solution(question: str, rng: random.Random, forgotten_term: float) -> str:
    """Return ``4 - 1 = 3, 3 - 7 = -4 <answer>-4</answer>``, or only its first step."""
    terms = [int(term.replace(" ", "")) for term in re.findall(r"(?:[-+] )?\d+", question)]
    if len(terms) == 3 and rng.random() < forgotten_term:
        terms.pop()
    result, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{result} {'-' if term < 0 else '+'} {abs(term)} = {result + term}")
        result += term
    return f"{', '.join(steps)} <answer>{result}</answer>"
