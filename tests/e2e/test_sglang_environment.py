"""What looks into the environment of SGLang: the doctor and the patches."""

import sys

from helpers.patches import apply_to
from recipe.atropos import launch_services
from recipe.atropos.__main__ import main
from recipe.atropos.inference.server import sglang_python


def test_doctor_tells_versions_and_what_is_missing(capsys):
    assert main(["doctor", "trainer.device=cpu"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ok trainer torch" in told and "ok sglang torch" in told and "verl 0." in told
    assert main(["doctor", "trainer.device=cpu", f"inference.python={sys.executable}"]) == 1
    assert f"FAILED sglang {sys.executable} has no sglang" in " ".join(capsys.readouterr().out.split())


def test_the_installed_sglang_needs_none():
    status, output = apply_to(sglang_python(), "--check")
    assert status == 0 and output.count("not needed, its code has changed") == 2, output


def test_flags_are_checked_by_the_installed_sglang(capsys, tmp_path):
    """Before anything starts; the server would end half a minute later with a page of its usage."""
    given = ["--preset", "demo", "--dry-run", f"--run-dir={tmp_path / 'run'}", "inference.args.max_total_tokns=1"]
    assert launch_services.main(given) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "inference.args.max_total_tokns=1: SGLang 0." in told and "did you mean max_total_tokens?" in told
