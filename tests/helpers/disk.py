"""A disk that is full, or whose bits have changed."""

import contextlib
import resource
import subprocess

import pytest


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 4 MB; yields its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    """Until not a byte more is free."""
    with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as ballast:
        while ballast.write(b"x" * 4096):
            pass


@contextlib.contextmanager
def size_limit(size):
    """No file of this process grows over ``size`` bytes: what a full disk does, at a byte of one's choice.

    To SQLite it is neither a full disk nor a quota.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_files(folder, files):
    """Write the contents of ``files``, by name in ``folder``."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def flip(path, position, bit=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)
