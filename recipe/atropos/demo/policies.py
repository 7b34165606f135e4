r"""The small policies by name: ``python -m recipe.atropos.demo.policies NAME [--seed N]``

Prints the folder of a policy, which is made once for a seed and cached (``files.cache_root``). Each is the small Qwen2
of ``small_policy``, with other training data.
"""

import argparse
import os
import random
import re
import sys
from dataclasses import dataclass
from typing import ClassVar

from recipe.atropos.demo.small_policy import Chat, Recipe, ensure_small_policy, shown_sum
from recipe.atropos.environments import code_problems
from recipe.atropos.environments.calculator_tool import CLOSE, OPEN, answer
from recipe.atropos.environments.word_problems import SYNTHETIC_STEPS, generate

STEPS = ("", " so", " the answer is", r" \boxed{")


@dataclass(frozen=True)
class TerseRecipe(Recipe):
    r"""Recipe of a policy that rarely answers; ``further`` is how often the next of ``STEPS`` follows.

    It has the flaw of ``small_policy`` and another one: it ends with the sum, ``12 + 7 = 19``. From there three steps
    lead to an answer that an environment can read, ``12 + 7 = 19 so the answer is \boxed{19}``, and the policy takes
    each of them so rarely that all three together almost never happen. It is trained to continue from each of them,
    given the text up to there: so it knows how to continue, and how rarely to do so.
    """

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


TASK, SETTINGS = "chain_sum", "{min_terms: 2, max_terms: 3, max_digits: 1}"
HELD_OUT = 256

_TEACHING_SEED = 500_000  # distinct from those of the environments


@dataclass(frozen=True)
class TwoTaskRecipe(Recipe):
    """Recipe of a policy for two environments at once; ``forgotten_term``: the share of flawed sums of three digits.

    Half of its training data are those of ``small_policy``. The other half are sums of two or three digits
    (reasoning-gym's ``chain_sum``), solved step by step, with the result between ``<answer>`` and ``</answer>``; these
    solutions have another flaw: most of those with three digits stop after the second. So there are two habits to
    correct, each in its own environment.
    """

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


@dataclass(frozen=True)
class CalculatorRecipe(Recipe):
    r"""Recipe of a policy that calls a calculator; ``forgotten_call`` is a share of three-step problems, ``miscopied``
    and ``malformed`` of calls.

    The arithmetic of its word problems, of two or three steps, is done by the tool of ``environments.calculator_tool``:
    one call per turn, the tool's reply next, and the final number in ``\boxed{}``. The training data is flawed on
    purpose: before a third step the second result is usually boxed and the call omitted; sometimes a digit is copied
    wrongly, or a call is malformed, answered with the tool's error, and written again. So the policy knows the syntax
    and how to copy numbers, and gets between a fifth and a half of held-out problems right with greedy decoding.
    """

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


@dataclass(frozen=True)
class CodeRecipe(Recipe):
    """Recipe of a policy that writes one-line programs; ``turned_round`` is the share of flawed programs among those
    that compare with < or <=.

    Its problems are the generated ones of ``environments.code_problems``. The training data is flawed on purpose: if a
    problem asks for numbers less than, or at most, a limit, most programs compare the other way round. So the policy
    writes valid Python, copies names and numbers, and gets about half of held-out problems right with greedy decoding.
    """

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
            for row in code_problems.generate("train", self.problems, seed)
        ]


def program(code: str, rng: random.Random, turned_round: float) -> str:
    """Return the training text for a problem with this solution, a block of code."""
    if rng.random() < turned_round:
        code = code.replace("<", ">")
    return f"```python\n{code}\n```"


RECIPES = {
    recipe.name: recipe for recipe in (Recipe(), TerseRecipe(), TwoTaskRecipe(), CalculatorRecipe(), CodeRecipe())
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small policy from scratch, and print its folder.")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: busy cores have no time to spin
    try:
        print(ensure_small_policy(seed=arguments.seed, recipe=RECIPES[arguments.name]))
    except OSError as error:  # as in a home folder that is read-only
        sys.exit(f"{error}; set ATROPOS_CACHE to a folder that can be written")


if __name__ == "__main__":
    main()
