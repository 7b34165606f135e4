"""What would keep the nodes of a Ray cluster from working together, found before a run needs them.

An actor on each node says what is there, writes into the run's folder and connects to all others. Every failed check
names the node and the fix.
"""

import fcntl
import ipaddress
import os
import resource
import socket
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
from omegaconf import DictConfig
from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.atropos.config.models import MODEL_KEY
from recipe.atropos.errors import AtroposError, LaunchError
from recipe.atropos.inference.installed import installed_versions
from recipe.atropos.inference.server import sglang_python
from recipe.atropos.utils.machine import nvidia_smi, versions_in

TOKEN = "token"
"""The check whose problem keeps no run from working."""

SGLANG = ("torch", "sglang", "transformers")
_SECONDS = 120.0  # for the nodes' answers
_APART_SECONDS = 2.0  # between two clocks
_LEAST_FILES = 4096
_GPU_MEBIBYTES = 1024  # of a GPU that is in use
_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Facts:
    """What a node says of itself. ``interfaces``: their names by address; ``gpu_memory``: MiB in use, by GPU that
    nvidia-smi shows; ``gpus``: how many Ray has there; ``port``: where its probe listens.
    """

    versions: dict[str, str | None]
    files: int
    interfaces: dict[str, str]
    chosen: dict[str, str]
    gpu_memory: list[int]
    gpus: float = 0.0
    port: int = 0


@dataclass(frozen=True)
class ClusterFinding:
    """A check of a node, by its address; ``problem``: what is wrong and the fix, "" if nothing is."""

    check: str
    node: str
    problem: str


class Probe:
    """The actor on a node."""

    def __init__(self, python: str | None):
        self._python, self._listener = python, socket.create_server((ray.util.get_node_ip_address(), 0))

    def facts(self, model: str) -> Facts:
        own, nics = ray.get_runtime_context().get_node_id(), psutil.net_if_addrs().items()
        variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        return Facts(
            versions=self._versions() | {MODEL_KEY: model if os.path.isdir(model) else None},
            files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            interfaces={each.address: name for name, addresses in nics for each in addresses},
            chosen={name: os.environ[name] for name in variables if name in os.environ},
            gpu_memory=[int(used) if used.isdigit() else 0 for (used,) in nvidia_smi("gpu", "memory.used")],
            port=self._listener.getsockname()[1],
            gpus=sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == own),
        )

    def _versions(self) -> dict[str, str | None]:
        own: dict[str, str | None] = dict(installed_versions(self._python))
        own.pop("sglang (servers)", None)  # its interpreter says it
        try:
            found = versions_in(sglang_python(self._python), SGLANG)
        except LaunchError:
            found = {}
        return own | {f"SGLang's {name}": found.get(name) for name in SGLANG}

    def time(self) -> float:
        return time.time()

    def unreachable(self, others: Sequence[tuple[str, int]]) -> list[str]:
        """Return the addresses of ``others`` to which no connection is made."""
        found = []
        for address, port in others:
            try:
                socket.create_connection((address, port), _CONNECT_SECONDS).close()
            except OSError:
                found.append(address)
        return found

    def use(self, folder: str) -> str:
        """Write, sync and rename a file in ``folder``, and try its lock; return what failed, "" if nothing."""
        path = Path(folder, ray.util.get_node_ip_address())
        try:
            with open(f"{path}.partial", "w") as file:
                file.write(str(path))
                os.fsync(file.fileno())
            os.rename(file.name, path)
            with open(Path(folder, "lock"), "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""  # as it must be: the head has it
        except OSError as error:
            return str(error)
        return "it could be locked, although the head holds the lock"


def wait_for_nodes(nodes: int, seconds: float) -> list[ClusterFinding]:
    """Wait until Ray knows as many living nodes, at most so long; return a finding about it."""
    until = time.monotonic() + seconds
    while len(living := [node for node in ray.nodes() if node["Alive"]]) < nodes and time.monotonic() < until:
        time.sleep(1.0)
    missing = (
        f"Ray knows {len(living)} of {nodes} nodes: see `ray status`; start Ray on the others, with the same token"
    )
    return [ClusterFinding("nodes", _head(), missing if len(living) < nodes else "")]


def check_nodes(config: DictConfig, pairs: bool = True) -> list[ClusterFinding]:
    """Check all living nodes against this one; with ``pairs``, also each connection between two of them, and the GPUs,
    of which others of the cluster may have some while a run starts.

    Raises:
        AtroposError: a node does not answer within 120 s.
    """
    probes = {
        node["NodeManagerAddress"]: ray.remote(Probe)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(config.inference.python)
        for node in ray.nodes()
        if node["Alive"]
    }
    try:
        facts = _answers(probes, "facts", os.path.abspath(os.path.expanduser(config.actor_rollout_ref.model.path)))
        serves = config.inference.placement != "launcher"
        findings = [found for found in _compared(facts, serves) if pairs or found.check != "gpus"]
        findings += [_clock(address, probe) for address, probe in probes.items()]
        findings.append(_token(ray.get_runtime_context().gcs_address))
        run, sync = Path(config.run.dir).resolve(), config.trainer.atropos.weight_sync
        folders = {"run.dir": run, "trainer.default_local_dir": Path(config.trainer.default_local_dir).resolve()}
        if sync.transport == "disk":
            folders["trainer.atropos.weight_sync.directory"] = Path(sync.directory).resolve()
        for key, folder in folders.items():
            if folder == run or not folder.is_relative_to(run):
                findings += _shared(key, folder, probes)
        if pairs and len(probes) > 1:
            others = [(address, node.port) for address, node in facts.items()]
            for address, cut in _answers(probes, "unreachable", others).items():
                told = f"it reaches no free port of {', '.join(cut)}: open all ports between the nodes" if cut else ""
                findings.append(ClusterFinding("ports", address, told))
        return findings
    finally:
        for probe in probes.values():
            ray.kill(probe)


def _answers(probes: dict[str, Any], method: str, *arguments: Any) -> dict[str, Any]:
    calls = {address: getattr(probe, method).remote(*arguments) for address, probe in probes.items()}
    answers, until = {}, time.monotonic() + _SECONDS
    for address, call in calls.items():
        try:
            answers[address] = ray.get(call, timeout=max(0.0, until - time.monotonic()))
        except RayError as error:
            reason = " ".join(str(error).split())[-300:]
            raise AtroposError(f"node {address} does not answer ({reason}): see Ray's logs there") from error
    return answers


def _head() -> str:
    return ray.util.get_node_ip_address()


def _compared(facts: dict[str, Facts], serves: bool) -> Iterator[ClusterFinding]:
    """Yield what each node's facts say, beside the head's; ``serves``: SGLang may run there."""
    head = facts[_head()]
    for address, node in facts.items():
        own, several = node.interfaces.get(address), len(facts) > 1
        others = {*node.interfaces.values()} - {node.interfaces.get("127.0.0.1", "lo")}
        wrong = [f"{name}={value}" for name, value in node.chosen.items() if own and not _selects(value, others)]
        if several and (own is None or ipaddress.ip_address(address).is_loopback):
            told = f"no interface to the other nodes has {address}: ray start --node-ip-address with one that has"
        else:
            told = f"{', '.join(wrong)}, and {address} is on {own}: leave it out before ray start" if wrong else ""
        yield ClusterFinding("interface", address, told)
        unknown = {"recipe (commit)"} - node.versions.keys()  # without git there
        unknown |= set() if serves else {f"SGLang's {name}" for name in SGLANG}
        differ = [
            f"{name} {node.versions.get(name)}, here {version}"
            for name, version in head.versions.items()
            if name not in unknown and node.versions.get(name) != version
        ]
        if serves and node.versions["SGLang's sglang"] is None:
            differ.append("no interpreter with SGLang starts (inference.python)")
        yield ClusterFinding("versions", address, f"{'; '.join(differ)}: install the same there" if differ else "")
        told = f"it allows {node.files} open files: ulimit -n {_LEAST_FILES}, or more, before ray start"
        yield ClusterFinding("open files", address, told if node.files < _LEAST_FILES else "")
        taken = [
            f"GPU {gpu} has {used} MiB in use" for gpu, used in enumerate(node.gpu_memory) if used > _GPU_MEBIBYTES
        ]
        told = f"{'; '.join(taken)}: end what uses it (nvidia-smi)" if taken else ""
        unseen = f"Ray has {node.gpus:g} GPUs there, and nvidia-smi shows none: repair it, or the driver"
        yield ClusterFinding("gpus", address, unseen if node.gpus and not node.gpu_memory else told)


def _selects(value: str, names: Collection[str]) -> bool:
    """Return whether NCCL_SOCKET_IFNAME or gloo's names any of these interfaces: by prefix, exactly (=), or not (^)."""
    given = tuple(value.lstrip("^=").split(","))
    if value.startswith("^"):
        return any(not name.startswith(given) for name in names)
    return any(name in given if value.startswith("=") else name.startswith(given) for name in names)


def _clock(address: str, probe: Any) -> ClusterFinding:
    begun = time.time()
    told = _answers({address: probe}, "time")[address]
    apart = abs(told - (begun + time.time()) / 2)
    problem = f"its clock is {apart:.1f} s from the head's: run NTP (chrony) on both"
    return ClusterFinding("clock", address, problem if apart > _APART_SECONDS else "")


def _token(address: str) -> ClusterFinding:
    """Check that the cluster answers nobody who has no token."""
    problem = (
        "whoever reaches it can run code on every node: on each, before ray start, and here, export "
        "RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN (openssl rand -hex 32)"
    )
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=_CONNECT_SECONDS)
        except grpc.RpcError:
            problem = ""
    return ClusterFinding(TOKEN, _head(), problem)


def _shared(key: str, folder: Path, probes: dict[str, Any]) -> Iterator[ClusterFinding]:
    """Check that a folder is one, where files are renamed and locked, as a run's folder is, for all nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".shared-") as shared, open(Path(shared, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for address, failed in _answers(probes, "use", shared).items():
            if not failed and not Path(shared, address).exists():
                failed = "what it writes is not here"
            told = f"{key}={folder}: {failed}: mount one file system there on every node, with locks"
            yield ClusterFinding("folder", address, told if failed else "")
