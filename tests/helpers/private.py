"""A program for ``private_process``: it forms a process group of one, and says its arguments and where it listens."""

import importlib
import json
import multiprocessing
import os
import socket
import sys

import psutil
import torch.distributed as dist

from recipe.atropos.utils.hosts import address_for_nodes


def listen(port):
    """As a process that SGLang spawns; it meets others at this machine's own address, too."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    store, *_ = next(dist.rendezvous(f"tcp://{address_for_nodes('auto')}:0", rank=0, world_size=1))
    found = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    print(json.dumps({"listens": found}), flush=True)


if __name__ == "__main__":
    print("arguments", sys.argv[1:], "variables", sorted(name for name in os.environ if "SECRET" in name))
    print("error", sys.argv[1:], file=sys.stderr, flush=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = importlib.import_module("helpers.private").listen  # no child finds it in this __main__
    child = multiprocessing.get_context("spawn").Process(target=listen, args=(port,))
    child.start()
    child.join(60)
    sys.exit(child.exitcode)
