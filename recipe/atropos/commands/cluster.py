"""Check the nodes of a Ray cluster, or print a job: ``verl-atropos cluster check|sbatch|skypilot|kuberay [OPTIONS]``

``check`` joins the cluster of ``ray_kwargs.ray_init.address`` or RAY_ADDRESS; ``--nodes N --wait SECONDS`` waits until
Ray knows so many. Exit status 0 only if every check passed on every node. The others print a script for SLURM, a task
for SkyPilot or a RayJob for KubeRay, which train with these options on N nodes.
"""

import argparse
import importlib.metadata
import importlib.resources
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.text import Text

from recipe.atropos.config.compose import add_options, compose_overrides, given_values
from recipe.atropos.config.keys import keys_of
from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.config.preflight import check_rules
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launcher.run_plan import names_model, plan_run
from recipe.atropos.utils.hosts import cluster_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check", "sbatch", "skypilot", "kuberay"))
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the cluster; default: %(default)s")
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait until they have joined; default: %(default)g",
    )
    add_options(parser)


def main(given: argparse.Namespace) -> int:
    """Return exit status 0 only if every check passed."""
    overrides = compose_overrides(given)
    if given.action == "check":
        return check(overrides, given.nodes, given.wait)
    print(job(given.action, given.nodes, overrides))
    return 0


def job(kind: str, nodes: int, overrides: Sequence[str]) -> str:
    """Return the job for "sbatch", "skypilot" or "kuberay" that trains with ``overrides`` on so many nodes.

    Raises:
        ConfigurationError: there is no node, or whenever it is requeued, it would begin anew.
    """
    given = {key: value for item in given_values(overrides) for key, value in keys_of(dict([item]))}
    mode = given.get("trainer.resume_mode", "auto")
    requeued = f"trainer.resume_mode={mode}: a job that is requeued would begin there again; leave it out"
    check_rules([(nodes < 1, f"--nodes {nodes}: give 1 or more"), (mode != "auto", requeued)])
    template = importlib.resources.files("recipe.atropos.config").joinpath("jobs", kind).read_text()
    values = {
        "NODES": str(nodes),
        "OTHERS": str(nodes - 1),
        "OPTIONS": shlex.join(overrides),
        "PYTHON": shlex.quote(sys.executable),
        "FOLDER": shlex.quote(str(Path.cwd())),
        "RAY": importlib.metadata.version("ray"),
    }
    for name, value in values.items():
        template = template.replace(f"<{name}>", value)
    return template.rstrip()


def check(overrides: Sequence[str], nodes: int, wait: float) -> int:
    """Print each check of each node; return 0 if all passed, else 1.

    Raises:
        ConfigurationError: no cluster is joined.
    """
    config = plan_run([*overrides, *([] if names_model(overrides) else [f"{MODEL_KEY}=model"])], begins=False).config
    if not cluster_address(config.ray_kwargs.ray_init):
        raise ConfigurationError("no Ray cluster is joined: set ray_kwargs.ray_init.address=HEAD:6379, or RAY_ADDRESS")
    from recipe.atropos.launcher.cluster_check import check_nodes, wait_for_nodes
    from recipe.atropos.utils.local_ray import start_ray

    start_ray(**OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True) | {"log_to_driver": False})
    findings = [*wait_for_nodes(nodes, wait), *check_nodes(config)]
    console, width = Console(highlight=False), max(len(finding.node) for finding in findings)
    for finding in sorted(findings, key=lambda finding: finding.node):
        state = ("FAILED", "bold red") if finding.problem else ("ok    ", "green")
        line = f" {finding.node:<{width}} {finding.check:<11}{finding.problem}"
        console.print(Text.assemble(state, line.rstrip()), soft_wrap=True)
    return int(any(finding.problem for finding in findings))
