"""Addresses of this machine, how clients reach them past a proxy, and whether Ray uses other machines."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import psutil


def is_this_host(url: str) -> bool:
    """Return whether the host of ``url`` is a loopback address or an address of this machine."""
    own = {address.address.partition("%")[0] for nic in psutil.net_if_addrs().values() for address in nic}
    try:
        addresses = {info[4][0].partition("%")[0] for info in socket.getaddrinfo(urlsplit(url).hostname, None)}
    except OSError:
        return False
    return all(address in own or ipaddress.ip_address(address).is_loopback for address in addresses)


def reachable(host: str) -> str:
    """Return the address at which this machine reaches a service that listens on ``host``."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def reachable_from_others(host: str) -> str:
    """Return it for other machines: for 0.0.0.0, this machine's address on its default route, or its name."""
    if reachable(host) == host:
        return host
    try:
        return address_towards("http://192.0.2.1")  # reserved for documentation: only the route to it is looked up
    except OSError:
        return socket.gethostname()


def address_towards(url: str) -> str:
    """Return this machine's address on the route to the host of ``url``.

    Raises:
        OSError: the host has no address, or there is no route to it.
    """
    parts = urlsplit(url)
    family, kind, protocol, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: it only looks up the route
        return probe.getsockname()[0]


def address_for_nodes(cluster: str) -> str:
    """Return this machine's address for the nodes of a Ray cluster, the head's address of which is ``cluster``: that on
    the route to it or, where that is "auto" or loopback, on the default route, which Ray takes too.
    """
    with contextlib.suppress(OSError):
        own = "127.0.0.1" if cluster == "auto" else address_towards(f"http://{cluster.rpartition('://')[2]}")
        if not ipaddress.ip_address(own).is_loopback:
            return own
    return reachable_from_others("0.0.0.0")


def interface_variables(own: str = "127.0.0.1") -> dict[str, str]:
    """Return the environment in which gloo and NCCL use the interface with this machine's address ``own`` only.

    For loopback: that of processes that all run on this machine. What the user has set stays.
    """
    nics = {address.address: name for name, addresses in psutil.net_if_addrs().items() for address in addresses}
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if own in nics else ()
    return {variable: os.environ.get(variable, nics[own]) for variable in variables}


def cluster_address(ray_init: Mapping[str, Any]) -> str | None:
    """Return the address of the existing cluster that ``ray.init`` joins with these options; None if it joins none.

    As in Ray, RAY_ADDRESS counts only if the options have no address, or "auto".
    """
    address = ray_init.get("address")
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    return None if address == "local" else address


def without_proxy(environment: Mapping[str, str], *hosts: str | None) -> dict[str, str]:
    """Return the variables with which clients ask ``hosts`` themselves, whatever proxy ``environment`` names."""
    direct = environment.get("no_proxy") or environment.get("NO_PROXY", "")
    return dict.fromkeys(
        ("no_proxy", "NO_PROXY"), direct if direct == "*" else ",".join(filter(None, (direct, *hosts)))
    )
