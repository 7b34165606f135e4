"""scripts/patches/apply.sh, as a command."""

import subprocess

from helpers import ROOT

APPLY = ROOT / "scripts" / "patches" / "apply.sh"


def apply_to(python, *arguments):
    """(exit status, output)"""
    command = ["bash", str(APPLY), "--python", python, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr
