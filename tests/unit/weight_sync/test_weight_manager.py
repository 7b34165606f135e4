"""The trainer's side of servers that are gone or refuse; of those that answer, see ``test_two_servers.py``."""

import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipe.atropos.inference.client import InferenceError, ServerGone
from recipe.atropos.utils.process import free_port
from recipe.atropos.weight_sync.colocated import SharedMemory
from recipe.atropos.weight_sync.manager import WeightSyncManager
from recipe.atropos.weight_sync.servers import reported_versions

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def refusing():
    """URL of an HTTP server that answers 501 to all."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_memory_that_cannot_be_given_back_is_logged(refusing, tmp_path, caplog):
    """It takes no error's place. As the trainer does at the end of ``fit``, whatever ended it."""
    manager = WeightSyncManager(None, memory=SharedMemory([], None, "auto", 5, tmp_path / "lent"))
    manager.memory.released = {refusing: "1"}
    manager.memory.mark.touch()
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        finally:
            manager.onload_servers()
    assert "start the servers again" in caplog.text and f"{refusing}/model_info: HTTP 501" in caplog.text
    assert not manager.memory.released and not manager.memory.mark.exists()


def test_a_trainer_that_begins_has_no_memory_of_anybody(tmp_path):
    (tmp_path / "lent").touch()  # by one that was killed
    assert not SharedMemory([], None, "auto", 5, tmp_path / "lent").mark.exists()


def test_server_may_be_gone_while_a_batch_is_waited_for(refusing, caplog):
    """It must be there when a step begins."""
    nobody = f"http://127.0.0.1:{free_port()}"
    manager = WeightSyncManager(None, reported=partial(reported_versions, [nobody], None, 5))
    manager.version = 3
    for _ in range(3):
        assert manager.ensure_current(3, waiting=True) == {}
    assert caplog.text.count("the next step needs every server") == caplog.text.count(nobody) == 1
    with pytest.raises(ServerGone, match=nobody):
        manager.ensure_current(3)
    gone, manager.reported = manager.reported, lambda: {nobody: "3"}
    assert manager.ensure_current(3, waiting=True) == {}
    manager.reported = gone
    manager.ensure_current(3, waiting=True)
    assert caplog.text.count("the next step needs every server") == 2, "gone again after it came back"
    manager.reported = partial(reported_versions, [refusing], None, 5)
    with pytest.raises(InferenceError, match=f"{refusing}/model_info: HTTP 501"):
        manager.ensure_current(3, waiting=True)
