"""What HTTP clients may send: nothing makes the server fail, and nothing is answered without access."""

import contextlib
import gzip
import http.client
import json
import socket
import time
from urllib.parse import urlencode

import psutil
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.packed import ODD_MESSAGES
from helpers.services import group
from helpers.trajectory_api import ENVIRONMENT, REGISTRATION, Api, running_trajectory_api
from recipe.atropos.data.scored_group import ScoredGroup
from recipe.atropos.trajectory_api import wire
from recipe.atropos.trajectory_api.app import MAX_BODY
from recipe.atropos.trajectory_api.endpoints import ENDPOINTS
from recipe.atropos.utils.secret import environments_key


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with running_trajectory_api(tmp_path_factory.mktemp("api")) as api:
        api.register(after=0)
        api.environment = api.post("/register-env", ENVIRONMENT)["env_id"]
        yield api
        assert api.process.poll() is None
        assert "Traceback" not in api.log()


# ---------------------------------------------------------------------- any request

MESSAGES = [
    *(REGISTRATION, REGISTRATION | {"after": 0, "max_staleness": 1}, ENVIRONMENT, {"env_id": 0}, group(1)),
    *([group(1), group(2)], {"through": 0}, {"ticket": 1, "reason": "x"}, {"env_id": 0, "sequences": 4, "held": [1]}),
    {"env_id": 0, "wait": 0.0},
]
VALUES = st.recursive(
    st.sampled_from(
        [
            *(None, True, 0, -1, 1, 2**63, -(2**70), 0.5, float("nan"), 1e308),
            *("", "1", "nan", "-inf", "é", "\x00", "x" * 300),
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def mutated(draw):
    """A message of the protocol with some of its fields changed or missing."""
    message = json.loads(json.dumps(draw(st.sampled_from(MESSAGES))))
    of = message[0] if isinstance(message, list) else message
    for key in draw(st.lists(st.sampled_from(sorted(of)), max_size=2, unique=True)):
        if draw(st.booleans()):
            of[key] = draw(VALUES)
        else:
            del of[key]
    return json.dumps(message).encode()


BODIES = st.one_of(
    mutated(),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.just(ScoredGroup.from_mapping(group(1)).pack()),
    ODD_MESSAGES,
    st.just(b"[" * 3000),
)
NUMBERS = st.sampled_from(["0", "1", "-1", "x", "", "nan", "inf", "1e3", str(2**64), "0.01", "٣"])
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "Content-Type": st.sampled_from(["application/json", wire.PACKED, "text/plain", "x;"]),
        "Content-Encoding": st.sampled_from(["gzip", "identity", "br", ""]),
        "Accept": st.sampled_from([wire.PACKED, "text/html", "*/*"]),
        wire.EPOCH_HEADER: NUMBERS.map(lambda text: text.encode()),
        wire.TICKET_HEADER: NUMBERS.map(lambda text: text.encode()),
        wire.KEY_HEADER: st.sampled_from(["a", "b", "", "x" * 300]),
        "Origin": st.sampled_from(["null", "http://x", "http://[", "http://127.0.0.1"]),
        "Host": st.sampled_from(["localhost", "[::1]:80", "[", "evil.example"]),
    },
)
SHORT = NUMBERS.filter(lambda number: number not in ("inf", "1e3", str(2**64)))  # not for the longest poll, 60 s
QUERIES = st.fixed_dictionaries({}, optional={"after": NUMBERS, "wait": SHORT, "x": NUMBERS})
PATHS = st.sampled_from([path for _, path in ENDPOINTS]) | st.sampled_from(
    ["/x", "//", "/%00", "/%ff/status", "/batch/"]
)
METHODS = st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE"])


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(METHODS, PATHS, QUERIES, HEADERS, BODIES, st.booleans())
def test_no_request_makes_the_server_fail(api, method, path, query, headers, body, known):
    if known:  # mostly requests that get beyond the router
        method = next((method for method, other in ENDPOINTS if other == path), method)
    query = urlencode(query)
    body = body.replace(b'"env_id": 0', b'"env_id": %d' % api.environment)
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    try:
        connection.request(method, f"{path}?{query}", body, headers)
        assert connection.getresponse().status < 500
    finally:
        connection.close()


@pytest.fixture(scope="module")
def emptied(tmp_path_factory):
    """A server from which each test takes what it has posted."""
    with running_trajectory_api(tmp_path_factory.mktemp("emptied")) as api:
        yield api


@pytest.mark.parametrize("wait", ["nan", "inf", "-inf", "-1", "x", "1e309", "", None, -1, 1e308, [1], True], ids=repr)
def test_any_wait_is_served_or_refused(emptied, wait):
    """Of a ticket and of a batch; no ticket may begin, so that both do wait."""
    last = emptied.get("/diagnose")["batches"]["last"]
    emptied.register(after=last, max_staleness=0)
    env_id = emptied.post("/register-env", ENVIRONMENT)["env_id"]
    held = [emptied.post("/begin", {"env_id": env_id})["ticket"] for _ in range(2)]
    message = {"env_id": env_id, "held": held, "wait": wait}
    requests_of_it = [("POST", "/begin", json.dumps(message)), ("GET", f"/batch?after={last}&wait={wait}", None)]
    for method, path, body in requests_of_it:
        connection = http.client.HTTPConnection("127.0.0.1", emptied.port, timeout=0.5)
        try:
            connection.request(method, path, body)
            assert connection.getresponse().status in (200, 422)
        except TimeoutError:
            assert wait in ("inf", 1e308)
        finally:
            connection.close()
    emptied.post("/disconnect-env", {"env_id": env_id})


# ---------------------------------------------------------------------- bodies


def post(api, body, path="/scored_data", **headers):
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(api.url + path, data=body, headers=headers, timeout=60)


def test_gzip_is_read_in_one_part_or_several_and_whole(api):
    body = json.dumps(group(1)).encode()
    whole = gzip.compress(body)
    for parts in (whole, gzip.compress(body[:40]) + gzip.compress(body[40:])):
        assert post(api, parts, Content_Encoding="gzip").json() == {"status": "received"}
    for damaged in (whole[: len(whole) // 2], b"x" + whole, b"\x1f"):
        reply = post(api, damaged, Content_Encoding="gzip")
        assert reply.status_code == 400 and "gzip" in reply.json()["detail"]


def test_a_zip_bomb_is_refused_without_being_inflated(api):
    bomb = gzip.compress(bytes(64 << 20), compresslevel=9) * 200  # 12.8 GB
    before = psutil.Process(api.process.pid).memory_info().rss
    reply = post(api, bomb, Content_Encoding="gzip")
    assert reply.status_code == 413 and str(MAX_BODY) in reply.json()["detail"]
    assert psutil.Process(api.process.pid).memory_info().rss - before < 3 * MAX_BODY


def test_64_mib_are_read_and_what_is_larger_is_refused(api):
    large = json.dumps(group(1) | {"images": "x" * (64 << 20)}).encode()
    assert post(api, large).json() == {"status": "received"}
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    connection.putrequest("POST", "/scored_data")
    connection.putheader("Content-Length", str(MAX_BODY + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_client_that_leaves_its_long_poll_harms_nobody(emptied):
    last = emptied.get("/diagnose")["batches"]["last"]
    emptied.register(after=last)
    with socket.create_connection(("127.0.0.1", emptied.port)) as connection:
        connection.sendall(b"GET /batch?after=%d&wait=20 HTTP/1.1\r\nHost: localhost\r\n\r\n" % last)
        time.sleep(0.2)
    emptied.post_groups(1, 2)
    assert emptied.batch(f"?after={last}&wait=5") == [1, 2]


# ---------------------------------------------------------------------- access


def test_a_secret_is_asked_for_in_header_or_path(tmp_path):
    with running_trajectory_api(tmp_path, secret="s3cret") as api:
        for _, path in ENDPOINTS:
            assert requests.get(api.url + path).status_code == 401
        for wrong in ("/wrong/status", "//status", "/s3cre/status", "/s3crets/status"):
            assert requests.get(api.url + wrong).status_code == 401
        assert requests.get(f"{api.url}/s3cret/status").json() == {"current_step": 0, "queue_size": 0}
        assert requests.get(f"{api.url}/s3cret").json() == {"message": "AtroposLib API"}
        bearer = {"Authorization": "Bearer s3cret"}
        assert requests.get(f"{api.url}/status", headers=bearer).json()["queue_size"] == 0
        assert requests.get(f"{api.url}/status", headers={"Authorization": "Bearer \xff"}).status_code == 401
        assert requests.post(f"{api.url}/s3cret/scored_data", json=group(1)).json() == {"status": "received"}
        assert "s3cret" not in api.log()


def test_control_of_the_queue_wants_the_trainers_key(tmp_path):
    """The environments' key registers, posts and informs, by header and by path."""
    control = [("POST", f"/{path}") for path in ("register", "commit", "weights", "empty")]
    control += [("GET", "/batch"), ("GET", "/reset_data")]
    key = environments_key("s3cret")
    with running_trajectory_api(tmp_path, secret="s3cret") as api:
        for method, path in ENDPOINTS:
            for prefix, headers in (("", {"Authorization": f"Bearer {key}"}), (f"/{key}", {})):
                reply = requests.request(method, api.url + prefix + path, headers=headers, json={})
                assert (reply.status_code == 403) == ((method, path) in control), (method, path, reply.text)
                assert reply.status_code not in (401, 404, 405)
        assert requests.post(f"{api.url}/{key}/scored_data", json=group(1)).json() == {"status": "received"}
        registered = requests.post(f"{api.url}/s3cret/register", json=REGISTRATION | {"after": 0}).json()
        for path in ("/commit", "/weights"):
            reply = requests.post(f"{api.url}/s3cret{path}", json={"through": 0})
            assert reply.status_code == 422 and "send the epoch" in reply.text, "which trainer it is"
            headers = {"Atropos-Epoch": str(registered["epoch"])}
            assert requests.post(f"{api.url}/s3cret{path}", json={"through": 0}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}, {"Host": "evil.example"}],
    ids=str,
)
def test_other_sites_pages_are_refused(api, headers):
    reply = requests.get(f"{api.url}/status", headers=headers)
    assert reply.status_code == 403
    assert not [name for name in reply.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize(
    ("flags", "secret", "text"),
    [
        (["--host", "0.0.0.0"], "", "error: host=0.0.0.0: without a secret"),
        (["--secret-file", "/missing"], "", "error: secret-file=/missing"),
        ([], "with/slash", "error: $ATROPOS_API_KEY: the secret has a slash; write letters and digits"),
        ([], "taken", "error: host=127.0.0.1, port={port}"),
    ],
)
def test_a_start_that_cannot_work_says_why(tmp_path, flags, secret, text):
    api = Api(tmp_path, *flags, secret=secret)
    with socket.create_server(("127.0.0.1", api.port)) if secret == "taken" else contextlib.nullcontext():
        ended = api.run()
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith(text.format(port=api.port))


def test_a_secret_file_must_be_private(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("abc\n")
    secret.chmod(0o644)
    ended = Api(tmp_path, "--secret-file", str(secret)).run()
    assert ended.returncode == 1 and "chmod 600" in ended.stderr
    secret.chmod(0o600)
    with running_trajectory_api(tmp_path, "--secret-file", str(secret), "--host", "0.0.0.0") as api:
        assert requests.get(f"{api.url}/abc/status").ok and requests.get(f"{api.url}/status").status_code == 401


# ---------------------------------------------------------------------- what it says


def test_metrics_are_in_the_format_of_prometheus(api):
    api.session.post(f"{api.url}/scored_data", json={"tokens": [1]})  # malformed
    for _ in range(2):
        api.post("/register-env", ENVIRONMENT)
    lines = requests.get(f"{api.url}/metrics").text.splitlines()
    families = [line.partition("{")[0].split()[0] for line in lines if not line.startswith("#")]
    each = [family for family, before in zip(families, ["", *families], strict=False) if family != before]
    assert len(each) == len(set(each)), "the lines of a family stand together"
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert all(float(value) >= 0 for value in values.values())
    assert float(values['atropos_api_events_total{event="refused/malformed"}']) >= 1
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} >= {name.split("{")[0] for name in values}


def test_the_root_is_a_page_for_browsers_only(api):
    assert requests.get(api.url).json() == {"message": "AtroposLib API"}
    page = requests.get(api.url, headers={"Accept": "text/html,*/*"})
    assert page.headers["Content-Type"].startswith("text/html") and "<title>Trajectory API</title>" in page.text


def test_the_log_says_what_a_waiting_trainer_waits_for(tmp_path):
    with running_trajectory_api(tmp_path, impatient=True) as api:
        api.register(after=0)
        api.post("/scored_data", group(1, size=3))
        assert "3 of 8 sequences" in api.get("/diagnose")["why"]
        assert api.batch("?after=0&wait=2.5") is None
        assert "no batch 1 for" in api.log() and "3 of 8 sequences are queued, and no group is begun" in api.log()
