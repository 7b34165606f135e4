"""scripts/gpu_check.py, which looks at a GPU, as it runs without one: the real parts, and a tiny model."""

import importlib.util
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.runs import run_of
from helpers.waiting import until
from machine_watch import MemoryWatch
from recipe.atropos.commands import doctor
from recipe.atropos.config.compose import load_config
from recipe.atropos.config.preflight import check_config
from recipe.atropos.inference.server import sglang_command
from recipe.atropos.launch_services import compose_overrides, parse_arguments
from recipe.atropos.launcher.sglang import plan_servers

SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOLDS_MEMORY_FOR_A_WHILE = """
for mib in (0, 256, 0):
    held = b"x" * (mib << 20)
    print(mib, flush=True)
    input()
"""


def test_memory_that_is_given_back_is_seen():
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS_MEMORY_FOR_A_WHILE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    watch, looks = MemoryWatch(on_gpu=False), []
    with child:
        with watch.of(lambda: looks.append(child.pid) or {"child": child.pid}):
            for _ in range(3):
                child.stdout.readline()
                looks.clear()
                until(lambda: len(looks) > 1, 20)  # the first of two is done
                child.stdin.write("\n")
                child.stdin.flush()
    mib = 1 << 20
    assert 256 * mib < watch.peaks["child"] < 400 * mib
    assert 0 < watch.lows["child"] < 100 * mib


def test_gpu_check_case_that_needs_more_gpus_is_no_failure(script, tmp_path):
    arguments = script.parse(["--size=tiny"])
    for name in ("distributed", "two_ranks", "tensor_parallel"):
        assert script.tried(name, arguments, 1, tmp_path) == {"impossible": "needs 2 GPUs"}
    assert script.CASES["tensor"].gpus == 1 and not list(tmp_path.iterdir()), "nothing was made for it"


def test_what_is_installed_is_looked_at_before_anything_starts(script, monkeypatch):
    assert script.installed(sys.executable, on_gpu=False) == {}
    monkeypatch.setattr(doctor, "check_gpu_environment", lambda config: ["an old driver"])
    found = script.installed(sys.executable, on_gpu=True)
    assert found["environments"] == {"ok": True, "message": "an old driver"}
    assert found["attention"]["ok"] and "attention by sdpa" in found["attention"]["message"]
    assert not found["memory_saver"]["ok"] and "torch_memory_saver" in found["memory_saver"]["error"]


def test_gpu_check_cases_fit_a_configuration_for_gpus(script, tmp_path, monkeypatch):
    """Each starts SGLang as it is meant to. Composed as on a GPU machine; verl's own platform here is the CPU's."""
    for name, case in script.CASES.items():
        size, model = script.SIZES["400m"], tmp_path / f"model-{case.model}"
        if not model.exists():
            script.make_model(model, case, script.SIZES["tiny"], "bfloat16")
        overrides = script.overrides_of(case, size, on_gpu=True, mem_fraction=0.25)
        given = ["--model", str(model), "--gpus", str(case.ranks), *overrides, "inference.python=python"]
        config = load_config(compose_overrides(parse_arguments(given)))
        check_config(config)
        assert config.actor_rollout_ref.actor.use_torch_compile == (name == "compiled")
        assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == (16_384 if name == "long" else 4096)
        servers = plan_servers(run_of(config, tmp_path / name))
        assert len(servers) == (2 if name == "two_servers" else 1)
        command = " ".join(sglang_command(servers[min(servers)])[0])
        assert ("--tp-size 2" in command) == (name == "tensor_parallel")
        if case.colocated:
            assert "--mem-fraction-static 0.25" in command and "--enable-memory-saver" in command, name
            assert "--base-gpu-id 0" in command
        else:
            assert "--base-gpu-id 1" in command and "--enable-memory" not in command, name


def test_gpu_check_table_fits_a_screen_of_80_columns(script, capsys):
    figures = {"seconds": 599.6, "push_s": 123.4567, "pause_s": 123.4567, "generated_tokens_per_s": 123456.7}
    figures |= {"trainer_gib": 139.99, "before": 1.23e-10, "after": 1.23e-10, "probe": 1.23e-10, "push_gb_per_s": 3.2}
    results = {name: {"ok": True, **figures} for name in script.CASES} | {"driver": {"ok": False, "error": "none"}}
    script.print_table(results)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(results) + 1 and max(map(len, table)) <= 80
    assert table[-1] == "driver: none" and "FAILED" in table[-2]
    assert table[1].split() == "tensor ok 600 123.457 123.457 123457 140.0 1e-10 1e-10 1e-10".split()
