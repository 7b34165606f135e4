"""What many modules share, so that each need not start it again: a model, an SGLang server of it, and Ray."""

import functools
import gc
import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import omegaconf.base
import pytest
import torch
from hypothesis import HealthCheck, settings
from openai._base_client import AsyncHttpxClientWrapper

from helpers.disk import full_disk  # noqa: F401
from helpers.gpu import machine  # noqa: F401
from helpers.processes import no_service_outlives_its_test  # noqa: F401
from helpers.sglang import call, make_tiny_model, running_sglang
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.utils.process import unstopped

# Also on a machine with a GPU, in every process that is started from here.
os.environ |= {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}

# Two threads on cores that others use too wait for each other, and take up to ten times as long.
torch.set_num_threads(1)

# Shared cores take their time; all else as where the tests run, in continuous integration or not.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Of what a test of the configuration takes, a quarter would be parsing the same interpolations of verl's again.
omegaconf.base.parse = functools.cache(omegaconf.base.parse)

# A client that is dropped unclosed, as BaseEnv drops its own, closes itself in the loop that runs when it is collected:
# that of a later test, which would fail. Its sockets close by themselves.
del AsyncHttpxClientWrapper.__del__

# A shell that runs the tests in the background has them ignore SIGINT, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


_GEM = importlib.util.find_spec("gem")  # now, because later tests/unit is on the path, whose folder gem it would find
_GEM_TESTS = ("test_gem_env.py", "test_gem_vectors.py", "test_gem_reward_bridge.py", "test_gem_ray.py")


class _WithoutGem(pytest.Module):
    def collect(self) -> None:
        pytest.skip("gem-llm is not installed: pip install as docs/gem.md says", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip what imports gem where gem is not installed; None: pytest collects the module itself."""
    without = _GEM is None and module_path.name in _GEM_TESTS
    return _WithoutGem.from_parent(parent, path=module_path) if without else None


def pytest_collection_finish() -> None:
    """What is imported by now lives to the end: searching it for garbage again takes a tenth of the tests' time."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_lock_of_verl_is_left() -> Iterator[None]:
    """verl makes the folder of a checkpoint under a lock, whose file it leaves in the temporary folder."""
    folder = Path(tempfile.gettempdir())
    before = {*folder.glob("ckpt_*.lock")}
    yield
    for path in {*folder.glob("ckpt_*.lock")} - before:
        path.unlink(missing_ok=True)


@pytest.fixture
def no_wandb_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has logged in to W&B, whose files are in ``tmp_path``."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(name)
    for name, path in (("HOME", tmp_path), ("NETRC", tmp_path / "netrc"), ("WANDB_CONFIG_DIR", tmp_path)):
        monkeypatch.setenv(name, str(path))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of asynchronous tests, which anyio's plugin runs."""
    return "asyncio"


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of seed 0."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def _server_of_all(model_path: Path) -> Iterator[str]:
    with running_sglang(model_path) as (service, url):
        unstopped.remove(service)  # it is not of the test that asked for it first
        yield url


@pytest.fixture(scope="module")
def server(_server_of_all: str, model_path: Path) -> str:
    """URL of a server without a key, as it was started, whatever the module before did: ``model_path``, "default"."""

    async def anew(client: SGLangClient) -> None:
        await client.post("/abort_request", {"abort_all": True})
        await client.resume()
        await client.update_weights_from_disk(model_path, "default")

    call(_server_of_all, anew)
    return _server_of_all


@pytest.fixture(scope="session")
def _ray_of_all() -> Iterator[None]:
    yield
    import ray  # here, because the tests that need none begin sooner without

    ray.shutdown()


@pytest.fixture(scope="module")
def cluster(_ray_of_all: None) -> None:
    """Ray in this machine, with room for four ranks."""
    import ray

    from recipe.atropos.utils.local_ray import start_ray

    if not ray.is_initialized():
        start_ray(num_cpus=4, include_dashboard=False)
