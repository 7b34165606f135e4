"""docs/architecture.md walks a group, a weight and a run in the order in which a real run calls its functions."""

import os
import re
import sys

import pytest

from helpers import ROOT
from helpers.environments import item_env
from recipe.atropos.utils.process import start_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = (ROOT / "docs/architecture.md").read_text()
# The functions of each walk's numbered steps, as the module and the name in it.
WALKS = {
    title: [
        f"recipe.atropos.{file.replace('/', '.')}:{name}"
        for step in re.findall(r"^\d+\. .*?(?=^\d+\. |^\S|\Z)", text, re.DOTALL | re.MULTILINE)
        for file, name in re.findall(r"`([\w/]+)\.py:([\w.]+)`", step)
    ]
    for title, text in re.findall(r"^## The life of (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}
# What the page says is for other runs: with a reward bridge, with samples that prove the version, on a terminal.
OTHER_RUNS = {"shape", "probe_servers", "LiveView", "RunReader"}
# A function's place is where it is called first; of one that waits for what the step before it sends, where it returns.
WAITS = {"DataSource.next_batch"}


@pytest.fixture(scope="module")
def calls(tmp_path_factory, model_path):
    """{function: {event: times}} of a run of one step, in all of its processes."""
    folder = tmp_path_factory.mktemp("walks")
    options = ["--preset=demo", f"--model={model_path}", "--steps=1", f"--run-dir={folder / 'run'}"]
    options += [f"environment.target={item_env.__file__}:ItemEnv", "environment.evaluate=false"]
    options += ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2"]
    program = "import sys; from recipe.atropos.launch_services import main; sys.exit(main())"
    env = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/helpers/recorded_calls"), os.environ.get("PYTHONPATH", "")]),
        "RECORDED_CALLS": str(folder / "calls"),
        "RECORDED_FUNCTIONS": " ".join(sum(WALKS.values(), [])),
    }
    command = [sys.executable, "-c", program, *options]
    launcher = start_service("launcher", command, log_path=folder / "log", cwd=folder, env=env)
    try:
        assert launcher.process.wait(1000) == 0, launcher.tail(4000)
    finally:
        launcher.stop(grace=20)
    times = {}
    for line in (folder / "calls").read_text().splitlines():
        event, time, function = line.split()
        times.setdefault(function, {}).setdefault(event, []).append(int(time))
    return times


@pytest.mark.parametrize("walk", WALKS)
def test_architecture_walks_in_the_order_of_the_calls(calls, walk):
    """From the call of its first function on; what was called before for another reason does not count."""
    named = [function for function in dict.fromkeys(WALKS[walk]) if function.partition(":")[2] not in OTHER_RUNS]
    begun = min(calls[named[0]]["begun"])
    first = {}
    for function in named:
        event = "ended" if function.partition(":")[2] in WAITS else "begun"
        first[function] = min((time for time in calls[function][event] if time >= begun), default=None)
    assert len(named) > 5 and [function for function in named if first[function] is None] == []
    assert sorted(named, key=first.get) == named
