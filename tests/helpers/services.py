"""The real Trajectory API as a fixture-like context, and a way to post to it."""

import contextlib
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.waiting import until
from recipe.atropos.utils.process import Service, free_port, port_is_free, start_service


def get(url: str, payload: Any = None) -> Any:
    """``payload`` is a body: the API has a GET with one."""
    body = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="GET")
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


def post(url: str, payload: Any, headers: dict[str, str] | None = None) -> Any:
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(payload).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read())


@contextlib.contextmanager
def running_api(folder: Path, port: int | None = None) -> Iterator[Service]:
    """atroposlib's own run-api, answering."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    service = start_service("api", command, log_path=folder / "api.log", cwd=folder, url=url)
    try:
        until(lambda: not port_is_free(port) and get(f"{url}/status"), 60, service)
        yield service
    finally:
        service.stop(grace=3)


def group(number: int, size: int = 4) -> dict[str, Any]:
    """A small valid group that tells its number by its scores."""
    return {
        "tokens": [[1, 2, 3]] * size,
        "masks": [[-100, -100, 3]] * size,
        "scores": [float(number)] * size,
        "inference_logprobs": [[1.0, 1.0, -0.5]] * size,
    }
