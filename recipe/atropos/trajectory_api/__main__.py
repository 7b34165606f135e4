"""Command line of the Trajectory API: ``python -m recipe.atropos.trajectory_api --port P --data-dir D`` serves, until
SIGTERM or SIGINT; then all that was accepted is stored.

Its commands list, show, export and import work on a data folder; all but import also while its server runs.
"""

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop
from aiohttp import web

from recipe.atropos.errors import ConfigurationError, one_line_errors
from recipe.atropos.trajectory_api import records
from recipe.atropos.trajectory_api.app import Api
from recipe.atropos.trajectory_api.database import SYNCHRONOUS
from recipe.atropos.trajectory_api.service import Settings, TrajectoryService
from recipe.atropos.utils.private_process import is_loopback
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.utils.sockets import holder, inherited_socket

logger = logging.getLogger(__name__)

PROGRAM = "python -m recipe.atropos.trajectory_api"
_COMMANDS = {"list": records.list_all, "show": records.show, "export": records.export, "import": records.import_}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_END_SECONDS = 2.0  # for requests in flight when the server ends


def read_secret(path: str | None) -> str | None:
    """Return the secret, the trainer's key, of a file, else of $ATROPOS_API_KEY; None if there is neither.

    Raises:
        ConfigurationError: the file cannot be read, is empty, or other users may read it; or the secret has a slash,
            so that it cannot be part of an address.
    """
    if path is None:
        secret = os.environ.get(API_KEY_VARIABLE, "")
        if "/" in secret:
            raise ConfigurationError(f"${API_KEY_VARIABLE}: the secret has a slash; write letters and digits")
        return secret or None
    try:
        mode = Path(path).stat().st_mode
        secret = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"secret-file={path}: {error}; give a file of mode 0600 with the secret") from error
    if mode & 0o077:
        raise ConfigurationError(f"secret-file={path}: other users may read it (mode {mode & 0o777:o}); chmod 600")
    if not secret or "/" in secret:
        raise ConfigurationError(f"secret-file={path}: the secret is empty or has a slash; write letters and digits")
    return secret


def serve(settings: Settings, host: str, port: int, secret: str | None) -> None:
    """Serve until a signal ends it.

    Raises:
        ConfigurationError: a server without a secret would be reached from other machines.
    """
    if secret is None and not is_loopback(host):
        raise ConfigurationError(
            f"host={host}: without a secret, the server listens on loopback only; give --secret-file, or set "
            f"${API_KEY_VARIABLE}"
        )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # it logs what is not HTTP, with a traceback
    _reuse_memory()
    uvloop.run(_until_ended(settings, host, port, secret))


def _reuse_memory() -> None:
    """Have glibc keep freed memory for the next bodies: else the page faults are a fifth of the CPU of a post."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)


async def _until_ended(settings: Settings, host: str, port: int, secret: str | None) -> None:
    service = TrajectoryService(settings)
    server = web.Server(Api(service, secret).handle, auto_decompress=False, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=_END_SECONDS)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    watch = asyncio.create_task(service.run())
    watch.add_done_callback(lambda _: ended.set())
    try:
        await runner.setup()
        given = inherited_socket()
        site = web.SockSite(runner, given, backlog=1024) if given else web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        address = runner.addresses[0]
        if secret is None:
            logger.warning("no secret: any user of this machine can read and change this server's data")
        logger.info("the Trajectory API listens on http://%s:%s, data in %s", *address[:2], settings.data_dir)
        await ended.wait()
        if watch.done():
            watch.result()
    except OSError as error:
        reason = f"{error.strerror or error}{holder(port)}"
        raise ConfigurationError(f"host={host}, port={port}: {reason}; give others") from error
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await runner.cleanup()
        service.store.close()


def _serve(arguments: list[str]) -> None:
    default = Settings(Path())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Serve the groups of environments as batches. Other commands: list, show, export, import.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a secret")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the store; created if it is missing")
    parser.add_argument("--secret-file", help="file of mode 0600 with the secret; default: $ATROPOS_API_KEY")
    parser.add_argument(
        "--durability",
        choices=[*SYNCHRONOUS],
        default=default.durability,
        help="normal (default): stored groups survive a kill of the server; full: of the machine too; none: neither",
    )
    parser.add_argument(
        "--retention",
        choices=["all", "committed"],
        default=default.retention,
        help="committed: delete the batches that are in a durable checkpoint; default: all",
    )
    parser.add_argument(
        "--queue-tokens",
        type=int,
        default=default.queue_tokens,
        help="tokens in the queue above which posts are answered late; default: %(default)s",
    )
    parser.add_argument(
        "--hold-seconds",
        type=float,
        default=default.hold_seconds,
        help="longest delay of such an answer, in seconds; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = Settings(
        options.data_dir, options.durability, options.retention, options.queue_tokens, options.hold_seconds
    )
    serve(settings, options.host, options.port, read_secret(options.secret_file))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    with one_line_errors():
        if arguments and arguments[0] in _COMMANDS:
            name = arguments[0]
            parser = argparse.ArgumentParser(prog=f"{PROGRAM} {name}", description=_COMMANDS[name].__doc__)
            parser.add_argument("data_dir", type=Path)
            if name == "show":
                parser.add_argument("number", type=int, help="of the batch")
            if name in ("export", "import"):
                parser.add_argument("file", type=Path, help="of JSON lines, one batch each")
            with one_line_errors(OSError):  # of the files that are given
                _COMMANDS[name](**vars(parser.parse_args(arguments[1:])))
        else:
            _serve(arguments)


if __name__ == "__main__":
    main()
