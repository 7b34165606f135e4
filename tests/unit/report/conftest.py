"""The demo's run, which nothing is wrong with."""

import pytest

from helpers.seeded_runs import healthy_run
from recipe.atropos.report.run_history import read_history


@pytest.fixture(scope="package")
def healthy(tmp_path_factory):
    return read_history(healthy_run(tmp_path_factory.mktemp("healthy")))
