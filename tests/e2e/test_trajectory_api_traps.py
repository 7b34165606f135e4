"""The faults of atroposlib's run-api, each as a test that both servers take: run-api fails it, ours passes."""

import json
import socket
import time

import pytest
import requests

from helpers.services import group, running_api
from helpers.trajectory_api import ENVIRONMENT, REGISTRATION, numbers, running_trajectory_api
from helpers.waiting import until


class Client:
    """What a stock environment and a stock trainer do."""

    def __init__(self, url):
        self.url = url
        self.get("/reset_data")

    def get(self, path, **kwargs):
        return requests.get(self.url + path, timeout=30, **kwargs)

    def post(self, path, message):
        headers = {"Content-Type": "application/json"}
        return requests.post(self.url + path, data=json.dumps(message), headers=headers, timeout=30)

    def register(self, **fields):
        self.post("/register", REGISTRATION | fields).raise_for_status()

    def register_env(self, **fields):
        reply = self.post("/register-env", ENVIRONMENT | fields)
        reply.raise_for_status()
        return reply.json()

    def batch(self):
        return numbers(self.get("/batch").json()["batch"])


def order(client):
    client.register()
    for number in range(1, 9):
        client.post("/scored_data", group(number))
    found = [client.batch()]
    assert client.get("/status").json()["current_step"] == 1
    client.post("/scored_data", group(9))
    client.post("/scored_data", group(10))
    found += [client.batch() for _ in range(4)]
    assert found == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]


def data_before_a_trainer(client):
    client.post("/scored_data", group(1))
    client.post("/scored_data", group(2))
    client.register()
    assert client.batch() == [1, 2]


def a_second_registration(client):
    client.register()
    assert client.register_env()["status"] == "success"
    client.register(batch_size=4, starting_step=7, max_token_len=50)
    assert client.get("/info").json() == {"batch_size": 4, "max_token_len": 50}
    assert client.get("/status").json()["current_step"] == 7


def groups_that_do_not_fit(client):
    client.register()
    client.post("/scored_data", group(0, size=6))
    for number in range(1, 21):
        client.post("/scored_data", group(number))
    assert client.batch() == [1, 2]


def a_group_larger_than_its_environments(client):
    client.register()
    client.batch()
    env_id = client.register_env()["env_id"]
    assert client.post("/scored_data", group(1, size=8) | {"env_id": env_id}).json() == {"status": "received"}
    assert client.batch() == [1]


def sizes_that_make_no_batch(client):
    client.register()
    reply = client.post("/scored_data", group(1, size=3))
    assert reply.status_code == 422 and "never fill" in reply.json()["detail"]


def a_dead_environments_allocation(client):
    client.register()
    client.batch()
    dead = client.register_env(min_batch_allocation=0.5)["env_id"]
    alive = client.register_env()["env_id"]
    assert dead != alive
    for number in (1, 2):
        client.post("/scored_data", group(number) | {"env_id": alive})
    assert until(client.batch, 3) == [1, 2]


def a_nan_score(client):
    client.register()
    client.post("/scored_data", group(1))
    assert client.post("/scored_data", group(2) | {"scores": [float("nan")] * 4}).status_code == 422
    client.post("/scored_data", group(3))
    assert client.batch() == [1, 3]


def unequal_lengths(client):
    client.register()
    assert client.post("/scored_data", group(1) | {"masks": [[1]] * 4}).status_code == 422
    assert client.post("/scored_data", {"tokens": [], "masks": [], "scores": []}).status_code == 422


def a_broken_connection(client):
    client.register()
    long = {"tokens": [[1] * 20_000] * 4, "masks": [[1] * 20_000] * 4, "inference_logprobs": [[-0.12345] * 20_000] * 4}
    for number in (1, 2):
        client.post("/scored_data", long | {"scores": [number] * 4}).raise_for_status()
    address = client.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        connection.recv(100)
    time.sleep(0.3)
    assert client.batch() == [1, 2]


def a_web_page_that_reads(client):
    reply = client.get("/status", headers={"Origin": "http://evil.example"})
    assert "Access-Control-Allow-Origin" not in reply.headers


def a_web_page_that_resets(client):
    client.register()
    client.post("/scored_data", group(1))
    client.post("/scored_data", group(2))
    client.get("/reset_data", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})
    assert client.batch() == [1, 2]


def an_unknown_environment(client):
    client.register()
    client.batch()
    assert client.get("/status-env", json={"env_id": 5}).status_code == 404


TRAPS = [
    *(order, data_before_a_trainer, a_second_registration, groups_that_do_not_fit),
    *(a_group_larger_than_its_environments, sizes_that_make_no_batch, a_dead_environments_allocation),
    *(a_nan_score, unequal_lengths, a_broken_connection, a_web_page_that_reads, a_web_page_that_resets),
    an_unknown_environment,
]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    with running_trajectory_api(tmp_path_factory.mktemp("ours"), impatient=True) as api:
        yield api.url


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    with running_api(tmp_path_factory.mktemp("upstream")) as service:
        yield service.url


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_ours_is_free_of_run_apis_fault(ours, trap):
    trap(Client(ours))


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_run_api_has_the_fault(upstream, trap):
    client = Client(upstream)
    with pytest.raises((AssertionError, requests.JSONDecodeError)):  # a JSONDecodeError is of a 500
        trap(client)


def test_nothing_survives_a_restart_of_run_api(tmp_path):
    with running_api(tmp_path) as service:
        Client(service.url).register()
        Client(service.url).post("/scored_data", group(1))
    with running_api(tmp_path) as service:
        assert requests.get(f"{service.url}/status", timeout=30).json()["queue_size"] == 0
