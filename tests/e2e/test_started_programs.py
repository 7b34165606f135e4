"""Programs that import much, each started for one test: from another folder, with secrets, with a typo, with GPUs."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.gpu import VARIABLES
from helpers.runs import run_of
from recipe.atropos import main
from recipe.atropos.config.compose import load_config
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launcher.environment_processes import check_environments
from recipe.atropos.utils import private_process
from recipe.atropos.utils.hosts import address_for_nodes

RECIPE = ROOT / "recipe/atropos"
KEY = "the-key-of-the-run"


def test_the_folder_works_among_other_recipes(tmp_path):
    """As verl-recipe has it: beside others, in a folder that is no package, without the rest of this repository."""
    shutil.copytree(RECIPE, tmp_path / "recipe/atropos", ignore=shutil.ignore_patterns("__pycache__"))
    required = (tmp_path / "recipe/atropos/REQUIRED_VERL.txt").read_text().strip()
    assert f'"{required}"' in (ROOT / "pyproject.toml").read_text()
    program = "import recipe.atropos.launch_services, recipe.atropos.ray_trainer as t; print(t.__file__)"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "recipe/atropos/ray_trainer.py")


def test_secret_flags_reach_a_process_that_prints_none():
    """It starts a further process, which meets others at two addresses, and torch's stores listen only there."""
    variables = {private_process.SECRET_FLAGS: json.dumps(["--api-key", KEY]), "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        [sys.executable, private_process.__file__, "helpers.private", "--model", "m"],
        env={**os.environ, **variables},
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    arguments, listens = found.stdout.splitlines()
    assert arguments == "arguments ['--model', 'm', '--api-key', '***'] variables []"
    assert KEY not in found.stdout + found.stderr and "error ['--model'" in found.stderr
    assert set(json.loads(listens)["listens"]) == {"127.0.0.1", address_for_nodes("auto")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = [sys.executable, "-c", f"from helpers import private; private.listen({port})"]
    listens = subprocess.run(
        alone, env=os.environ | variables, cwd=ROOT / "tests", capture_output=True, text=True, check=True
    )
    # If not, torch has it (pytorch/pytorch#155741), and bind_rendezvous can go.
    assert set(json.loads(listens.stdout)["listens"]) != {"127.0.0.1"}


def test_rendezvous_at_an_address_of_another_machine_is_named():
    code = (
        "from recipe.atropos.utils.private_process import bind_rendezvous\nimport torch.distributed as ranks\n"
        "bind_rendezvous()\nranks.init_process_group('gloo', 'tcp://198.51.100.1:29511', rank=0, world_size=1)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    error = told.stderr.splitlines()[-1]
    assert "torch's rendezvous: Cannot assign" in error and "'198.51.100.1', 29511" in error, told.stderr
    assert "--node-ip-address" in error


def test_schema_start_checks_flags_of_an_environment(tmp_path):
    config = load_config(["preset=demo", "environment.args.sed=1"])
    with pytest.raises(ConfigurationError) as refusal:
        check_environments(run_of(config, tmp_path))
    assert str(refusal.value) == "unknown flag environment.args.sed; did you mean environment.args.seed?"
    assert not list(tmp_path.iterdir())


def test_schema_start_of_the_trainer_asks_for_servers():
    config = load_config(["preset=demo"])
    with pytest.raises(ConfigurationError, match="inference.urls is empty: give the URLs of the SGLang servers"):
        main.run(config)


def test_schema_start_of_the_trainer_imports_no_verl_for_a_typo():
    code = (
        "import sys\nfrom recipe.atropos import main\n"
        "try:\n    main.main(['preset=demo', 'seeed=1'])\nexcept SystemExit as end:\n    print(end.code)\n"
        "print([name for name in ('torch', 'verl', 'ray') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert told.stdout.splitlines() == ["error: seeed: no such key; did you mean seed?", "[]"], told.stderr


# verl's platform; there is no GPU here: an ``nvidia-smi`` that lists some stands for it
CODE = "import verl; from verl.plugin.platform import get_platform; print('platform', get_platform().device_name)"
DRIVERS = "import recipe.atropos.utils.gpus as device; device.driver_gpus = lambda: {}; "


def platform(code=CODE, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**kept, **environment}
    )
    return [line for line in result.stdout.splitlines() if line.startswith("platform")]


def test_without_an_accelerator_verl_finds_the_cpu_by_itself(machine):
    machine(0, "exit 9")
    assert platform(DRIVERS.format(0) + CODE, CUDA_VISIBLE_DEVICES="") == ["platform cpu"]


@pytest.mark.parametrize(
    "where", ["nvidia-smi", *(pytest.param(where, marks=pytest.mark.slow) for where in ("driver", "cluster", "worker"))]
)
def test_where_a_gpu_may_be_present_the_plugin_stays_off(machine, where):
    """verl then takes its own default, also in a process that sees no GPU by itself."""
    if where == "nvidia-smi":
        machine(1)
    variables = {"cluster": {"RAY_ADDRESS": "host:6379"}, "worker": {"RAY_RAYLET_PID": "1"}}.get(where, {})
    assert platform((DRIVERS.format(1) if where == "driver" else "") + CODE, **variables) == ["platform cuda"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), [("nvidia", "cuda"), ("cpu", "cpu")])
def test_verls_own_variable_decides_over_both(name, device):
    assert platform(VERL_PLATFORM=name) == [f"platform {device}"]
