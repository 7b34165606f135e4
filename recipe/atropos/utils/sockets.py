"""Ports that no other user of this machine can take, and servers that no other user runs.

Guarantees: nobody else can listen at a reserved port, before the service is started and while it is restarted;
``OwnServers`` sends nothing to a server of this machine that another user runs.
"""

import contextlib
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from recipe.atropos.errors import AtroposError, ConfigurationError
from recipe.atropos.utils.process import port_is_free

SOCKET_VARIABLE = "ATROPOS_SOCKET"
"""Environment variable with the descriptor of a listening socket that a service inherits."""

# Of linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and net/tcp_states.h.
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _TCP_LISTEN = 4, 20, 1, 10
_NO_COOKIE = (0xFFFFFFFF, 0xFFFFFFFF)
_ROOT = 0


class OtherUsersServer(AtroposError, RuntimeError):
    """Another user's process listens at the address; the message names the port and the user."""


def reserve(host: str, port: int, key: str) -> socket.socket:
    """Return a socket that keeps others from the port while it is open; connections to it are refused.

    Raises:
        ConfigurationError: the port is taken; it names ``key``, the setting for it.
    """
    if port_is_free(port, host):  # also of this user's sockets
        with contextlib.suppress(OSError):
            return _bound(host, port)
    raise taken(host, port, key)


def listening(reserved: socket.socket) -> socket.socket:
    """Return a socket that listens at a reserved address, for a service to inherit."""
    listener = _bound(*reserved.getsockname())
    listener.listen(1024)
    # Of its connections, which have it too: else their TIME_WAIT would keep the port from a later run.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


def _bound(host: str, port: int) -> socket.socket:
    """Return a bound socket. Linux lets only sockets of this user with SO_REUSEPORT have the same port.

    With SO_REUSEADDR, which TIME_WAIT may need, other users' sockets could have it too while none listens.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def taken(host: str, port: int, key: str) -> ConfigurationError:
    """Return the error for the port of a service that another process holds; ``key``: the setting for it."""
    return ConfigurationError(f"{key}={port} is taken on {host}{holder(port)}; give another, or null for a free one")


def holder(port: int) -> str:
    """Return `` (by a process of user UID)`` if somebody on this machine listens at the port, else an empty text."""
    user = _listed_user(port)
    return "" if user is None else f" (by a process of user {user})"


def inherited_socket() -> socket.socket | None:
    """Return the listening socket that the launcher gave to this process, if it did."""
    descriptor = os.environ.pop(SOCKET_VARIABLE, None)
    return None if descriptor is None else socket.socket(fileno=int(descriptor))


def serve(app: web.Application | Awaitable[web.Application], host: str, port: int, logger: logging.Logger) -> None:
    """Serve until this process is told to end: at the inherited socket, if there is one, else at the port.

    The handler of a client that disconnects is canceled, and the end does not wait for held requests.
    """
    given = inherited_socket()
    where = {"sock": given} if given else {"host": host, "port": port}
    web.run_app(app, **where, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, print=logger.info)


class OwnServers(aiohttp.TCPConnector):
    """Connector that sends nothing, and thereby no key, to a server of this machine that another user but root runs.

    A server's port is known before the server listens, and free while the server is restarted: whoever listens there
    first would be sent the key. The owner is looked up once the connection is made, before anything is sent.
    """

    async def connect(self, *args, **kwargs) -> aiohttp.connector.Connection:
        """Connect as ``TCPConnector`` does. Raises OtherUsersServer."""
        connection = await super().connect(*args, **kwargs)
        try:
            check_server(*map(connection.transport.get_extra_info, ("peername", "sockname")))
        except (AttributeError, TypeError, ConnectionError) as error:  # None: it was reset meanwhile
            connection.close()
            raise aiohttp.ClientConnectionError(f"the connection was reset as soon as it was made: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection


def check_server(peer: Sequence[Any], own: Sequence[Any], owner: int | None = None) -> None:
    """Check the server of a connection, given by its addresses, if it is on this machine.

    Raises:
        OtherUsersServer: another user runs it than this process's, ``owner`` or root.
        ConnectionResetError: nobody listens there any more.
    """
    (host, port, *_), (here, *_) = peer, own
    if host != here and not ipaddress.ip_address(host).is_loopback:
        return
    user = _listening_user(host, port)
    if user is None:
        raise ConnectionResetError(f"no process listens at port {port} of {host}, or it is forwarded without one")
    if user not in (_ROOT, os.geteuid(), owner):
        raise OtherUsersServer(
            f"a process of user {user} listens at port {port} of {host}, so the key is not sent; end it, or give the "
            "server another port"
        )


def _listening_user(host: str, port: int) -> int | None:
    """Return the id of the user whose process listens at a numeric address of this machine; None: nobody does.

    The kernel is asked for this one socket, which takes microseconds however many are open. Where it does not answer
    (gVisor), the list of all sockets is read.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    request = struct.pack("=IHHII", 72, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    request += struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)
    address = socket.inet_pton(family, host.partition("%")[0])  # without the scope of a link-local one
    request += struct.pack("!HH16s16xIII", port, 0, address, 0, *_NO_COOKIE)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.send(request)
            kind, user = struct.unpack_from("=H74xI", kernel.recv(4096).ljust(84, b"\0"), 4)
        if kind == _SOCK_DIAG_BY_FAMILY:
            return user
    except OSError:
        pass
    return _listed_user(port)


def _listed_user(port: int) -> int | None:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, _, _, _, user, *_ = line.split()
            if int(local.rpartition(":")[2], 16) == port and int(state, 16) == _TCP_LISTEN:
                return int(user)
    return None
