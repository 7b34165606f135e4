"""A recorded run: its batches train to the same weights without servers, and can be looked at token by token."""

import json
import shutil
import sys

import pytest
from rich.console import Console

from helpers.launchers import trained
from recipe.atropos.commands.inspect import show
from recipe.atropos.config.compose import load_complete
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.report.token_view import batch_of_step, find_row, rows_of_step
from recipe.atropos.run.folder import RunDir
from recipe.atropos.sources.numbered import DataSourceError
from recipe.atropos.trajectory_api import records
from recipe.atropos.utils.process import start_service


def replay(run):
    """The command, running."""
    command = [sys.executable, "-m", "recipe.atropos.utils.debug", "replay", str(run)]
    return start_service("replay", command, log_path=run.with_name(f"replay-{run.name}.log"), cwd=run.parent)


def ended(service, timeout):
    """(exit status, output), as soon as it has ended."""
    try:
        return service.process.wait(timeout), service.tail(4000)
    finally:
        service.stop(grace=3)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A demo run of two steps."""
    folder = tmp_path_factory.mktemp("recorded")
    options = ["--preset", "demo", "--steps", "2", "run.dir=run", "environment.evaluate=false", "trainer.save_freq=2"]
    trained(folder, *options, timeout=240)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replay_ends_with_the_runs_weights_bit_for_bit(recorded):
    """It is the batches and their order that the weights depend on: replayed in another order, they differ."""
    swapped = shutil.copytree(recorded, recorded.with_name("swapped"), ignore=shutil.ignore_patterns("trajectories"))
    exported, other = recorded.parent / "batches.jsonl", recorded.parent / "swapped.jsonl"
    records.export(recorded / "trajectories", exported)
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    assert [line["number"] for line in lines[:2]] == [1, 2]
    lines[0]["batch"], lines[1]["batch"] = lines[1]["batch"], lines[0]["batch"]
    other.write_text("\n".join(map(json.dumps, lines)))
    records.import_(swapped / "trajectories", other)
    replays = [replay(run) for run in (recorded, swapped)]
    try:
        (status, output), (status_swapped, output_swapped) = [ended(each, timeout=200) for each in replays]
    finally:
        for each in replays:
            each.stop(grace=0)
    assert status == 0 and "weights after step 2: the same, bit for bit" in output, output
    assert status_swapped == 1 and "weights after step 2 differ in" in output_swapped, output_swapped


@pytest.mark.slow
def test_what_is_no_run_or_no_such_sequence_is_said(tmp_path, recorded):
    with pytest.raises(ConfigurationError, match="give the folder of a run"):
        show(RunDir(tmp_path), 1, 0, 0, table=False, console=Console())
    with pytest.raises(DataSourceError, match="step 3: .* has trained no such step; it has steps 1 to 2"):
        batch_of_step(RunDir(recorded), 3)
    with pytest.raises(DataSourceError, match="no sequence 8 in group 0, which has 8 trained ones; groups are"):
        find_row(rows_of_step(load_complete(recorded / "config.yaml"), 1), 0, 8)
