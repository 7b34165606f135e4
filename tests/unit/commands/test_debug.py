"""Batches that were recorded: where they end, and the colors of their tokens."""

import json

import pytest

from recipe.atropos.commands.inspect import style_of
from recipe.atropos.sources.numbered import DataSourceError
from recipe.atropos.sources.recorded import RecordedSource
from recipe.atropos.trajectory_api import records


def test_colors_tell_mask_sign_size_and_unlikely_tokens_apart():
    token = {"trained": True, "advantage": 1.0, "logprob": -0.1}
    good, bad = style_of(token, 1.0), style_of(token | {"advantage": -1.0}, 1.0)
    small, none = style_of(token | {"advantage": 0.1}, 1.0), style_of(token | {"advantage": 0.0}, 1.0)
    green, red = good.bgcolor.get_truecolor(), bad.bgcolor.get_truecolor()
    assert green.green > green.red and red.red > red.green and small.bgcolor.get_truecolor().green < green.green
    assert len({none.bgcolor.get_truecolor().red, none.bgcolor.get_truecolor().green}) == 1
    assert style_of(token | {"trained": False, "advantage": None}, 1.0).bgcolor is None
    assert style_of(token | {"logprob": -4.0}, 1.0).underline and not good.underline


def test_a_recording_that_ends_says_where(tmp_path):
    group = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}
    lines = [{"number": number, "batch": [group | {"scores": [float(number)]}]} for number in (3, 4)]
    exported = tmp_path / "batches.jsonl"
    exported.write_text("\n".join(map(json.dumps, lines)))
    records.import_(tmp_path / "store", exported)
    with RecordedSource(tmp_path / "store", after=3) as source:
        number, [read] = source.next_batch()
        assert number == 4 and read.scores.tolist() == [4.0] and read.tokens.tolist() == [1, 2]
        with pytest.raises(DataSourceError, match="has no such batch; it has batches 3 to 4"):
            source.next_batch()
    with pytest.raises(DataSourceError, match="give the folder of a server"):
        RecordedSource(tmp_path, after=0).next_batch()
