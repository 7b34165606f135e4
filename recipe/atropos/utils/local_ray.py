"""Ray as the trainer starts it: private to this machine and to this run.

Guarantees, unless a cluster is joined (RAY_ADDRESS, or ``ray_kwargs.ray_init.address``), where nothing is changed:

- every port of Ray listens on loopback, and requires a token that only this run's processes have; none tells metrics;
- its files are in the run's temporary folder.
"""

import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from recipe.atropos.errors import AtroposError, ConfigurationError, secondary_errors
from recipe.atropos.utils import scratch
from recipe.atropos.utils.hosts import cluster_address

_OLDEST = "2.55"  # as in pyproject.toml


def start_ray(**options: Any) -> None:
    """Call ``ray.init(**options)``, with the guarantees of the module.

    Raises:
        ConfigurationError: this Ray has no token authentication.
        AtroposError: Ray did not start, or the cluster is not there, or rejected this process.
    """
    address = cluster_address(options)
    if address is None:
        _keep_private()
        options = {"_temp_dir": str(scratch.current().folder / "ray"), **options, "address": "local"}
    try:
        if address and ":" in address:  # where nothing listens, Ray tries for more than ten minutes
            host, port = address.rpartition("://")[2].rsplit(":", 1)
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(**options)
    except Exception as error:  # a bare one too, if the node is not up within Ray's 30 seconds
        reason = " ".join(str(error).split())
        raise AtroposError(
            f"ray_kwargs.ray_init: {f'the cluster at {address} cannot be joined' if address else 'Ray did not start'}: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _keep_private() -> None:
    """Let the next ``ray.init`` start a Ray with a token, on loopback."""
    if not hasattr(ray._raylet, "AuthenticationTokenLoader"):
        raise ConfigurationError(
            f"ray=={ray.__version__} has no token authentication, so that any user of this machine could run code as "
            f"you: install ray>={_OLDEST}"
        )
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ranks share the cores with servers and environments, behind which Ray's default, 15, puts them.
        "RAY_worker_niceness": os.environ.get("RAY_worker_niceness", "0"),
        # No metrics: their ports ask for no token. Ray starts no server at a port that cannot be.
        "RAY_enable_metrics_collection": "0",
        "AUTOSCALER_METRIC_PORT": "-1",
        "DASHBOARD_METRIC_PORT": "-1",
        # Makes 127.0.0.1 this node's address; _node_ip_address=127.0.0.1 would be replaced by another.
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    }
    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray read the variable when it was imported
    ray._raylet.Config.initialize("")  # and the mode
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def keep_logs(folder: Path) -> None:
    """Copy Ray's own logs, to which its errors refer, into ``folder``; nothing if a cluster was joined.

    Only this user may read it, as any may write to Ray's folder. Logs of runtime environments, which quote their
    variables, are left out. While an error is being handled, an error of the copy becomes a note on it.
    """
    logs = scratch.current().folder / "ray" / "session_latest" / "logs"
    with secondary_errors():
        if not logs.is_dir():
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # one of an earlier version
            session, quoting = logs.parent.resolve().name, shutil.ignore_patterns("runtime_env*")
            shutil.copytree(logs, folder / session, ignore=quoting, ignore_dangling_symlinks=True)
        except shutil.Error as error:  # with all the files that failed: the disk is full, or Ray rotated a log
            [(path, _, reason), *others] = error.args[0]
            more = f", and {len(others)} others" if others else ""
            raise AtroposError(f"Ray's log {path}{more} could not be copied to {folder}: {reason}") from error
