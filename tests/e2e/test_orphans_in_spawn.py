"""A launcher that is killed in the start of a service leaves none."""

from __future__ import annotations

import time

import pytest

from helpers.launchers import families_in

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def families(tmp_path):
    with families_in(tmp_path) as make:
        yield make


@pytest.mark.slow
def test_orphans_of_a_launcher_killed_in_a_spawn_are_ended(families):
    """At moments spread over the start of a service."""
    launched = [(family := families(), family.launch("many")) for _ in range(5)]
    for number, (_, launcher) in enumerate(launched):
        assert launcher.stdout.readline() == b"ready\n"
        time.sleep(0.013 * number)
        launcher.kill()
        launcher.wait(30)
    for family, _ in launched:
        family.wait_until(lambda family=family: not family.living())
