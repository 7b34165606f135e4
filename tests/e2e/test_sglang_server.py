"""How an SGLang server is started and ended: what cannot work is said at once, and nothing outlives its launcher."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from helpers.sglang import running_sglang
from helpers.waiting import until
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.server import LaunchError, SGLangLaunch, check_launch, start_sglang
from recipe.atropos.utils.process import ServiceFailed

PROMPT = [20, 40, 60, 80, 100]


@pytest.mark.timeout(60)
def test_a_taken_port_is_an_error_at_once(model_path, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 is taken"):
            start_sglang(SGLangLaunch(str(model_path), port=port), log_path=tmp_path / "log")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_that_cannot_start_shows_its_own_last_lines(model_path, tmp_path):
    shutil.copytree(model_path, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ServiceFailed, match="(?s)sglang: not serving.*model weights"):
        with running_sglang(tmp_path / "model"):
            pass


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_no_process_of_the_server_outlives_a_killed_launcher(model_path, tmp_path):
    """Also after a request with n > 1, for which SGLang 0.5.12 would wait for ever."""
    code = (
        f"import sys, time; sys.path[:] = {sys.path!r}\n"
        "import asyncio\n"
        "from helpers.sglang import running_sglang\n"
        "from recipe.atropos.inference.client import SGLangClient\n"
        "async def sample(url):\n"
        f"    await SGLangClient(url).generate(input_ids={PROMPT}, sampling_params={{'n': 4, 'max_new_tokens': 4}})\n"
        f"with running_sglang({str(model_path)!r}, log_path='s.log') as (service, url):\n"
        "    asyncio.run(sample(url))\n"
        "    print(*[p.pid for p in service.members()], flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        members = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert len(members) >= 3
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in members), 30)


@pytest.mark.timeout(30)
def test_a_missing_model_folder_is_an_error_at_once(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigurationError, match=rf"{path}: no model there \(no config.json\)"):
            check_launch(SGLangLaunch(str(path)))
