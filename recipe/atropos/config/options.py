"""The options that name a configuration on a command line: of train, doctor and plan alike."""

import argparse
from pathlib import Path

from recipe.atropos.config.compose import quoted


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", help="a file of config/preset, without .yaml; demo runs on two CPU cores")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of your own, over trainer.yaml and the preset")
    parser.add_argument("--steps", type=int, help="updates to train (trainer.total_training_steps)")
    parser.add_argument("--run-dir", help="folder of the run (run.dir); an unfinished run there is resumed")
    parser.add_argument("--model", help="local folder or hub name (actor_rollout_ref.model.path)")
    parser.add_argument(
        "--resume-from", metavar="RUN[@STEP]", help="begin with another run's weights (run.resume_from)"
    )
    parser.add_argument("--gpus", type=int, help="ranks of the trainer (trainer.n_gpus_per_node); on a CPU, processes")
    parser.add_argument("--seed", type=int, help="of the data, the sampling and the small policy (seed)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")


def compose_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return these options as key=value; the user's own key=value come last and win."""
    named = {
        "preset": arguments.preset,
        "config": arguments.config and quoted(Path(arguments.config).resolve()),
        "trainer.total_training_steps": arguments.steps,
        "run.dir": arguments.run_dir and quoted(Path(arguments.run_dir).resolve()),
        "actor_rollout_ref.model.path": arguments.model and quoted(arguments.model),
        "run.resume_from": arguments.resume_from and quoted(arguments.resume_from),
        "trainer.n_gpus_per_node": arguments.gpus,
        "seed": arguments.seed,
    }
    return [f"{key}={value}" for key, value in named.items() if value is not None] + arguments.overrides
