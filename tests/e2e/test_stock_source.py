"""The source against atroposlib's own Trajectory API."""

import asyncio
import contextlib
import socket
import threading
import time

import orjson
import pytest
import requests
from msgspec import to_builtins

from helpers.services import get, group, post, running_api
from helpers.trajectory_api import REGISTRATION as FIELDS
from helpers.trajectory_api import numbers
from helpers.waiting import until
from recipe.atropos.sources import stock
from recipe.atropos.sources.numbered import DataSourceConfig, DataSourceError, Registration
from recipe.atropos.sources.stock import StockSource, _is_stock
from recipe.atropos.trajectory_api import client
from recipe.atropos.utils.process import free_port

pytestmark = pytest.mark.timeout(120)

REGISTRATION = Registration(**FIELDS | {"max_token_len": 64, "starting_step": 3})


def config(url, **changes):
    values = {"max_wait_time": 30, "retry_attempts": 4, "retry_delay": 0.1, "timeout": 5} | changes
    return DataSourceConfig(api_url=url, **values)


def post_groups(api, numbers, size=4):
    for number in numbers:
        post(f"{api.url}/scored_data", group(number, size))


@pytest.fixture(scope="module")
def shared_api(tmp_path_factory):
    with running_api(tmp_path_factory.mktemp("api")) as service:
        yield service


@pytest.fixture
def api(shared_api):
    """As it was started."""
    requests.get(f"{shared_api.url}/reset_data", timeout=30).raise_for_status()
    return shared_api


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(stock, "_LONGEST_POLL", 0.1)


def test_data_source_gives_the_oldest_batch_first(api):
    """The API serves the newest first."""
    with StockSource(config(api.url, prefetch=1), REGISTRATION) as source:
        time.sleep(0.3)  # it polls while the queue fills, so that cuts of several sizes happen
        received = []
        for start, end in ((1, 7), (7, 21), (21, 23)):
            post_groups(api, range(start, end))
            if start == 7:
                received += numbers(source.next_batch().groups)
        while len(received) < 22:
            received += numbers(source.next_batch().groups)
    assert received == [*range(1, 23)], "every group once, in the order of posting"


def test_it_fetches_ahead_no_more_than_it_was_told(api):
    with StockSource(config(api.url, prefetch=1), REGISTRATION) as source:
        for round_number in range(3):
            post_groups(api, (2 * round_number, 2 * round_number + 1))
            time.sleep(0.3)
        assert len(source) == 1, "one batch waits here"
        assert get(f"{api.url}/status")["queue_size"] == 4, "the others in the API, where backpressure sees them"
        assert [numbers(source.next_batch().groups) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_data_posted_before_the_trainer_does_not_wedge_the_api(api):
    post(f"{api.url}/scored_data", group(1))  # now the API ignores any registration
    with StockSource(config(api.url), REGISTRATION) as source:
        assert get(f"{api.url}/info") == {"batch_size": 8, "max_token_len": 64}
        assert get(f"{api.url}/status")["current_step"] == 3
        post_groups(api, (5, 6))
        assert numbers(source.next_batch().groups) == [5, 6]


def test_an_api_that_keeps_another_batch_size_is_an_error(api):
    post(f"{api.url}/register", to_builtins(REGISTRATION) | {"batch_size": 32})
    with pytest.raises(DataSourceError, match="registered with batch_size=32, this trainer wants 8.*restart it"):
        with StockSource(config(api.url), REGISTRATION):
            pass


def test_a_wait_ends_and_says_who_is_silent(tmp_path):
    """With an API that never had a group."""
    limit = "no batch of 8 sequences within trainer.atropos.max_wait_time=0.5 s"
    situations = {
        "no environment": "no environment has registered",
        "silent environment": "an environment has registered.*posted nothing",
        "groups that do not fit": "groups wait, the last of 3 sequences, which cannot fill a batch of 8",
    }
    with running_api(tmp_path) as api:
        for situation, expected in situations.items():
            with StockSource(config(api.url, max_wait_time=0.5), REGISTRATION) as source:
                if situation != "no environment":
                    env = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 3}
                    until(lambda env=env: post(f"{api.url}/register-env", env)["status"] == "success")
                if situation == "groups that do not fit":
                    post_groups(api, range(5), size=3)
                with pytest.raises(DataSourceError, match=f"{limit}: .*{expected}"):
                    source.next_batch()


def test_an_api_that_dies_ends_the_wait_with_its_name(tmp_path):
    with running_api(tmp_path) as api:
        with StockSource(config(api.url, max_wait_time=60), REGISTRATION) as source:
            threading.Timer(0.2, api.stop, kwargs={"grace": 0}).start()
            with pytest.raises(DataSourceError, match=f"GET {api.url}/batch got no answer .* start it .run-api"):
                source.next_batch()
            assert source.events["api_unreachable"] >= 3


def test_an_api_that_restarts_is_registered_with_again(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.2)
    port = free_port()
    with running_api(tmp_path, port) as api:
        with StockSource(config(api.url, retry_attempts=10, retry_delay=0.5), REGISTRATION) as source:
            time.sleep(0.5)
            api.stop(grace=0)
            with running_api(tmp_path, port) as again:
                until(lambda: get(f"{again.url}/info")["batch_size"] == 8)
                post_groups(again, (1, 2))
                assert numbers(source.next_batch().groups) == [1, 2]
                assert source.events["registered_again"] == 1


@pytest.mark.parametrize("headers", [True, False])
@pytest.mark.parametrize("broken", [3, 2, 1, 0])
def test_data_source_counts_a_batch_that_breaks_off(broken, headers):
    """In the middle of a body, or before the headers. The others come in their order, and a lost answer without a batch
    is none that is lost. 0: the second request does not arrive, so that the first cut is fetched without its oldest.

    The real API cannot be made to break off; as it does, this one cuts its queue whole.
    """
    queues, cut, step, empty, asked = [[1, 2, 3], [4, 5, 6], [7, 8]], [], 3, 0, 0
    server = socket.create_server(("127.0.0.1", 0))

    def reply(path):
        nonlocal step, empty
        if path != "/batch":
            return {"uuid": 1, "batch_size": 8, "max_token_len": 64, "current_step": step, "queue_size": 0}
        if not cut and queues:
            cut.extend(queues.pop(0))
            step += len(cut)
        empty += not cut
        return {"batch": [{"scores": [float(cut.pop())]}] if cut else None}

    def serve():
        nonlocal asked
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = server.accept()
                with connection:
                    path = connection.recv(65536).split(b" ")[1].decode()
                    asked += path == "/batch"
                    if broken == 0 and path == "/batch" and asked == 2:
                        continue
                    body = orjson.dumps(reply(path))
                    length = len(body) + 1000 * (b"%d.0" % broken in body)
                    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
                    if headers or (len(body) == length and (path != "/batch" or empty != 1)):
                        connection.sendall(head.encode() + body)

    threading.Thread(target=serve, daemon=True).start()
    with server, StockSource(config(f"http://127.0.0.1:{server.getsockname()[1]}"), REGISTRATION) as source:
        wanted = [number for number in range(1, 9) if number != broken] if broken else [2, 3, 1, *range(4, 9)]
        assert [numbers(source.next_batch().groups)[0] for _ in wanted] == wanted
        assert source.events["batch_lost"] == 1
        until(lambda: empty > 2, within=20)
        assert (source.events["batch_lost"], source.events["api_unreachable"]) == (1, 0 if headers else 1)


def test_atroposlibs_server_is_named_as_what_it_loses(api, caplog):
    assert asyncio.run(_is_stock(config(api.url))) is True
    assert "run-api: what it holds is lost" in caplog.text
