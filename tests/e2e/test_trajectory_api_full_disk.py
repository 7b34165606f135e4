"""A full disk holds what must be stored, is named, and harms nothing: each request is answered once there is room."""

import concurrent.futures
import subprocess
import time

import pytest
import requests

from helpers.disk import fill
from helpers.services import group
from helpers.trajectory_api import ENVIRONMENT, REGISTRATION, Api, running_trajectory_api
from helpers.waiting import until
from recipe.atropos.sources.numbered import DataSource, DataSourceConfig, DataSourceError, Registration
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def api(full_disk, tmp_path):
    """On a small disk, which is not full yet; a trainer and an environment have registered."""
    with running_trajectory_api(tmp_path, "--data-dir", str(full_disk / "data")) as api:
        api.register(after=0, max_staleness=2)
        api.environment = api.post("/register-env", ENVIRONMENT)["env_id"]
        yield api
        if api.process.poll() is None:
            assert "Traceback" not in api.log()


def make_room(disk):
    (disk / "ballast").unlink()


def named(api, disk):
    """Wait until the server says that its disk is full."""
    until(lambda: "store" in api.get("/diagnose")["warnings"], 10)
    why = api.get("/diagnose")["why"]
    assert "full" in why and str(disk) in why


REQUESTS = {  # in an order in which each can be answered
    "begin": lambda api: api.post("/begin", {"env_id": api.environment})["ticket"] == api.ticket + 1,
    "release": lambda api: api.post("/release", {"ticket": api.ticket})["status"] == "released",
    "scored_data": lambda api: api.post("/scored_data", group(3) | {"images": "x" * 100_000})["status"] == "received",
    "commit": lambda api: api.post("/commit", {"through": 1})["through"] == 1,
    "weights": lambda api: api.post("/weights", {"through": 1})["through"] == 1,
    "register-env": lambda api: api.post("/register-env", ENVIRONMENT)["env_id"] == api.environment + 1,
    "disconnect-env": lambda api: api.post("/disconnect-env", {"env_id": api.environment})["status"] == "success",
    "register": lambda api: api.register(after=0)["epoch"] == 2,
}


def test_what_must_be_stored_is_held(api, full_disk):
    api.post_groups(1, 2)
    assert api.batch("?after=0&wait=5") == [1, 2]
    api.ticket = api.post("/begin", {"env_id": api.environment})["ticket"]
    for name, request_of_it in REQUESTS.items():
        fill(full_disk)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            held = pool.submit(request_of_it, api)
            named(api, full_disk)
            time.sleep(0.3)
            assert not held.done(), name
            if name == "register":
                assert "another trainer registers now" in requests.get(f"{api.url}/batch?after=0").json()["detail"]
            else:
                assert api.batch("?after=0") == [1, 2], "reading goes on"
            make_room(full_disk)
            assert held.result(20), name
        until(lambda: not api.get("/diagnose")["warnings"], 10)
    assert api.log().count("answers wait until there is room") >= len(REQUESTS)


@pytest.mark.parametrize("stock", [False, True])
def test_a_batch_is_not_sent_before_it_is_stored(api, full_disk, stock):
    """Nor is it held: the trainer is told that there is none, and asks again."""
    query = "?after=0&wait=0.5"
    if stock:
        query = ""
        api.kill()
        subprocess.run(["rm", "-r", str(full_disk / "data")], check=True)
        api.start()
        api.register()
    api.post_groups(1, 2, 3)
    fill(full_disk)
    for _ in range(2):
        begun = time.monotonic()
        assert api.batch(query) is None and time.monotonic() - begun < 10
        named(api, full_disk)
    make_room(full_disk)
    assert until(lambda: api.batch(query), 10) == [1, 2] and api.get("/diagnose")["batches"]["last"] == 1


def test_a_reset_is_held_and_the_store_is_used_meanwhile(tmp_path, full_disk):
    with running_trajectory_api(tmp_path, "--data-dir", str(full_disk / "data")) as api:
        api.register()
        api.post_groups(1, 2, 3)
        assert api.batch() == [1, 2]
        fill(full_disk)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            held = pool.submit(requests.get, f"{api.url}/reset_data", timeout=60)
            named(api, full_disk)
            time.sleep(0.5)
            assert not held.done() and api.get("/latest_example")["scores"][0] == 3.0
            assert api.batch("?after=0") == [1, 2]
            make_room(full_disk)
            assert held.result(20).text == "Reset successful"
        assert api.get("/status") == {"current_step": 0, "queue_size": 0}
        api.register()
        api.post("/scored_data", group(4))


@pytest.mark.parametrize("has_store", [False, True])
def test_a_start_on_a_full_disk_says_so(tmp_path, full_disk, has_store):
    flags = ["--data-dir", str(full_disk / "data")]
    if has_store:
        with running_trajectory_api(tmp_path, *flags) as api:
            api.register(after=0)
            assert api.stop() == 0
    fill(full_disk)
    ended = Api(tmp_path, *flags).run()
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode == 1 and str(full_disk) in line and "make room" in line


async def test_a_disk_that_stays_full_is_named_in_the_end(api, full_disk):
    begun = time.monotonic()
    async with TrajectoryApiClient(api.url, retry_timeout=0.5, timeout=0.5, held=4) as client:
        ticket = await client.begin(api.environment)
        fill(full_disk)
        with pytest.raises(TrajectoryApiError, match="it cannot store: .*full; make room"):
            await client.release(ticket, "x")
    assert 3 < time.monotonic() - begun < 20


@pytest.mark.slow
def test_the_trainer_waits_for_room_as_for_a_batch(api, full_disk):
    """In ``next_batch``, and in ``commit``; ``max_wait_time`` limits it, and the error names the disk."""
    times = {"retry_attempts": 2, "retry_delay": 0.1, "timeout": 0.5, "max_wait_time": 6}
    config, registration = DataSourceConfig(api.url, **times), Registration(**REGISTRATION)
    with DataSource(config, registration) as source, concurrent.futures.ThreadPoolExecutor() as pool:
        api.post_groups(1, 2)
        assert source.next_batch().number == 1
        api.post_groups(3, 4)
        fill(full_disk)
        waiting = pool.submit(source.commit, 1)
        named(api, full_disk)
        with pytest.raises(DataSourceError, match="it cannot store: .*full; make room"):
            waiting.result(30)
        with pytest.raises(DataSourceError, match="no batch .* within trainer.atropos.max_wait_time=6 s: nothing can"):
            while True:
                source.next_batch()
