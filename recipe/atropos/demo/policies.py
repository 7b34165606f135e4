"""The small policies by name: ``python -m recipe.atropos.demo.policies NAME [--seed N] [--output DIR]``

Prints the folder of a policy, which is made once for a seed and cached (``files.cache_root``); with ``--output``
it is made there, and its accuracy is measured.
"""

import argparse
from pathlib import Path

from recipe.atropos.demo.calculator_policy import CalculatorRecipe
from recipe.atropos.demo.code_policy import CodeRecipe
from recipe.atropos.demo.small_policy import Recipe, ensure_small_policy, make_small_policy
from recipe.atropos.demo.terse_policy import TerseRecipe
from recipe.atropos.demo.two_task_policy import TwoTaskRecipe

RECIPES = {
    recipe.name: recipe for recipe in (Recipe(), TerseRecipe(), TwoTaskRecipe(), CalculatorRecipe(), CodeRecipe())
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small policy from scratch, and print its folder.")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="make it in this folder, and measure it; default: the cache")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.name]
    if arguments.output is None:
        print(ensure_small_policy(seed=arguments.seed, recipe=recipe))
        return
    report = make_small_policy(arguments.output, arguments.seed, recipe)
    print(
        f"{report['parameters']} parameters, taught in {report['seconds']:.0f} s, last loss {report['last_loss']:.3f}"
    )
    for kind, share in recipe.accuracies(arguments.output).items():
        print(f"greedy, held out, {kind}: {share:.1%} right")


if __name__ == "__main__":
    main()
