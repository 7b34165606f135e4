"""The system-call filter and the limits of a process that runs an answer; each is permanent for the calling process.

Uses only the standard library.
"""

import ctypes
import os
import resource
import struct

_libc = ctypes.CDLL(None, use_errno=True)

# <sys/prctl.h>
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
# x86_64 numbers. None takes a path, an address or a process: nothing can be opened, reached, started or signaled.
_ALLOWED = (
    *(0, 1, 3, 5, 8),  # read write close fstat lseek
    *(9, 10, 11, 12, 25, 28),  # mmap mprotect munmap brk mremap madvise
    *(13, 14, 15, 131),  # rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack
    *(24, 35, 202, 219, 230, 334),  # sched_yield nanosleep futex restart_syscall clock_nanosleep rseq
    *(39, 102, 104, 107, 108, 110, 186),  # get{pid,uid,gid,euid,egid,ppid,tid}
    *(63, 96, 98, 100, 201, 228, 229, 318),  # uname gettimeofday getrusage times time clock_get{time,res} getrandom
    *(60, 231),  # exit exit_group
)
_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_KILL, _ALLOW, _DENIED = 0x80000000, 0x7FFF0000, 0x50000 | 1  # EPERM
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
# (code, jump if true, jump if false, constant) on seccomp_data: the number at 0, the architecture at 4.
_FILTER = (
    *((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURE), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)),
    *(line for number in _ALLOWED for line in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW))),
    (_RETURN, 0, 0, _DENIED),
)


def _prctl(option: int, value: int, pointer: bytes | None = None) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), pointer, *[ctypes.c_ulong(0)] * 2) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")


def die_with_parent() -> None:
    """Have this process killed by SIGKILL when its parent ends."""
    _prctl(_SET_PDEATHSIG, 9)


def set_limits(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process; exceeding a limit gives SIGXCPU or MemoryError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def filter_system_calls() -> None:
    """Allow only the calls that computing and open descriptors need; any other gives EPERM.

    Kills the process on another machine than x86_64. Raises OSError if the kernel has no such filter.
    """
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _FILTER))
    _prctl(_SET_NO_NEW_PRIVS, 1)
    _prctl(_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(_FILTER), ctypes.addressof(lines)))
