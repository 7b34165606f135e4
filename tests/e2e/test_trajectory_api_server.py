"""The server as trainers and environments meet it: numbered batches, epochs, restarts, tickets, access, tools."""

import concurrent.futures
import json
import time

import pytest
import requests

from helpers.services import group
from helpers.trajectory_api import ENVIRONMENT, REGISTRATION, numbers, running_trajectory_api
from recipe.atropos.data.scored_group import unpack_all
from recipe.atropos.trajectory_api import wire
from recipe.atropos.trajectory_api.__main__ import main


@pytest.fixture
def api(tmp_path):
    with running_trajectory_api(tmp_path) as api:
        yield api


def test_a_batch_is_the_same_when_asked_again(api):
    api.register(after=0)
    api.post_groups(*range(1, 7))
    first = api.session.get(f"{api.url}/batch?after=0").content
    packed = api.session.get(f"{api.url}/batch?after=0", headers={"Accept": wire.PACKED})
    assert json.loads(first)["number"] == 1 and packed.headers[wire.BATCH_HEADER] == "1"
    assert [api.batch(f"?after={after}") for after in (1, 2, 0)] == [[3, 4], [5, 6], [1, 2]]
    api.restart()
    assert api.session.get(f"{api.url}/batch?after=0").content == first
    assert api.session.get(f"{api.url}/batch?after=0", headers={"Accept": wire.PACKED}).content == packed.content
    assert [group.scores[0] for group in unpack_all(packed.content)] == [1.0, 2.0]


def test_an_older_trainer_is_refused_and_its_long_poll_ends(api):
    old = str(api.register(after=0)["epoch"])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = {"headers": {"Atropos-Epoch": old}, "timeout": 30}
        waiting = pool.submit(requests.get, f"{api.url}/batch?after=0&wait=20", **asked)
        time.sleep(0.3)
        new = str(api.register(after=0)["epoch"])
        assert waiting.result(5).status_code == 409
    for path in ("/commit", "/weights"):
        api.post(path, {"through": 0}, status=409, Atropos_Epoch=old)
        api.post(path, {"through": 0}, Atropos_Epoch=new)


def test_committed_batches_are_deleted_if_told(tmp_path):
    with running_trajectory_api(tmp_path, "--retention", "committed") as api:
        api.register(after=0)
        api.post_groups(*range(1, 7))
        assert [api.batch(f"?after={after}") for after in range(3)] == [[1, 2], [3, 4], [5, 6]]
        api.post("/commit", {"through": 2})
        gone = requests.get(f"{api.url}/batch?after=1")
        assert gone.status_code == 410 and gone.json()["oldest"] == 3
        assert api.batch("?after=2") == [5, 6]
        assert api.post("/register", REGISTRATION | {"after": 1}, status=410)["oldest"] == 3
        api.restart()
        assert api.post("/register", REGISTRATION | {"after": 0}, status=410)["oldest"] == 3


def test_a_live_run_is_not_reset(api):
    api.register(after=0)
    api.post_groups(1, 2, 3)
    assert api.batch("?after=0") == [1, 2]
    assert requests.get(f"{api.url}/reset_data").status_code == 409
    api.post("/register", REGISTRATION | {"batch_size": 1}, status=409)
    assert requests.get(f"{api.url}/batch").status_code == 409
    api.restart()
    assert requests.get(f"{api.url}/reset_data").status_code == 409
    assert api.batch("?after=0") == [1, 2]


def test_a_key_is_stored_once(api):
    api.register()
    for _ in range(3):
        api.post("/scored_data_list", [group(1), group(1)], Atropos_Key="one")
    api.restart()
    api.post("/scored_data_list", [group(1), group(1)], Atropos_Key="one")
    api.post("/scored_data", group(1), status=409, Atropos_Key="one")
    api.post("/scored_data_list", [group(1), group(2)], status=409, Atropos_Key="one")
    assert api.get("/status")["queue_size"] == 2


def test_tickets_of_a_gone_environment_are_released(tmp_path):
    with running_trajectory_api(tmp_path, impatient=True) as api:
        api.register(after=0, max_staleness=0)
        gone, alive = (api.post("/register-env", ENVIRONMENT)["env_id"] for _ in range(2))
        assert api.post("/begin", {"env_id": gone})["ticket"]
        api.post_groups(1, 2, env_id=alive)
        assert api.batch("?after=0&wait=5") == [1, 2]
        assert api.get("/diagnose")["counts"]["released/environment_gone"] == 1


def test_export_and_import_give_the_same_batches(api, tmp_path, capsys):
    data, exported, copied = (str(tmp_path / name) for name in ("data", "log.jsonl", "copy/data"))

    def printed(*arguments):
        main([*arguments])
        return capsys.readouterr().out.splitlines()

    api.register(after=0)
    api.post_groups(*range(1, 6), messages=[[{"role": "user", "content": "é"}]])
    bodies = [api.session.get(f"{api.url}/batch?after={after}").content for after in (0, 1)]
    assert [line.split()[0] for line in printed("list", data)[1:]] == ["1", "2", "queued"]
    printed("export", data, exported)
    printed("import", copied, exported)
    assert numbers(map(json.loads, printed("show", copied, "2"))) == [3, 4]
    with running_trajectory_api(tmp_path / "copy") as copy:
        copy.register(after=0)
        assert [copy.session.get(f"{copy.url}/batch?after={after}").content for after in (0, 1)] == bodies
    with pytest.raises(SystemExit, match="^error: data-dir="):
        printed("import", copied, exported)


def test_damage_ends_the_server_with_its_reason(tmp_path):
    """Its last line says which file and what to do, while it ran and at each start."""
    database = tmp_path / "data/trajectories.db"
    with running_trajectory_api(tmp_path, "--retention", "committed") as api:
        api.register(after=0)
        api.post_groups(*range(1, 9))
        assert api.batch("?after=0") == [1, 2]
        assert api.stop() == 0
        api.start()
        with open(database, "r+b") as file:
            file.seek(16_384)
            file.write(b"\xff" * 20 * 16_384)
        reply = api.session.get(f"{api.url}/batch?after=0")
        assert reply.status_code == 503 and "is damaged" in reply.json()["detail"]
        assert api.process.wait(20) == 1
        again = api.run()
        for told in (api.log(), again.stderr):
            assert told.splitlines()[-1].startswith(f"error: {database} is damaged: "), told
        assert again.returncode == 1 and "Traceback" not in api.log() + again.stderr
