"""The trainer's source against our own Trajectory API: nothing is lost, however often either side starts again."""

import asyncio
import signal
import time
from dataclasses import replace

import pytest

from helpers.trajectory_api import ENVIRONMENT, Api, numbers
from helpers.trajectory_api import REGISTRATION as FIELDS
from helpers.waiting import until
from recipe.atropos.sources import numbered as data_source
from recipe.atropos.sources.numbered import DataSource, DataSourceConfig, DataSourceError, Registration
from recipe.atropos.sources.stock import _is_stock

pytestmark = pytest.mark.timeout(120)

REGISTRATION = Registration(**FIELDS)
SECRET = "s3cret"


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(data_source, "_POLL_SECONDS", 0.5)


@pytest.fixture
def api(tmp_path):
    server = Api(tmp_path, secret=SECRET).start()
    server.session.headers["Authorization"] = f"Bearer {SECRET}"
    yield server
    server.kill()


def config(url, **changes):
    values = {"max_wait_time": 30, "retry_attempts": 8, "retry_delay": 0.1, "timeout": 5, "secret": SECRET} | changes
    return DataSourceConfig(api_url=url, **values)


def source(api, after=0, **changes):
    return DataSource(config(api.url, **changes), REGISTRATION, after)


def taken(batch):
    return batch.number, numbers(batch.groups)


def test_data_source_fetches_ahead_no_more_than_it_was_told(api):
    with source(api, prefetch=1) as ahead:
        api.post_groups(*range(1, 7))
        until(lambda: len(ahead))
        time.sleep(0.5)
        assert len(ahead) == 1 and api.get("/status")["queue_size"] == 4


def test_data_source_ends_although_its_api_is_gone(api):
    with source(api, prefetch=1) as ahead:
        api.post_groups(1, 2)
        until(lambda: len(ahead))
        api.kill()
    assert not ahead._thread.is_alive()


def test_what_was_fetched_and_not_trained_is_served_again(api):
    """A trainer that is gone with a batch in its hands, and one ahead; the next resumes after batch 1."""
    with source(api, prefetch=2) as killed:
        api.post_groups(*range(1, 9))
        assert [taken(killed.next_batch()) for _ in range(3)] == [(1, [1, 2]), (2, [3, 4]), (3, [5, 6])]
    with source(api, after=1) as resumed:
        assert [taken(resumed.next_batch()) for _ in range(3)] == [(2, [3, 4]), (3, [5, 6]), (4, [7, 8])]


def test_an_api_that_is_killed_and_started_again_loses_nothing(api):
    with source(api, retry_attempts=20, retry_delay=0.5) as survivor:
        api.post_groups(1, 2, 3)
        assert taken(survivor.next_batch()) == (1, [1, 2])
        api.restart()
        survivor.weights_pushed(1)
        survivor.commit(1)
        api.post_groups(4)
        assert taken(survivor.next_batch()) == (2, [3, 4])
        assert survivor.metrics()["atropos/api/api_unreachable"] >= 1
        assert api.get("/diagnose")["batches"]["committed"] == 1


@pytest.mark.slow
def test_a_silent_api_is_waited_for_as_long_as_for_a_batch(api):
    """It is stopped, so that it takes connections and answers none; longer than ``retry_attempts``."""
    with source(api, retry_attempts=1, timeout=1, max_wait_time=10) as patient:
        api.process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        api.process.send_signal(signal.SIGCONT)
        api.post_groups(1, 2)
        assert taken(patient.next_batch()) == (1, [1, 2])
        api.process.send_signal(signal.SIGSTOP)
        patient.config = replace(patient.config, max_wait_time=2)
        with pytest.raises(DataSourceError, match=r"max_wait_time=2 s: the Trajectory API is silent \(GET http"):
            patient.next_batch()
        api.process.send_signal(signal.SIGCONT)


def test_an_api_that_stays_silent_ends_the_wait_of_a_commit(api):
    with source(api, retry_attempts=1, timeout=1, max_wait_time=2) as patient:
        api.process.send_signal(signal.SIGSTOP)
        with pytest.raises(DataSourceError, match=r"is the Trajectory API up\? \(trainer.atropos.max_wait_time=2 s\)"):
            patient.commit(0)
        api.process.send_signal(signal.SIGCONT)


def test_a_run_is_live_while_its_trainer_lives(tmp_path, monkeypatch):
    """It fetches nothing in a long step, and yet nobody resets its run; then it has ended."""
    monkeypatch.setattr(data_source, "_HEARTBEAT_SECONDS", 0.3)
    server = Api(tmp_path, secret=SECRET, impatient=True).start()
    server.session.headers["Authorization"] = f"Bearer {SECRET}"
    try:
        with source(server, prefetch=1) as training:
            server.post_groups(*range(1, 5))
            assert taken(training.next_batch()) == (1, [1, 2])
            for _ in range(5):  # of the second and a half after which it counts as gone
                time.sleep(0.5)
                assert server.get("/diagnose")["trainer"]["live"]
                assert server.session.get(f"{server.url}/reset_data").status_code == 409
            assert len(training) == 1
        until(lambda: not server.get("/diagnose")["trainer"]["live"], 10)
    finally:
        server.kill()


def test_our_server_is_told_from_atroposlibs_and_has_a_secret(api):
    assert asyncio.run(_is_stock(config(api.url))) is False
    with pytest.raises(DataSourceError, match="HTTP 401.*Authorization"):
        with source(api, secret="wrong"):
            pass


def test_a_wait_ends_and_says_what_is_lacking(api):
    with source(api, max_wait_time=0.5) as waiting:
        limit = "no batch of 8 sequences within trainer.atropos.max_wait_time=0.5 s"
        with pytest.raises(DataSourceError, match=f"{limit}: no environment has registered"):
            waiting.next_batch()
        assert api.post("/register-env", ENVIRONMENT)["status"] == "success"
        api.post_groups(1)
        with pytest.raises(DataSourceError, match=f"{limit}: no batch 1: .*4"):
            waiting.next_batch()


@pytest.mark.slow
def test_data_source_wait_excludes_what_is_done_meanwhile(api):
    """Who waits for a batch can do something meanwhile; its time does not count as waiting."""
    calls = []

    def meanwhile():
        calls.append(time.monotonic())
        time.sleep(3)
        if len(calls) == 2:
            api.post_groups(1, 2)

    with source(api, max_wait_time=6) as patient:
        begun = time.monotonic()
        assert taken(patient.next_batch(meanwhile)) == (1, [1, 2])
        assert len(calls) == 2 and time.monotonic() - begun > 8, "4 s of waiting, 6 s of something else"
