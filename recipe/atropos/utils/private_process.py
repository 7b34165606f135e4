"""Run a program so that its secrets stay private, and torch's rendezvous is at one address.

    python .../private_process.py MODULE ARGUMENTS     # as python -m MODULE ARGUMENTS

Guarantees:

- flags that hold secrets are passed in an environment variable, and never on a command line;
- this process's output contains none of them: SGLang and Atropos print all their settings, keys included;
- a torch store listens only at the address at which its ranks meet: on loopback, if they are on one machine;
- shared memory that outlives its processes is named after the run (``scratch``).

SGLang's interpreter runs this file too, and runs it again in each process that SGLang spawns, so it imports only the
standard library, and torch if that is installed.
"""

import gc
import importlib
import importlib.util
import ipaddress
import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

_COLLECTED_AFTER = 10_000
"""New objects after which Python looks for garbage. Its default, 700, takes a sixth of the time of SGLang's imports."""

SECRET_FLAGS = "ATROPOS_SECRET_FLAGS"
"""Environment variable with flags as a JSON list, ["--api-key", "..."], appended to those of the command line."""

SCRATCH = "ATROPOS_SCRATCH"
"""Environment variable with the folder for temporary files of the process's run."""


def take_secret_flags() -> list[str]:
    """Return the flags in the variable, and remove it, so that the processes that this one starts do not get them."""
    return json.loads(os.environ.pop(SECRET_FLAGS, "[]"))


def hide_in_output(flags: Iterable[str]) -> None:
    """Print *** in place of the values of these flags, ``--name VALUE`` or ``--name=VALUE``, from now on."""
    words = [flag.partition("=")[2] if flag.startswith("--") else flag for flag in flags]
    values = [word for word in words if len(word) > 3]  # "x", a placeholder for a key, is in every text

    def hidden(text: str) -> str:
        for value in values:
            text = text.replace(value, "***")
        return text

    for stream in (sys.stdout, sys.stderr) if values else ():
        stream.write = lambda text, write=stream.write: write(hidden(text))


def bind_rendezvous() -> None:
    """From now on, let ``init_process_group`` listen only at the address that its ranks are given; of a name, which may
    mean another address on other machines, only "localhost" is bound.

    torch's TCPStore (2.13) listens on every address, whatever host it is given, and trusts any client
    (https://github.com/pytorch/pytorch/pull/155741). It has an option for a listening socket, which torch's rendezvous
    does not expose.
    """
    if importlib.util.find_spec("torch") is None:
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    create = rendezvous._create_c10d_store

    def create_bound(hostname, port, rank, world_size, timeout, *args, **kwargs):
        address = _address(hostname)
        if rank != 0 or address is None or rendezvous._torchelastic_use_agent_store():
            return create(hostname, port, rank, world_size, timeout, *args, **kwargs)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        try:
            listener = socket.create_server((str(address), port), family=family, backlog=2048)
        except OSError as error:
            advice = "give Ray an address of this node: ray start --node-ip-address=ADDRESS"
            raise OSError(error.errno, f"torch's rendezvous: {error.strerror}; {advice}") from error  # has the address
        return rendezvous.TCPStore(
            host_name=hostname,
            port=listener.getsockname()[1],
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )

    if create.__name__ != create_bound.__name__:
        rendezvous._create_c10d_store = create_bound


def is_loopback(host: str) -> bool:
    """Return whether a host, as a name or an address, is this machine's loopback."""
    return (address := _address(host)) is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None


def name_shared_memory(name: str) -> None:
    """From now on, name multiprocessing's semaphores ``sem.NAME-mp-*``, SGLang's shared memory ``sglang_loads_NAME_*``.

    Both survive when their processes are killed, and their default names do not tell whose they are. SGLang's tell
    the server's pid too, and what killed servers left is removed.
    """
    multiprocessing.process.current_process()._config["semprefix"] = f"/{name}-mp"  # children have it too
    if importlib.util.find_spec("sglang") is None:
        return
    ports = importlib.import_module("sglang.srt.server_args").PortArgs
    create = ports.init_new

    def create_named(*args, **kwargs):
        created = create(*args, **kwargs)
        if getattr(created, "instance_id", None):  # SGLang 0.5.12 has none
            created.instance_id = f"{name}_{os.getpid()}_{created.instance_id}"
        return created

    for path in Path("/dev/shm").glob(f"sglang_loads_{name}_*"):
        pid = path.name.removeprefix(f"sglang_loads_{name}_").partition("_")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)

    ports.init_new = staticmethod(create_named)


def _run() -> None:
    module, secret_flags = sys.argv[1], take_secret_flags()
    hide_in_output(secret_flags)
    if folder := os.environ.get(SCRATCH):
        name_shared_memory(os.path.basename(folder))
    sys.argv[1:] = [*sys.argv[2:], *secret_flags]
    # The program must not import this folder's modules. __main__ stays this file, for the processes that it spawns.
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path != own)]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ in ("__main__", "__mp_main__"):  # this process, or one that multiprocessing spawned from it
    gc.set_threshold(_COLLECTED_AFTER)
    bind_rendezvous()
if __name__ == "__main__":
    _run()
