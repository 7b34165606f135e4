"""SGLang servers and environments that Ray places on the nodes of a cluster (``inference.placement=ray``,
``environment.placement=ray``).

Guarantees:

- each server has the GPUs of one node to itself, reserved as a bundle of a placement group; servers fill as few nodes
  as they can, which leaves whole nodes to the trainer's ranks; an environment has a CPU, on as many nodes as can be;
- a server listens, also to the broadcasts of weights, at the address by which Ray knows its node; loopback is refused,
  since other nodes could not reach it;
- a service, and all that it started, ends with its actor, which Ray ends with the launcher or the node;
- its output is in the run's folder, as that of a service here, and its file on the node is bounded.
"""

import contextlib
import ipaddress
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray._private import auto_init_hook
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from recipe.atropos.errors import AtroposError, ConfigurationError, LaunchError
from recipe.atropos.inference.server import SGLangLaunch, start_sglang, uses_gpu
from recipe.atropos.utils.gpus import nccl_variables
from recipe.atropos.utils.hosts import interface_variables
from recipe.atropos.utils.local_ray import start_ray
from recipe.atropos.utils.process import LocalService, Service, free_port, start_service
from recipe.atropos.utils.scratch import Scratch

LOST = -9  # the exit status of a service whose node or actor is gone
_CALL_SECONDS = 120.0  # for an actor to check and start a service
_NODE_GROUP = "ray.io/node-group"  # label of the nodes of a cluster with an autoscaler
_LOG_BYTES = 16 << 20  # of a log: kept on the node, and read at once


class Host:
    """The actor that runs a service on its node."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None
        self._service: LocalService | None = None
        self._port: int | None = None
        self._read = 0

    def address(self) -> tuple[str, int]:
        """Return the node's address, and a port there that this service keeps."""
        own = ray.util.get_node_ip_address()
        self._port = self._port or free_port(own)
        return own, self._port

    def start_server(self, name: str, launch: SGLangLaunch) -> int:
        """Start a server; return its pid. Raises LaunchError: see ``start_sglang``."""
        log, variables = self._begin(name)
        variables |= interface_variables(launch.host)
        self._service = start_sglang(launch, log_path=log, name=name, env=variables)
        return self._service.pid

    def start_program(self, name: str, command: list[str], folder: str, env: Mapping[str, str]) -> int:
        """Start a program in a folder; return its pid. Raises ServiceFailed or LaunchError: there is no such one."""
        if not os.path.isdir(folder):
            here = ray.util.get_node_ip_address()
            raise LaunchError(f"{name}: {folder}, where the launcher runs, is no folder of node {here}: have it there")
        log, variables = self._begin(name)
        self._service = start_service(name, command, log_path=log, env={**variables, **env}, cwd=folder)
        return self._service.pid

    def _begin(self, name: str) -> tuple[Path, dict[str, str]]:
        self.stop(0.0)  # one that lives, and was taken for lost as its node did not answer for a while
        self._scratch, self._read = Scratch.create(), 0
        return self._scratch.folder / f"{name}.log", self._scratch.variables()

    def poll(self) -> tuple[int | None, bytes]:
        """Return the service's exit status, None while it runs, and what it has written since the last call."""
        assert self._service is not None
        status, more = self._service.poll(), self._output()
        return status if not more else None, more

    def _output(self) -> bytes:
        """Return what the service has written since the last call, which is in the run's folder then."""
        with open(self._service.log_path, "r+b") as log:
            log.seek(self._read)
            more = log.read(_LOG_BYTES)
            self._read += len(more)
            if self._read > _LOG_BYTES > len(more):
                log.truncate(0)
                self._read = 0
        return more

    def stop(self, grace: float) -> bytes:
        """End the service, and remove its temporary files; return the rest of its output. Raises ServiceFailed if it
        survives.
        """
        rest = b""
        if self._service is not None:
            self._service.stop(grace)
            with contextlib.suppress(OSError):  # a cleaner of temporary files removed it
                rest = self._output()
            self._scratch.remove()
            self._service = None
        return rest


@dataclass
class PlacedService(Service):
    """A service on a node of the cluster, whose output ``poll`` fetches. ``pid``: there, 0 if that was lost before."""

    host: Any = None

    def __post_init__(self) -> None:
        self._status: int | None = None
        self._lost = False
        self._asked: Any = None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.touch(mode=0o600)
        self.log_start = self.log_path.stat().st_size

    def poll(self) -> int | None:
        while self._status is None:
            try:
                self._asked = self._asked or self.host.poll.remote()
                if not ray.wait([self._asked], timeout=0)[0]:  # which fetches meanwhile: ray.get would begin anew
                    break  # until Ray gives the node up
                (self._status, more), self._asked = ray.get(self._asked), None
            except RayError as error:
                more = f"error: its node, or its actor there, is lost: {error}\n".encode()
                self._status, self._lost = LOST, True
            self._keep(more)
            if not more:
                break
        return self._status

    def _keep(self, output: bytes) -> None:
        with contextlib.suppress(OSError), self.log_path.open("ab") as log:
            log.write(output)

    def stop(self, grace: float = 10.0) -> None:
        if not self._lost:  # what is lost ends with its node
            rest = _answer(self.host.stop.remote(grace), f"{self.name} ends", 2 * grace + _CALL_SECONDS) or b""
            if self._asked is not None:  # the actor answered that before
                (_, before), self._asked = _answer(self._asked, f"{self.name} ends", _CALL_SECONDS) or (None, b""), None
                rest = before + rest
            self._keep(rest)
            self._status = LOST if self._status is None else self._status


@dataclass
class _Seat:
    """Where a service runs: a bundle, the actor there, its latest address and, while that is asked for, its answer."""

    group: PlacementGroup
    bundle: int
    resources: dict[str, float]
    address: tuple[str, int] = ("", 0)
    answer: Any = None
    asked: float = 0.0
    lost: str = ""

    def __post_init__(self) -> None:
        self.place()

    def place(self) -> None:
        """Ask Ray for the actor, anew if the former one is lost."""
        self.host = (
            ray.remote(Host)
            .options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, self.bundle),
                num_cpus=self.resources["CPU"],
                num_gpus=self.resources.get("GPU", 0),
                runtime_env={"env_vars": nccl_variables()},  # the ranks' too, with which it exchanges weights
            )
            .remote()
        )


class Cluster:
    """The run's services on a Ray cluster, each in a bundle of a placement group, which is made again when its node is
    lost. ``programs``: the names of those that are no servers.

    Raises:
        AtroposError: the cluster cannot be reached.
        ConfigurationError: its nodes have too few GPUs for the servers, and no autoscaler adds others.
    """

    def __init__(self, config: DictConfig, launches: Mapping[str, SGLangLaunch], programs: Collection[str]):
        auto_init_hook.enable_auto_connect = False  # else a check that goes on after the end starts another Ray
        before = signal.getsignal(signal.SIGTERM)  # Ray sets its own, which would end this process at once
        start_ray(**OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True) | {"log_to_driver": False})
        signal.signal(signal.SIGTERM, before)
        self._timeout = float(config.inference.start_timeout)
        self._groups: list[PlacementGroup] = []
        self._seats: dict[str, _Seat] = {}
        servers = {
            name: {"CPU": 1.0} | ({"GPU": float(launch.gpus)} if uses_gpu(launch) else {})
            for name, launch in launches.items()
        }
        check_room(servers.values())
        self._reserve(servers, "PACK", f"{config.run.name}_servers")
        self._reserve({name: {"CPU": 1.0} for name in programs}, "SPREAD", f"{config.run.name}_environments")

    def _reserve(self, needed: dict[str, dict[str, float]], strategy: str, name: str) -> None:
        if needed:
            group = placement_group(list(needed.values()), strategy=strategy, name=name)
            self._groups.append(group)
            self._seats |= {each: _Seat(group, number, needed[each]) for number, each in enumerate(needed)}

    def awaited(self, name: str) -> str:
        """Return what the start of a service waits for, "" once nothing: its node or, if that is lost, another one.

        Raises:
            ConfigurationError: it has waited longer than ``inference.start_timeout``.
        """
        seat = self._seats[name]
        if seat.answer is None:
            seat.answer, seat.asked = seat.host.address.remote(), time.monotonic()
        if ray.wait([seat.answer], timeout=0)[0]:
            try:
                seat.address, seat.answer = ray.get(seat.answer), None  # asked anew where the start is delayed
            except RayError as error:
                seat.lost = str(error)
                seat.place()
                seat.answer = seat.host.address.remote()
            else:
                return ""
        if time.monotonic() > seat.asked + self._timeout:
            most = max(node["Resources"].get("GPU", 0) for node in ray.nodes())
            raise ConfigurationError(
                f"Ray has no node for {name}, one of {len(self._seats)} services to place, which takes "
                f"{seat.resources} of one node, within inference.start_timeout={self._timeout:g} s; free are "
                f"{ray.available_resources()}, on no node more than {most:g} GPUs: lower inference.servers, "
                "inference.args.tp_size or environment.replicas, or add nodes"
                f"{seat.lost and f' (lost before: {seat.lost})'}"
            )
        return "when Ray has a node for it"

    def placed(self, name: str, launch: SGLangLaunch) -> SGLangLaunch:
        """Return a server's launch at its node's address, once nothing is ``awaited``; there it keeps its port.

        Raises:
            ConfigurationError: other nodes cannot reach that address.
        """
        address, port = self._seats[name].address
        if ipaddress.ip_address(address).is_loopback and len(ray.nodes()) > 1:
            raise ConfigurationError(
                f"Ray knows the node of {name} as {address}, where no other node reaches it: start Ray there with "
                "--node-ip-address and the address of the interface to the others"
            )
        return replace(launch, host=address, port=port)

    def start_server(self, name: str, launch: SGLangLaunch, log_path: Path) -> PlacedService:
        """Start a server whose launch is ``placed``. Raises LaunchError: see ``start_sglang``."""
        return self._started(name, self._seats[name].host.start_server.remote(name, launch), log_path, launch.url)

    def start_program(self, name: str, command: list[str], log_path: Path, **env: str) -> PlacedService:
        """Start a program, once nothing is ``awaited``, in a folder of the name that the launcher's has.

        Raises:
            LaunchError: there is no such program.
        """
        env = {"PYTHONUNBUFFERED": "1", **env}
        call = self._seats[name].host.start_program.remote(name, command, os.getcwd(), env)
        return self._started(name, call, log_path)

    def _started(self, name: str, call: Any, log_path: Path, url: str | None = None) -> PlacedService:
        pid = _answer(call, f"the node starts {name}", _CALL_SECONDS)
        return PlacedService(name, pid or 0, log_path, url, host=self._seats[name].host)

    def close(self) -> None:
        """Give the nodes back; whatever still runs there ends."""
        for seat in self._seats.values():
            ray.kill(seat.host)
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()


def check_room(servers: Collection[Mapping[str, float]]) -> None:
    """Refuse servers, by their resources, for which idle nodes would have no room; an autoscaler may add more."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = max((server.get("GPU", 0.0) for server in servers), default=0.0)
    if not gpus or any(_NODE_GROUP in node["Labels"] for node in nodes):
        return
    each = [node["Resources"].get("GPU", 0.0) for node in nodes]
    if (room := sum(int(own // gpus) for own in each)) < len(servers):
        raise ConfigurationError(
            f"inference.servers={len(servers)} of {gpus:g} GPUs each: the nodes of the Ray cluster, with "
            f"{', '.join(f'{own:g}' for own in each)} GPUs, have room for {room}; lower inference.servers or "
            "inference.args.tp_size, or add nodes before the start"
        )


def _answer(call: Any, what: str, timeout: float) -> Any:
    """Return an actor's answer, None if it is lost, as whoever follows its service sees.

    Raises:
        LaunchError: what the actor raised.
        AtroposError: it is late.
    """
    try:
        return ray.get(call, timeout=timeout)
    except RayActorError:
        return None
    except GetTimeoutError as error:
        raise AtroposError(f"waited {timeout:g} s until {what}; see `ray status`, and Ray's logs there") from error
    except RayTaskError as error:
        if isinstance(error.cause, AtroposError):
            raise LaunchError(str(error.cause)) from error
        raise
