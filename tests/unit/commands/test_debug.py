"""Batches that were recorded: where they end, and the colors of their tokens."""

import pytest

from recipe.atropos.commands.inspect import style_of
from recipe.atropos.data.recording import RecordedSource, recorded_steps, write_batch
from recipe.atropos.data_source import DataSourceError


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
    for step in (3, 4):
        write_batch(tmp_path, step, [{"tokens": [[step]]}])
    assert recorded_steps(tmp_path) == [3, 4]
    with RecordedSource(tmp_path, first_step=4) as source:
        assert len(source) == 1 and source.next_batch() == (4, [{"tokens": [[4]]}])
        with pytest.raises(DataSourceError, match="no batch of step 5 in .*: it holds steps 3 to 4"):
            source.next_batch()
