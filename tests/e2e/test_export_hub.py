"""A trained model on its way to the hub, which here is a server of the same protocol on this machine."""

# ruff: noqa: F811  (fixtures that are imported)

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.export import alone, arguments, make_model, small_run  # noqa: F401
from recipe.atropos.checkpoint.export import ExportError, _ask_hub, export
from recipe.atropos.errors import ConfigurationError

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("alone")]


def test_export_to_a_hub_that_is_not_there_says_so(small_run, monkeypatch):
    """Before the model is written; a token does not help against a network that fails."""
    run, _ = small_run
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    shutil.rmtree(run.model, ignore_errors=True)
    told = {"me/model": "try again when the hub can be reached", "not/a/name": r"give ORG/NAME, and a token .*"}
    for name, fix in told.items():
        with pytest.raises(ExportError, match=f"--push-to-hub={name}: .+; {fix}; nothing was written$"):
            export(arguments(run.path, "--push-to-hub", name))
    assert not run.model.exists()


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for when it makes a repository and uploads a folder; no file goes over LFS."""

    takes_uploads = True

    def do_POST(self):
        body = self._body()
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(200, {"url": f"{self.server.url}/me/model"})
        elif not self.takes_uploads:
            self._answer(403, {"error": "no"})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path == "/api/models/me/model/preupload/main":
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self._answer(200, {"files": files})
        elif self.path == "/api/models/me/model/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.url}/me/model/commit/0123"
            self._answer(200, {"success": True, "commitOid": "0123", "commitUrl": url, "hookOutput": ""})
        else:
            self._answer(404, {"error": self.path})

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status, answer):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.created, server.files = f"http://127.0.0.1:{server.server_port}", [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    yield server
    server.shutdown()
    server.server_close()


def test_export_is_uploaded_to_a_private_repository_as_it_is(small_run, tmp_path, hub):
    run, _ = small_run
    exported = export(arguments(run.path, "--push-to-hub", "me/model", "--out", tmp_path / "out"))
    assert exported.folder == tmp_path / "out"
    [created] = hub.created
    assert (created["organization"], created["name"], created["visibility"]) == ("me", "model", "private")
    written = {path.name: path.read_bytes() for path in exported.folder.iterdir()}
    assert hub.files == written and {"model.safetensors", "tokenizer.json", "README.md"} <= set(written)


def test_export_that_is_not_uploaded_says_what_is_where(small_run, tmp_path, hub, monkeypatch):
    monkeypatch.setattr(Hub, "takes_uploads", False)
    run, _ = small_run
    command = (run.path, "--push-to-hub", "me/model", "--out", tmp_path / "out")
    left = "me/model on the hub may be new, and without the model"
    with pytest.raises(ExportError, match=f"a token .*; {tmp_path}/out holds the export, and {left}$"):
        export(arguments(*command))
    assert (tmp_path / "out/model.safetensors").exists()
    with pytest.raises(ConfigurationError, match="--adapter") as caught:
        export(arguments(*command, "--adapter"))
    assert caught.value.__notes__ == [left]


def test_export_names_an_error_without_text():
    def fails(_):
        raise TimeoutError

    with pytest.raises(ExportError, match="--push-to-hub=me/model: TimeoutError; try again"):
        _ask_hub("me/model", fails)
