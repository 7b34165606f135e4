"""What looks into the environment of SGLang: the doctor and the patches."""

import importlib
import sys

from helpers.patches import apply_to
from recipe.atropos.inference.server import sglang_python


def test_doctor_tells_versions_and_what_is_missing(capsys):
    doctor = importlib.import_module("recipe.atropos.commands.doctor")
    assert doctor.main(["trainer.device=cpu"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ok trainer torch" in told and "ok sglang torch" in told and "verl 0." in told
    assert doctor.main(["trainer.device=cpu", f"inference.python={sys.executable}"]) == 1
    assert f"FAILED sglang {sys.executable} has no sglang" in " ".join(capsys.readouterr().out.split())


def test_the_installed_sglang_needs_none():
    status, output = apply_to(sglang_python(), "--check")
    assert status == 0 and output.count("not needed, its code has changed") == 2, output
