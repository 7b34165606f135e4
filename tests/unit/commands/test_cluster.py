"""The jobs that ``cluster`` prints; ``tests/e2e/test_nodes.py`` runs the one for SLURM, and the checks."""

import os
import shlex
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import yaml

from helpers.waiting import until
from recipe.atropos.commands.cluster import check, job
from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.errors import RECOVERABLE, ConfigurationError, LaunchError
from recipe.atropos.launcher import cluster_check, on_ray
from recipe.atropos.launcher.cluster_check import Facts, _selects
from recipe.atropos.launcher.on_ray import Host

OPTIONS = ["preset=demo", "run.name=a b", "trainer.nnodes=2"]


@pytest.mark.parametrize("kind", ["sbatch", "skypilot", "kuberay"])
def test_cluster_jobs_train_with_the_options_on_all_nodes(kind):
    text = job(kind, 3, OPTIONS)
    assert "<" not in text.replace("<<<", "") and len(text.splitlines()) <= 60
    if kind == "kuberay":
        spec = yaml.safe_load(text)["spec"]
        cluster = spec["rayClusterSpec"]
        script, nodes = spec["entrypoint"], 1 + cluster["workerGroupSpecs"][0]["replicas"]
        assert cluster["rayVersion"] == metadata.version("ray"), "KubeRay takes no token without it"
    elif kind == "skypilot":
        task = yaml.safe_load(text)
        script, nodes = task["run"], task["num_nodes"]
    else:
        script, nodes = text, int(text.split("#SBATCH --nodes=")[1].split()[0])
    assert nodes == 3 and "--nodes 3 --wait 600" in script and shlex.join(OPTIONS) in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_cluster_jobs_that_would_not_go_on_are_refused():
    assert job("sbatch", 2, [*OPTIONS, "trainer.resume_mode=auto"])
    with pytest.raises(ConfigurationError, match="^trainer.resume_mode=disable: a job that is requeued would"):
        job("sbatch", 2, [*OPTIONS, "trainer.resume_mode=disable"])
    with pytest.raises(ConfigurationError, match="^--nodes 0: give 1 or more$"):
        job("sbatch", 0, OPTIONS)


SLURM = {
    "srun": "trap 'kill $!' TERM\nsleep 100 & wait",
    "scontrol": """case $1 in show) echo here ;; requeue) echo "$2" >> requeued ;; esac""",
    "ray": "",
    "python": "case $1 in -c) echo 127.0.0.1 ;; *) touch checked; exec sleep 20 ;; esac",
}


def test_cluster_job_for_slurm_is_requeued_before_its_run(tmp_path):
    """SIGUSR1 as it waits for its nodes, which may take longer than the 180 s that SLURM leaves."""
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    text = job("sbatch", 2, OPTIONS).replace(f"python={shlex.quote(sys.executable)}", f"python={tmp_path}/python")
    text = text.replace(f"cd {shlex.quote(str(Path.cwd()))}", f"cd {tmp_path}")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", "-c", text], env=os.environ | variables)
    until((tmp_path / "checked").exists, 20)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == RECOVERABLE and (tmp_path / "requeued").read_text() == "7\n"


@pytest.mark.parametrize(
    ("value", "selects"),
    [
        ("eth", True),
        ("ib0", True),
        ("^lo,docker0", True),
        ("=eth0", True),
        ("=eth", False),
        ("lo", False),
        ("^eth,ib", False),
    ],
)
def test_cluster_check_reads_interfaces_as_nccl_does(value, selects):
    assert _selects(value, {"eth0", "ib0"}) == selects


@pytest.mark.parametrize(("given", "added"), [("run.resume_from=other", []), ("seed=2", [f"{MODEL_KEY}=model"])])
def test_cluster_check_needs_no_model_and_adds_none_to_another(monkeypatch, given, added):
    """A run to begin with names its own, so that its job can be checked."""
    plan = Mock(side_effect=ConfigurationError)
    monkeypatch.setattr("recipe.atropos.commands.cluster.plan_run", plan)
    with pytest.raises(ConfigurationError):
        check([given], nodes=1, wait=0.0)
    plan.assert_called_once_with([given, *added], begins=False)


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"recipe (commit)": "1", "SGLang's sglang": "2"}, ""),
        ({"SGLang's sglang": "2"}, ""),  # without git there
        ({"SGLang's sglang": "2", MODEL_KEY: None}, f"{MODEL_KEY} None, here /m: install the same there"),
        ({"recipe (commit)": "0", "SGLang's sglang": "2"}, "recipe (commit) 0, here 1: install"),
        ({"recipe (commit)": "1", "SGLang's sglang": None}, "no interpreter with SGLang starts"),
    ],
)
def test_cluster_check_compares_what_is_known_of_both(monkeypatch, versions, problem):
    monkeypatch.setattr(cluster_check, "_head", lambda: "10.0.0.1")
    own = {"recipe (commit)": "1", "SGLang's sglang": "2"} | ({MODEL_KEY: "/m"} if MODEL_KEY in versions else {})
    facts = {"10.0.0.1": Facts(own, 4096, {}, {}, []), "10.0.0.2": Facts(versions, 4096, {}, {}, [])}
    for serves in (True, False):
        found = [each.problem for each in cluster_check._compared(facts, serves) if each.check == "versions"]
        wrong = problem if serves or "SGLang" not in problem else ""
        assert wrong in found[1] and bool(found[1]) == bool(wrong), "SGLang's version matters where servers may be"


def test_cluster_check_knows_no_gpu_that_is_not_shown(monkeypatch):
    """One of Ray's is not free because nobody can tell; one that tells no memory (MIG) is shown."""
    monkeypatch.setattr(cluster_check, "_head", lambda: "head")
    versions = {"SGLang's sglang": "2"}
    nodes = {"head": Facts(versions, 4096, {}, {}, [], 0), "silent": Facts(versions, 4096, {}, {}, [], 8)}
    nodes |= {"idle": Facts(versions, 4096, {}, {}, [0], 8), "busy": Facts(versions, 4096, {}, {}, [0, 2000], 8)}
    found = {each.node: each.problem for each in cluster_check._compared(nodes, True) if each.check == "gpus"}
    assert found == {
        "head": "",
        "idle": "",
        "busy": "GPU 1 has 2000 MiB in use: end what uses it (nvidia-smi)",
        "silent": "Ray has 8 GPUs there, and nvidia-smi shows none: repair it, or the driver",
    }


def test_cluster_program_ends_before_it_starts_again(tmp_path):
    """One that the launcher took for lost, as its node did not answer for a while: it would hold port and GPUs."""
    host, marks = Host(), []
    with pytest.raises(LaunchError, match=r"env: \S+, where the launcher runs, is no folder of node"):
        host.start_program("env", ["true"], str(tmp_path / "none"), {})
    for _ in range(2):
        pid = host.start_program("env", [sys.executable, "-c", "import time; time.sleep(100)"], str(tmp_path), {})
        marks.append((psutil.Process(pid), host._scratch.folder))
    host.stop(1.0)
    assert not any(process.is_running() or folder.exists() for process, folder in marks)


def test_cluster_program_leaves_all_its_output_in_bounded_files(tmp_path, monkeypatch):
    """However steadily it writes, and what it says at its end too."""
    monkeypatch.setattr(on_ray, "_LOG_BYTES", 1000)
    program = "import signal, time; signal.signal(15, lambda *_: exit(print('the end'))); print('begun')\n"
    program += "while True: print(9 * 'a line '); time.sleep(0.01)"
    host = Host()
    host.start_program("env", [sys.executable, "-uc", program], str(tmp_path), {})
    log, found = host._service.log_path, b""
    while len(found) < 5000:
        time.sleep(0.05)
        found += host.poll()[1]
        assert log.stat().st_size < 3000
    lines = (found + host.stop(10.0)).decode().splitlines()
    assert lines[0] == "begun" and lines[-1] == "the end"


def test_cluster_check_of_no_cluster_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    from recipe.atropos.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["cluster", "check", "actor_rollout_ref.model.path=m"])
    assert "no Ray cluster is joined: set ray_kwargs.ray_init.address" in str(ended.value.code)
