"""Linux features that a sandbox needs and Python does not wrap: namespaces, Landlock, and a system-call filter.

Uses only the standard library. Each function changes the calling process permanently, and raises OSError if the
kernel refuses.
"""

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)

# <sched.h>
NEW_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000  # mnt uts ipc user pid net
_CLONE_THREAD = 0x10000
# <sys/mount.h>
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
# <sys/prctl.h>
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
# <linux/landlock.h>; rights by the first ABI version that has them
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_WRITE_FILE, _READ_FILE, _READ_DIR = 2, 4, 8


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _prctl(option: int, value: int, pointer: bytes | None = None) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), pointer, *[ctypes.c_ulong(0)] * 2), f"prctl {option}")


def _landlock(number: int, *arguments: bytes | int | None) -> int:
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *values), "Landlock")


# ---------------------------------------------------------------------- namespaces


def enter_namespaces() -> None:
    """Enter new user, mount, network, PID, IPC and UTS namespaces; the next child is PID 1 of the new PID namespace.

    The user is root inside the namespaces, and has no privileges outside.
    """
    user, group = os.geteuid(), os.getegid()
    _checked(_libc.unshare(NEW_NAMESPACES), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), None if options is None else options.encode())
    _checked(result, f"mount {kind or source or ''} on {target}")


def new_root(paths: Iterable[str]) -> None:
    """Replace ``/`` by a file system with only these files and folders, at their old paths, and an empty ``/tmp``.

    The root and the folders are read-only. Requires ``enter_namespaces``.
    """
    root = "/proc"  # any folder that exists on every machine and is not read from any more
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=64k,mode=755")
    os.mkdir(f"{root}/tmp")
    for path in paths:
        target, is_folder = root + path, os.path.isdir(path)
        os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
        if not is_folder:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        kept = os.statvfs(path).f_flag & (_NODEV | _NOEXEC)
        _mount(path, target, None, _BIND)
        if is_folder:
            _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | kept)
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _DETACH), "umount of the old root")
    os.chdir("/")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def mount_temporary(path: str, size: int) -> None:
    """Mount an empty in-memory file system of at most ``size`` bytes."""
    _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV | _NOEXEC, f"size={size},nr_inodes=1024,mode=700")


def unmount(path: str) -> None:
    _checked(_libc.umount2(path.encode(), _DETACH), f"umount {path}")


# ---------------------------------------------------------------------- Landlock


def only_read(paths: Iterable[str], device: str) -> None:
    """Allow opening only files below ``paths``, for reading, and ``device`` from now on. Needs no privilege.

    Raises:
        OSError: the kernel has no Landlock (before 5.13), or it is disabled.
    """
    version = _landlock(_LANDLOCK_CREATE, None, 0, 1)
    rights = max(value for first, value in _LANDLOCK_RIGHTS.items() if first <= version)
    attributes = struct.pack("Q", rights)
    ruleset = _landlock(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    for path, allowed in [*((path, _READ_FILE | _READ_DIR) for path in paths), (device, _READ_FILE | _WRITE_FILE)]:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, place)
        _landlock(_LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(place)
    _no_new_privileges()
    _landlock(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


# ---------------------------------------------------------------------- one process


def _no_new_privileges() -> None:
    _prctl(_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """Have this process killed by SIGKILL when its parent ends."""
    _prctl(_SET_PDEATHSIG, 9)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Prevent other processes of the same user from reading this one's memory or descriptors."""
    _prctl(_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Drop all capabilities; no executed program regains any."""
    _no_new_privileges()
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
    _checked(_libc.capset(header, struct.pack("6I", *[0] * 6)), "capset")


def set_limits(cpu_seconds: int, memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Limit this process and each of its children; exceeding a limit gives SIGXCPU, MemoryError, EFBIG or EMFILE."""
    for name, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


# x86_64 numbers. Calls not listed are unavailable to a filtered process: no new process or program, no socket, no
# signal to another process, no mount, no tracing, no change of a file's owner, mode or times.
_ALLOWED = (
    *range(0, 16),  # read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sig{action,...}
    *range(17, 29),  # pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
    *(32, 33, 35, 36, 37, 38, 39),  # dup dup2 nanosleep getitimer alarm setitimer getpid
    *(
        60,
        61,
        63,
        73,
        74,
        75,
        77,
        78,
        79,
        80,
        81,
    ),  # exit wait4 uname flock fsync fdatasync ftruncate getdents getcwd ch fchdir
    *(82, 83, 84, 85, 87, 89),  # rename mkdir rmdir creat unlink readlink
    *range(96, 101),  # gettimeofday getrlimit getrusage sysinfo times
    *(102, 104, 107, 108, 110, 111),  # get{uid,gid,euid,egid,ppid,pgrp}
    *(131, 137, 138, 158, 186, 201, 202, 204),  # sigaltstack statfs fstatfs arch_prctl gettid time futex getaffinity
    *(213, 217, 218, 219, 228, 229, 230, 231, 232, 233),  # epoll_* getdents64 set_tid_address clock_* exit_group
    *(257, 258, 262, 263, 264, 267, 269, 270, 271, 273),  # openat mkdirat newfstatat unlinkat ... set_robust_list
    *(281, 290, 291, 292, 293, 309, 316, 318, 324, 332, 334, 436, 439),  # eventfd2 pipe2 dup3 getrandom statx rseq ...
)
_CLONE, _IOCTL, _FCNTL, _PRLIMIT = 56, 16, 72, 302
_IOCTLS = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, non-blocking, close-on-exec
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # duplicates, flags, locks; not F_SETOWN, which can signal other processes
_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_KILL, _ALLOW, _NO_SUCH_CALL, _DENIED = 0x80000000, 0x7FFF0000, 0x50000 | 38, 0x50000 | 1
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def filter_system_calls() -> None:
    """Allow only the calls that a Python program needs for computing, files and threads; others give ENOSYS or EPERM.

    Raises:
        OSError: the machine is not x86_64.
    """
    if platform.machine() != "x86_64":
        raise OSError(f"the system-call filter knows x86_64, not {platform.machine()}")
    _no_new_privileges()
    _prctl(_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(_filter) // 8, ctypes.addressof(_filter)))


def _program() -> list[tuple[int, int, int, int]]:
    """Return (code, jump if true, jump if false, constant) lines for seccomp_data: number at 0, arguments from 16."""

    def case(number: int, argument: int, tests: list[tuple[int, int]], otherwise: int) -> list:
        """Allow one call if one of ``tests`` (code, constant) holds for the low half of an argument."""
        lines = [(_LOAD, 0, 0, 16 + 8 * argument)]
        for code, constant in tests:
            lines += [(code, 0, 1, constant), (_RETURN, 0, 0, _ALLOW)]
        lines.append((_RETURN, 0, 0, otherwise))
        return [(_EQUAL, 0, len(lines), number), *lines]

    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 calls
        (_RETURN, 0, 0, _NO_SUCH_CALL),
    ]
    for number in _ALLOWED:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    program += case(_CLONE, 0, [(_ANY_BIT, _CLONE_THREAD)], _DENIED)
    program += case(_IOCTL, 1, [(_EQUAL, value) for value in _IOCTLS], _DENIED)
    program += case(_FCNTL, 1, [(_EQUAL, value) for value in _FCNTLS], _DENIED)
    program += case(_PRLIMIT, 0, [(_EQUAL, 0)], _DENIED)
    return [*program, (_RETURN, 0, 0, _NO_SUCH_CALL)]


_filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _program()))
