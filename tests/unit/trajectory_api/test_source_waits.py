"""No wait of the trainer for the Trajectory API is silent or endless; what fails beside its requests is raised."""

import asyncio
import contextlib
import threading
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from helpers.services import group, post
from helpers.trainer import compose_config
from helpers.trajectory_api import REGISTRATION
from helpers.waiting import until
from recipe.atropos.sources import numbered as data_source
from recipe.atropos.sources.numbered import DataSource, DataSourceConfig, DataSourceError, Registration
from recipe.atropos.sources.stock import open_source
from recipe.atropos.trajectory_api.app import Api
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.trajectory_api.service import Settings, TrajectoryService
from recipe.atropos.utils.process import free_port


@contextlib.contextmanager
def api_in_a_thread(folder):
    """Yield the service and its URL."""
    started, ended, found = threading.Event(), threading.Event(), []

    async def run():
        service = TrajectoryService(Settings(folder))
        async with RawTestServer(Api(service).handle, auto_decompress=False) as server:
            found.extend([service, str(server.make_url(""))])
            started.set()
            await asyncio.to_thread(ended.wait)
        service.store.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(60)
    try:
        yield found
    finally:
        ended.set()
        thread.join(60)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    for name in ("_POLL_SECONDS", "_MEANWHILE_SECONDS", "_HEARTBEAT_SECONDS", "_END_SECONDS"):
        monkeypatch.setattr(data_source, name, 0.1)


def source(url, **options):
    config = DataSourceConfig(url, timeout=0.5, retry_attempts=2, retry_delay=0.1, **options)
    return DataSource(config, Registration(**REGISTRATION))


@pytest.mark.parametrize("registers", [False, True])
def test_a_wait_for_a_full_disk_shows_and_is_logged(registers, tmp_path, caplog):
    """Of a trainer that begins too."""
    shown = []
    with api_in_a_thread(tmp_path) as (service, url), source(url) as waiting, contextlib.ExitStack() as stack:
        beginning = source(url)
        beginning.meanwhile = waiting.meanwhile = lambda: shown.append(time.monotonic()) or True
        waiting.commit(0)
        assert not shown
        waits = (stack.enter_context, beginning) if registers else (waiting.commit, 0)
        store = service.store
        pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
        store.connection.execute(f"PRAGMA max_page_count = {pages}")
        thread = threading.Thread(target=waits[0], args=waits[1:])
        held = store.write
        store.write = lambda *arguments, **names: held(fill_up)
        thread.start()
        until(lambda: caplog.text.count("make room there; trying again") > 1)
        assert thread.is_alive()
        store.write = held
        store.connection.execute("PRAGMA max_page_count = 100000")
        thread.join(60)
        assert not thread.is_alive() and len(shown) >= 3


def test_a_trainer_that_is_to_end_waits_for_no_api(tmp_path):
    """Else it would raise after ``max_wait_time``."""
    with contextlib.ExitStack() as api:
        _, url = api.enter_context(api_in_a_thread(tmp_path))
        with source(url, max_wait_time=20) as ending:
            api.close()
            ending.meanwhile = lambda: False
            ending.commit(0)


def test_the_api_knows_whether_the_trainer_waits_for_a_batch(tmp_path):
    with api_in_a_thread(tmp_path) as (service, url), source(url) as training:
        until(lambda: service.trainer.waiting_since)
        post(f"{url}/scored_data", group(1, 8))
        training.next_batch()
        fetch, asked = training._client.batch, []

        def noted(*arguments, **names):
            asked.append(service.trainer.waiting_since)
            return fetch(*arguments, **names)

        training._client.batch = noted
        until(lambda: len(asked) > 4)
        assert set(asked[2:]) == {None}, "it prefetches"
        thread = threading.Thread(target=training.next_batch)
        thread.start()
        until(lambda: service.trainer.waiting_since)
        post(f"{url}/scored_data", group(2, 8))
        thread.join(60)
        assert not thread.is_alive()


def fill_up(connection):
    """A write that does not fit, whatever is free in the pages that there are."""
    connection.execute("INSERT OR REPLACE INTO run VALUES ('large', zeroblob(100000))")


def test_what_ends_the_heartbeats_is_raised(tmp_path, monkeypatch):
    def defect(self):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(TrajectoryApiClient, "status", defect)
    with api_in_a_thread(tmp_path) as (_, url), source(url) as training:
        post(f"{url}/scored_data", group(1, 8))
        training.next_batch()
        post(f"{url}/scored_data", group(2, 8))
        until(lambda: training._error)
        training.next_batch()  # it was ready before
        for ask in (training.next_batch, lambda: training.commit(0)):
            with pytest.raises(ZeroDivisionError, match="a defect"):
                ask()


async def test_an_api_is_tried_as_often_as_the_configuration_says():
    times = []

    async def refuse(_):
        times.append(time.monotonic())
        return web.json_response({"detail": "so it is"}, status=503)

    async with RawTestServer(refuse) as server:
        config = DataSourceConfig(str(server.make_url("")), retry_attempts=2, retry_delay=0.5)
        async with config.client() as client:
            with pytest.raises(TrajectoryApiError, match="HTTP 503.*for 0.5 s; see its log"):
                await client.status()
    assert len(times) == 2 and times[1] - times[0] >= 0.5


def test_an_api_that_is_not_there_is_named_with_its_key():
    url = f"http://127.0.0.1:{free_port()}"
    options = [f"trainer.atropos.api_url={url}", "trainer.atropos.retry_attempts=2"]
    with pytest.raises(DataSourceError, match=f"trainer.atropos.api_url={url}: .* for 0.5 s; is the Trajectory API up"):
        open_source(compose_config("actor_rollout_ref.model.path=m", *options), 0, 0)
