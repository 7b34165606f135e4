"""On PYTHONPATH: every Python process sees an NVIDIA driver's entries of two GPUs; see ``make test-fake-gpu``."""

import glob

_glob = glob.glob


def _with_driver(pattern, *args, **kwargs):
    if str(pattern).startswith("/proc/driver/nvidia/gpus/"):
        return ["/proc/driver/nvidia/gpus/0000:01:00.0", "/proc/driver/nvidia/gpus/0000:02:00.0"]
    return _glob(pattern, *args, **kwargs)


glob.glob = _with_driver
