"""A recorded run: its batches train to the same weights without servers, and can be looked at token by token."""

import json
import shutil
import sys

import pytest
from rich.console import Console

from recipe.atropos.commands.inspect import show
from recipe.atropos.config.compose import load_complete
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.report.token_view import batch_of_step, find_row, rows_of_step, tokens_of_row
from recipe.atropos.run.folder import RunDir
from recipe.atropos.sources.numbered import DataSourceError
from recipe.atropos.trajectory_api import records
from recipe.atropos.utils.process import start_service


def begun(folder, name, module, *arguments):
    """A module of the recipe, running."""
    command = [sys.executable, "-m", module, *arguments]
    return start_service(name, command, log_path=folder / f"{name}.log", cwd=folder)


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
    options = ["--preset", "demo", "--steps", "2", f"run.dir={folder / 'run'}", "environment.evaluate=false"]
    options += ["trainer.save_freq=2"]
    status, output = ended(begun(folder, "launch", "recipe.atropos.launch_services", *options), timeout=240)
    assert status == 0, output
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
    module, runs = "recipe.atropos.utils.debug", (recorded, swapped)
    replays = [begun(recorded.parent, f"replay-{run.name}", module, "replay", str(run)) for run in runs]
    try:
        (status, output), (status_swapped, output_swapped) = [ended(replay, timeout=200) for replay in replays]
    finally:
        for replay in replays:
            replay.stop(grace=0)
    assert status == 0 and "weights after step 2: the same, bit for bit" in output, output
    assert status_swapped == 1 and "weights after step 2 differ in" in output_swapped, output_swapped


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_inspect_shows_mask_logprob_and_advantage_of_each_token(recorded):
    batch = batch_of_step(RunDir(recorded), 2)
    config = load_complete(recorded / "config.yaml")
    rows = rows_of_step(config, 2)
    row = find_row(rows, 3, 1)

    class Names:
        def decode(self, ids):
            return f"<{ids[0]}>"

    tokens = list(tokens_of_row(rows, row, Names()))
    group = json.loads(batch[3].to_json())
    assert [token["id"] for token in tokens] == group["tokens"][1]
    assert [token["trained"] for token in tokens] == [mask != -100 for mask in group["masks"][1]]
    for token, mask, logprob in zip(tokens, group["masks"][1], group["inference_logprobs"][1], strict=True):
        assert token["text"] == f"<{token['id']}>"
        assert token["logprob"] == (None if mask == -100 else pytest.approx(logprob, abs=1e-6))
        assert (token["advantage"] is None) == (mask == -100)
    assert {token["advantage"] > 0 for token in tokens if token["trained"]} == {group["scores"][1] > 0}

    console = Console(record=True, width=100, color_system="truecolor", force_terminal=True)
    show(RunDir(recorded), 2, 3, 1, table=True, console=console)
    text = console.export_text()
    assert "step 2, group 3, sequence 1 of gsm8k: score" in text and "assistant" in text


@pytest.mark.slow
def test_what_is_no_run_or_no_such_sequence_is_said(tmp_path, recorded):
    with pytest.raises(ConfigurationError, match="give the folder of a run"):
        show(RunDir(tmp_path), 1, 0, 0, table=False, console=Console())
    with pytest.raises(DataSourceError, match="step 3: .* has trained no such step; it has steps 1 to 2"):
        batch_of_step(RunDir(recorded), 3)
    with pytest.raises(DataSourceError, match="no sequence 8 in group 0, which has 8 trained ones; groups are"):
        find_row(rows_of_step(load_complete(recorded / "config.yaml"), 1), 0, 8)
