"""A run on a Ray cluster of several nodes, in network namespaces of this machine, with servers that Ray places."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.chaos import ledger
from helpers import ROOT
from helpers.nodes import Cluster, namespaces_are_permitted
from helpers.waiting import until
from recipe.atropos.checkpoint.shards import Shards
from recipe.atropos.checkpoint.store import Checkpoints, step_of
from recipe.atropos.errors import RECOVERABLE
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.record import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SERVER, RANK = "sglang.launch_server", "ray::AtroposActorWorker"
ACTORS = ("ray::Host", "ray::Probe")


@pytest.fixture(autouse=True)
def permitted():
    if not namespaces_are_permitted():
        pytest.skip("network namespaces are not permitted here")


class Launched:
    """A launcher on the head; ``poll`` and ``tail`` as of a service."""

    def __init__(self, cluster, folder, *options):
        self.cluster, self.run, self.log = cluster, folder / "run", folder / "launcher.log"
        command = [sys.executable, "-m", "recipe.atropos.launch_services", "--preset", "demo", "--plain"]
        command += [f"ray_kwargs.ray_init.address={cluster.address(0)}:6379", "inference.placement=ray", *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                cluster.command(0, *command, "--run-dir", str(self.run)),
                env=os.environ | cluster.variables,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self.poll = self.process.poll

    def tail(self, lines):
        return "\n".join(self.log.read_text().splitlines()[-lines:])

    def node_of(self, text):
        """The node that has a process with such a command line, or None."""
        for node in self.cluster.nodes:
            if any(text in " ".join(process.cmdline()) for process in self.cluster.processes(node)):
                return node
        return None

    def reach(self, step, within=240):
        until(lambda: any(line["step"] >= step for line in read_metrics(self.run)), within, self)

    def trains_nothing_for(self, seconds):
        before = len(list(read_metrics(self.run)))
        time.sleep(seconds)
        return len(list(read_metrics(self.run))) == before

    def own_processes(self):
        """Those of the run, not of Ray."""
        living = (process for node in self.cluster.nodes for process in self.cluster.processes(node))
        lines = (" ".join(process.cmdline()) for process in living)
        return [line for line in lines if any(mark in line for mark in (SERVER, RANK, *ACTORS, "recipe.atropos"))]

    def open_ports(self, text):
        """The ports that processes with such a command line have at every address of their node."""
        node = self.node_of(text)
        listed = self.cluster.command(node, "ss", "-Hltnp")  # psutil looks in this namespace alone
        lines = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
        pids = [each.pid for each in self.cluster.processes(node) if text in " ".join(each.cmdline())]
        ports = [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in pids)]
        assert any(port.startswith(f"{self.cluster.address(node)}:") for port in ports), lines
        return [port for port in ports if port.startswith(("0.0.0.0:", "*:", "[::]:"))]


def assert_each_once(run, steps, *other):
    """So many steps were trained, each and each group once; of the ``other`` counts there may be any."""
    counts = ledger(run)
    assert counts.pop("steps") == steps and counts.pop("groups"), counts
    assert not any(count for name, count in counts.items() if name not in other), counts


@pytest.fixture
def cluster(tmp_path):
    """A head without room for servers and ranks, and three nodes with room for one of them each."""
    with Cluster(tmp_path, [0, 1, 1, 1]) as cluster:
        yield cluster


def test_nodes_lost_with_server_and_rank_lose_no_batch(cluster, tmp_path):
    """Each is started again on another node, and for the server no step is lost; afterwards nothing is left. A server
    that is lost alone is started again where it was, and the trainer goes on.
    """
    options = ["trainer.save_freq=4", "environment.evaluate=false", "trainer.logger=[console]"]
    launched = Launched(cluster, tmp_path, "--steps", "12", *options)
    launched.reach(3)
    server, rank = launched.node_of(SERVER), launched.node_of(RANK)
    assert {server, rank} < {1, 2, 3} and server != rank
    open_ports = launched.open_ports(RANK), launched.open_ports(SERVER)
    assert len(open_ports[0]) <= 1 and not open_ports[1], f"{open_ports}, of which Ray has one in a rank"
    [alone] = [each for each in cluster.processes(server) if SERVER in each.cmdline()]
    alone.kill()
    until(lambda: "sglang ended (-9), started again" in launched.log.read_text(), 60, launched)
    launched.reach(5)
    assert launched.node_of(SERVER) == server and "trainer ended" not in launched.log.read_text()
    cluster.kill(server)
    until(lambda: launched.node_of(SERVER) not in (None, server), 180, launched)
    until(lambda: "trainer ended (75), started again" in launched.log.read_text(), 120, launched)
    done = max(line["step"] for line in read_metrics(launched.run))
    assert done in map(step_of, Checkpoints(launched.run / "checkpoints").whole())
    launched.reach(done + 2)
    cluster.start(server)  # a replacement, for what is lost next
    rank = launched.node_of(RANK)
    cluster.kill(rank)
    launched.reach(12, within=400)
    assert launched.process.wait(120) == 0, launched.tail(60)
    assert_each_once(launched.run, 12, "empty_batches")
    log = RunDir(launched.run).log("sglang").read_text()
    assert "its node, or its actor there, is lost" in log
    ended = time.monotonic()
    until(lambda: not launched.own_processes(), 20, told=lambda: str(launched.own_processes()))
    assert time.monotonic() - ended < 20


def test_nodes_that_are_preempted_save_and_the_run_goes_on(tmp_path):
    """SIGUSR1, as it waits for a batch: the last step is saved, nothing is left; the same command continues, each
    batch once.
    """
    options = ["environment.evaluate=false", "trainer.logger=[console]", "trainer.save_freq=100"]
    with Cluster(tmp_path, [0, 1, 1]) as cluster:
        launched = Launched(cluster, tmp_path, "--steps", "60", *options)
        launched.reach(3)
        for process in cluster.processes(0):
            if "recipe.atropos.utils.env_adapter" in process.cmdline():
                process.suspend()
        until(lambda: launched.trains_nothing_for(8.0), 120, launched)
        launched.process.send_signal(signal.SIGUSR1)
        assert launched.process.wait(120) == RECOVERABLE, launched.tail(60)
        until(lambda: not launched.own_processes(), 20, told=lambda: str(launched.own_processes()))
        done = max(line["step"] for line in read_metrics(launched.run))
        assert [folder.name for folder in (launched.run / "checkpoints").glob("global_step_*")] == [
            f"global_step_{done}"
        ]
        launched = Launched(cluster, tmp_path, "--steps", str(done + 2), *options)
        assert launched.process.wait(300) == 0, launched.tail(60)
        assert_each_once(launched.run, done + 2)


def test_nodes_lost_with_a_replica_start_it_elsewhere(cluster, tmp_path):
    """Ray places both replicas of the environment; the head has the server, a node the rank."""
    options = ["inference.placement=launcher", "environment.replicas=2"]
    options += ["environment.evaluate=false", "trainer.logger=[console]"]
    launched = Launched(cluster, tmp_path, "--steps", "16", *options)
    launched.reach(3)
    first, second = "environments/gsm8k.jsonl", "environments/gsm8k.1.jsonl"
    lost = launched.node_of(second)
    assert {lost, launched.node_of(first), launched.node_of(RANK)} == {1, 2, 3}
    cluster.kill(lost)
    cluster.start(lost)
    until(lambda: launched.node_of(second) is not None, 120, launched)
    assert launched.process.wait(400) == 0, launched.tail(60)
    assert_each_once(launched.run, 16, "empty_batches")
    environment = json.loads(RunDir(launched.run).summary.read_text())["environments"]["gsm8k"]
    assert environment["restarts"] == 1 and not environment["abandoned"]
    until(lambda: not launched.own_processes(), 20, told=lambda: str(launched.own_processes()))


PRINTS = """
import sys
from pathlib import Path
from helpers.waiting import until
from recipe.atropos.config.compose import load_config
from recipe.atropos.launcher.on_ray import Cluster
cluster = Cluster(load_config(["preset=demo", f"ray_kwargs.ray_init.address={sys.argv[1]}"]), {}, ["program"])
until(lambda: not cluster.awaited("program"), 60)
log = Path(sys.argv[2])
service = cluster.start_program("program", [sys.executable, "-c", "print('x' * 20_000_000)"], log)
until(lambda: service.poll() is not None, 30)
assert service.poll() == 0 and log.stat().st_size == 20_000_001, log.stat().st_size
cluster.close()
"""


def test_nodes_output_of_a_service_arrives_however_long(tmp_path):
    """And with it the status; Ray gives the launcher a long answer only once the head has fetched it."""
    with Cluster(tmp_path, [0, 1]) as cluster:
        cluster.variables |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        ended = cluster.run(0, sys.executable, "-c", PRINTS, f"{cluster.address(0)}:6379", tmp_path / "log")
    assert ended.returncode == 0, ended.stderr


def test_nodes_of_two_ranks_end_with_the_weights_of_one(tmp_path):
    """The batches of a run of one rank, trained on again by two on two nodes; SGD, which scales no rounding up."""
    options = ["actor_rollout_ref.actor.optim.optimizer=SGD", "actor_rollout_ref.actor.optim.lr=0.1"]
    options += [
        "environment.evaluate=false",
        "trainer.logger=[console]",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=null",
    ]
    with Cluster(tmp_path, [0, 1, 1]) as cluster:
        launched = Launched(cluster, tmp_path, "--steps", "3", *options)
        assert launched.process.wait(300) == 0, launched.tail(60)
        command = [sys.executable, "-m", "recipe.atropos", "replay", str(launched.run), "trainer.nnodes=2"]
        replay = cluster.run(0, *command)
    assert "hold no checkpoints of one and the same number of ranks" in replay.stderr, replay.stderr[-3000:]
    first, one = (Shards(launched.run / f"checkpoints/global_step_{step}/actor") for step in (1, 3))
    two = Shards(tmp_path / "run-replay/checkpoints/global_step_3/actor")
    largest = [max((one[name] - other[name]).abs().max().item() for name in one) for other in (first, two)]
    assert largest[0] > 1e-3 and largest[1] <= 1e-5, largest


@pytest.mark.parametrize("first", ["ray", "launcher", "ranks"])
def test_nodes_that_share_no_folder_are_refused(tmp_path, first):
    """By their address. Every node has the folder of checkpoints, and both of the ranks' another file system there.

    The launcher looks before it starts anything, whatever Ray places, and says if Ray has no token; the ranks of a
    trainer without one look later.
    """
    hidden = tmp_path / "checkpoints"
    hidden.mkdir()
    nodes = Cluster(tmp_path, [0, 1, 1], dict.fromkeys((1, 2), f"mount -t tmpfs none {hidden}"))
    nodes.variables |= {"RAY_AUTH_MODE": "disabled"} if first == "launcher" else {}
    with nodes as cluster:
        places = "|".join(map(re.escape, (cluster.address(1), cluster.address(2))))
        options = [f"trainer.default_local_dir={hidden}"]
        if first == "ranks":
            options += [f"ray_kwargs.ray_init.address={cluster.address(0)}:6379", "preset=demo"]
            options += [f"run.dir={tmp_path / 'run'}", f"inference.urls=[http://{cluster.address(0)}:1]"]
            ended = cluster.run(0, sys.executable, "-m", "recipe.atropos.main", *options)
            status, told = ended.returncode, ended.stderr
            message = rf"trainer.default_local_dir=\S+ is not one folder for this machine and ({places}), so no"
        else:
            launched = Launched(cluster, tmp_path, "--steps", "2", f"inference.placement={first}", *options)
            status, told = launched.process.wait(300), launched.log.read_text()
            message = rf"node ({places}): trainer.default_local_dir={re.escape(str(hidden))}: .* mount one file system"
            assert ("the cluster has no token, so that whoever reaches it" in told) == (first == "launcher")
            assert not launched.own_processes()
        assert status == 1 and re.search(message, told.replace("\n", " ")), told[-3000:]


def test_cluster_check_names_every_fault_and_its_node(tmp_path):
    """Eight faults, six of them of node 1, where the other nodes have none; without them every check passes, but for
    Ray's token, if it has none.
    """
    run, late, programs = tmp_path / "run", tmp_path / "late", tmp_path / "programs"
    for folder in (run, late, programs, late / "torch-1.0.dist-info"):
        folder.mkdir()
    (late / "torch-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    (late / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() - 60\n")
    (programs / "nvidia-smi").write_text('#!/bin/sh\ncase "$*" in *memory.used*) echo 30000;; *) exit 1;; esac\n')
    (programs / "nvidia-smi").chmod(0o755)
    faults = f"""ulimit -n 1024
        mount -t tmpfs none {run}
        export GLOO_SOCKET_IFNAME=lo PYTHONPATH={late} PATH={programs}:$PATH
        ip route add blackhole {Cluster(tmp_path, []).address(2)}"""
    expected = {
        "versions": "torch 1.0, here",
        "clock": r"its clock is (59|60)\.\d s from the head's: run NTP",
        "open files": "it allows 1024 open files: ulimit -n 4096",
        "folder": f"run.dir={run}: .*: mount one file system there",
        "interface": r"GLOO_SOCKET_IFNAME=lo, and \S+ is on eth0",
        "gpus": "GPU 0 has 30000 MiB in use",
        "ports": f"it reaches no free port of {Cluster(tmp_path, []).address(2)}",
    }
    with Cluster(tmp_path, [1, 1, 1], {1: faults}) as cluster:
        status, lines = check(cluster, run, "--nodes", "4")
        failed = [line.split(None, 2)[1:] for line in lines if line.startswith("FAILED")]
        assert status == 1
        own = [told for node, told in failed if node == cluster.address(1)]
        for name, problem in expected.items():
            assert any(re.match(f"{name} +{problem}", told) for told in own), (name, lines)
        others = [told for node, told in failed if node != cluster.address(1)]
        assert len(own) == 7 and len(others) == 2 and re.match("nodes +Ray knows 3 of 4 nodes", others[0]), lines
        assert re.match(f"ports +it reaches no free port of {cluster.address(1)}", others[1])
    with Cluster(tmp_path, [1, 1]) as cluster:
        status, lines = check(cluster, run, "--nodes", "2")
        assert status == 0 and sum(line.startswith("ok") for line in lines) == 16, lines
    without = Cluster(tmp_path, [1])
    without.variables |= {"RAY_AUTH_MODE": "disabled"}
    with without as cluster:
        status, lines = check(cluster, run)
        [failed] = [line for line in lines if line.startswith("FAILED")]
        assert status == 1 and "whoever reaches it can run code on every node: on each, before ray start" in failed


def check(cluster, run, *options):
    """The exit status, and the lines that it prints."""
    address = f"ray_kwargs.ray_init.address={cluster.address(0)}:6379"
    command = [sys.executable, "-m", "recipe.atropos", "cluster", "check", *options, address, f"run.dir={run}"]
    ended = cluster.run(0, *command, timeout=200)
    return ended.returncode, ended.stdout.splitlines() or ended.stderr


SRUN = """#!/bin/bash
# A task is a process group, what is left of which is killed once the task has ended: slurmstepd's job_manager().
shift
set -m
tasks=()
for node in 0 1; do SLURM_NODEID=$node ip netns exec {prefix}-$node "$@" & tasks+=($!); done
end() { kill "${tasks[@]}"; wait; kill -KILL -- "${tasks[@]/#/-}"; exit $1; } 2>/dev/null
trap 'end 143' TERM
wait -n
end $?
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) printf '{first}\\n{second}\\n' ;;
    requeue) echo "$2" >> {requeued} ;;
esac
"""


@pytest.fixture
def slurm_job(tmp_path):
    """A cluster of two nodes, and a start of the script that is printed for them; of SLURM, the two programs that it
    calls are stood in for.
    """
    programs, job = tmp_path / "programs", tmp_path / "job.sh"
    programs.mkdir()
    with Cluster(tmp_path, [0, 0], started=False) as cluster:
        addresses = {"first": cluster.address(0), "second": cluster.address(1)}
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            text = text.replace("{prefix}", cluster.prefix).replace("{requeued}", str(tmp_path / "requeued"))
            for key, address in addresses.items():
                text = text.replace(f"{{{key}}}", address)
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        command = [sys.executable, "-m", "recipe.atropos", "cluster", "sbatch", "--nodes", "2", "--preset", "demo"]
        command += ["--steps", "6", f"run.dir={tmp_path / 'run'}", "inference.placement=ray"]
        job.write_text(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{programs}:{os.environ['PATH']}"}

        def start():
            with open(tmp_path / "job.log", "ab") as log:
                return subprocess.Popen(
                    cluster.command(0, "bash", str(job)), env=os.environ | variables, stdout=log, stderr=log
                )

        yield cluster, start


def ended(cluster, process, folder):
    """The job's exit status, with which every process on its nodes ends."""
    status = process.wait(400)
    until(lambda: not any(map(cluster.processes, (0, 1))), 20, told=lambda: (folder / "job.log").read_text()[-3000:])
    return status


def test_cluster_job_for_slurm_is_requeued_and_goes_on(slurm_job, tmp_path):
    cluster, start = slurm_job
    process = start()
    until(lambda: len(read_metrics(tmp_path / "run")) > 1, 300)
    process.send_signal(signal.SIGUSR1)
    statuses = [ended(cluster, process, tmp_path), ended(cluster, start(), tmp_path)]
    assert statuses == [RECOVERABLE, 0], (tmp_path / "job.log").read_text()[-5000:]
    assert (tmp_path / "requeued").read_text() == "7\n"
    assert_each_once(tmp_path / "run", 6)


@pytest.mark.parametrize("lost", ["node", "head"])
def test_cluster_job_for_slurm_ends_with_what_is_lost(slurm_job, tmp_path, lost):
    """The other node, as it trains, or Ray's own server on the head; no component keeps the allocation."""
    cluster, start = slurm_job
    process = start()
    until(lambda: read_metrics(tmp_path / "run"), 300)
    if lost == "node":
        cluster.kill(1)
    else:
        [gcs] = [each for each in cluster.processes(0) if each.name() == "gcs_server"]
        gcs.kill()
    assert ended(cluster, process, tmp_path) not in (0, RECOVERABLE), (tmp_path / "job.log").read_text()[-5000:]
    assert not (tmp_path / "requeued").exists()
