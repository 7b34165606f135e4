"""docs/architecture.md walks a group, a weight and a run in the order in which a real run calls its functions."""

import os
import re
import sys

import pytest

from helpers import ROOT
from helpers.environments import length_env
from recipe.atropos.utils.process import start_service

WALKS = dict(
    re.findall(r"## The life of (a [\w ]+)\n(.*?)(?=\n## |\Z)", (ROOT / "docs/architecture.md").read_text(), re.S)
)
NAMED = {walk: re.findall(r"`([\w/]+)\.py:([\w.]+)`", text) for walk, text in WALKS.items()}
# What this run has no use for, as the page says.
UNUSED = {
    "adapter/shaping:shape",
    "weight_sync/probe:Probe.verify",
    "verl_ext/engines:PushedWeights",
}
# Called before there is anything to return.
WAITING = {"sources/numbered:DataSource.next_batch"}


def in_module(file, name):
    return f"recipe.atropos.{file.replace('/', '.')}:{name}"


@pytest.fixture(scope="module")
def calls(tmp_path_factory, model_path):
    """(event, time, function) of a run of one step, in all of its processes."""
    folder = tmp_path_factory.mktemp("walks")
    options = ["--preset=demo", f"--model={model_path}", "--steps=1", "--run-dir=run", "environment.evaluate=false"]
    options += [f"environment.target={length_env.__file__}:LengthEnv", "evaluation.every=null"]
    options += ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "environment.args={}"]
    code = "import sys; from recipe.atropos.launch_services import main; sys.exit(main())"
    env = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/helpers/recorded_calls"), os.environ.get("PYTHONPATH", "")]),
        "RECORDED_CALLS": str(folder / "calls"),
        "RECORDED_FUNCTIONS": " ".join(in_module(*each) for walk in NAMED.values() for each in walk),
    }
    launcher = start_service(
        "launcher", [sys.executable, "-c", code, *options], log_path=folder / "log", cwd=folder, env=env
    )
    try:
        assert launcher.process.wait(300) == 0, launcher.tail(4000)
    finally:
        launcher.stop(grace=20)
    return [line.split() for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.timeout(400)
def test_architecture_walks_in_the_order_of_the_calls(calls, walk):
    """A function's place is where it is called first, once the walk has begun."""
    print(walk)
    for c in sorted(calls, key=lambda c: int(c[1])):
        print(c)
