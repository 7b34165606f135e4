"""Which samples a page shows, and that it stays small; and how long series are shortened."""

import itertools
import math
import re

import orjson
import pytest
from omegaconf import OmegaConf

from helpers.runs import make_run, write_lines
from helpers.seeded_runs import healthy_run
from recipe.atropos.config.compose import load_config
from recipe.atropos.report.curves import buckets, decimated, spread
from recipe.atropos.report.run_history import read_history
from recipe.atropos.report.samples import CHARACTERS, ROWS, chosen_rows, items, rollouts_of, samples, shortened
from recipe.atropos.report.token_view import rows_of_step
from recipe.atropos.run.folder import RunDir


def row(score, uid, output):
    return {"score": score, "uid": str(uid), "output": output, "input": "?"}


def test_best_worst_and_other_groups_are_chosen_each_answer_once():
    rows = [row(score, uid, f"{score}") for uid, score in itertools.product(range(6), (0.0, 0.5, 1.0))]
    rows += [row(2.0, 9, "best"), row(2.0, 9, "best"), row(-1.0, 9, "worst")]
    chosen = chosen_rows(rows, limit=8)
    assert [each["output"] for each in chosen[:2]] == ["best", "worst"]
    assert [each["output"] for each in chosen].count("best") == 1
    assert {each["uid"] for each in chosen} == {"9", "0", "1", "2", "3", "4", "5"} and len(chosen) == 8


def test_a_long_text_keeps_its_ends_and_says_what_is_left_out():
    text = "a" * 9_000 + "b" * 9_000
    short = shortened(text)
    told = re.search(r" \[\.\.\. ([\d,]+) characters left out \.\.\.\] ", short)
    assert len(short) <= CHARACTERS and short[0] == "a" and short[-1] == "b"
    assert int(told[1].replace(",", "")) == len(text) - (len(short) - len(told[0]))
    assert shortened(short) == short, "an item's answer may be one that was shortened when it was read"


def test_rows_of_long_answers_are_not_all_kept_whole(tmp_path):
    """Those that samples are chosen from are: their tokens are found by the text."""
    run = make_run(tmp_path, steps=3)
    run.rollouts.mkdir()
    rows = [row(n / 64, n // 8, f"{n:02}" + "long" * 15_000) for n in range(64)]
    for step in (1, 2, 3):
        write_lines(run.rollouts / f"{step}.jsonl", rows)
    found = rollouts_of(read_history(run.path))
    assert sum(len(each["output"]) for kept in found.values() for each in kept) < 3 * (ROWS * 60_002 + 64 * 4_000)
    assert [each["output"] for each in chosen_rows(found[2])] == [each["output"] for each in chosen_rows(rows)]


def test_samples_have_tokens_with_mask_logprob_and_advantage(healthy):
    found = samples(healthy, rollouts_of(healthy))
    assert found["note"] == "" and {each["step"] for each in found["rows"]} == {1, 12, 24, 36, 48, 60}
    for each in found["rows"]:
        assert "".join(each["pieces"]) == each["answer"]
        assert len(each["mask"]) == len(each["logprobs"]) == len(each["advantages"]) == len(each["pieces"])
        assert set(each["mask"]) == {"1"} and max(each["logprobs"]) <= 0
        assert each["origin"] == "GRPO"
        assert {advantage > 0 for advantage in each["advantages"]} == {each["score"] > 0}
    # Items show how held-out answers changed.
    changed = items(healthy, rollouts_of(healthy))[0]
    assert changed["kind"] == "held out" and [answer["at"] for answer in changed["answers"]] == [0, 60]
    assert changed["answers"][0]["score"] < changed["answers"][1]["score"]
    assert changed["answers"][0]["answer"] != changed["answers"][1]["answer"]


def test_rows_of_a_step_are_those_that_were_trained_on(tmp_path, model_path):
    """Not those of a version that was too old then, or of none that was pushed."""
    given = [f"actor_rollout_ref.model.path={model_path}", "trainer.atropos.max_staleness=1", f"run.dir={tmp_path}"]
    own = {"tokens": [[5, 6, 7]] * 2, "masks": [[-100, 6, 7]] * 2, "scores": [0.0, 1.0], "env_id": 0}
    known = [own | {"group_overrides": {"policy_version_min": [version] * 2}} for version in (-1, 7, 8, 9)]
    groups, config, run = [*known, own], load_config(given), RunDir(tmp_path)
    assert [*rows_of_step(config, 10, groups).non_tensor_batch["uid"]] == ["2"] * 2 + ["3"] * 2
    # The run was resumed with another max_staleness: at that step it was 2, 0, or there was none.
    for line, uids in (
        ({"atropos/staleness/max": 2.0}, "112233"),
        ({"atropos/staleness/max": 0.0}, "33"),
        ({"atropos/staleness/max": 2.0, "atropos/rows_with/unknown_version": 2.0}, "11223344"),
    ):
        write_lines(run.metrics, [{"step": 9}, {"step": 10, **line}])
        assert "".join(rows_of_step(config, 10, groups).non_tensor_batch["uid"]) == uids
    run.metrics.unlink()
    OmegaConf.set_struct(config, False)
    del config.trainer.atropos["max_staleness"]  # as in an earlier version
    assert len(rows_of_step(config, 10, groups)) == 8


def test_rollouts_are_read_where_the_run_has_written_them(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    run.config.write_text(f"trainer: {{rollout_data_dir: {tmp_path / 'texts'}}}")
    for folder, output in ((tmp_path / "texts", "there"), (run.rollouts, "of a run that was moved")):
        folder.mkdir()
        write_lines(folder / "1.jsonl", [row(1.0, 0, output)])
        assert [each["output"] for each in rollouts_of(read_history(run.path))[1]] == [output]


def test_without_batches_the_page_says_why_it_has_no_tokens(tmp_path):
    run = healthy_run(tmp_path)
    (run / "trajectories/trajectories.db").unlink()
    history = read_history(run)
    found = samples(history, rollouts_of(history))
    assert found["rows"] and not any("pieces" in each for each in found["rows"])
    assert found["note"].startswith("Tokens are not shown: ") and "trajectories" in found["note"]


def test_samples_that_an_environment_wrote_otherwise_do_no_harm(tmp_path):
    """The file is the environment's: NaN for a score, half of a character, other forms, a line that a kill cut."""
    run = healthy_run(tmp_path)
    for at in (0, 60):
        path = run / f"evaluation/{at}/gsm8k/samples.jsonl"
        lines = ['{"question": "why?", "answer": "\\ud83d", "score": NaN}', '{"messages": ["a", "b"]}', "1", '{"messa']
        path.write_text("\n".join([*lines, path.read_text()]))
    history = read_history(run)
    found = {item["prompt"]: item for item in items(history, {})}
    assert orjson.loads(orjson.dumps(found)) == found
    assert [answer["score"] for answer in found["why?"]["answers"]] == [None, None]
    assert len(found) > 12, "the others are there"


# ---------------------------------------------------------------- long series: short, and no spike is lost


@pytest.mark.parametrize("n", [0, 1, 7, 400, 401, 12_345])
def test_buckets_cover_everything_once_and_in_order(n):
    parts = buckets(n, 400)
    assert [i for part in parts for i in range(n)[part]] == list(range(n)) and len(parts) <= 400


def test_series_are_short_and_no_spike_is_lost():
    """A short one is as it was, and a NaN is missing; of the others the first and the last are there."""
    assert decimated([1, 2, 3], [0.5, math.nan, None]) == {"x": [1, 2, 3], "y": [0.5, None, None]}
    values = [1.0] * 10_000
    values[7_777] = 50.0
    found = decimated(range(10_000), values, limit=100)
    assert len(found["x"]) == 100 and found["x"][-1] == 9_999
    assert max(found["high"]) == 50.0 and max(found["low"]) == 1.0 and max(found["y"]) == pytest.approx(1.49)
    assert spread(range(100), 3) == [0, 50, 99] and spread("ab", 5) == ["a", "b"] and spread([], 5) == []
