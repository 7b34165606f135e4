"""One command line: ``python -m recipe.atropos COMMAND``."""

import importlib
import os
import subprocess
import sys

import pytest

from helpers.runs import make_run
from recipe.atropos import __main__ as commands
from recipe.atropos.commands.doctor import examine
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.utils import debug


def test_help_is_answered_at_once_and_lists_every_command():
    """Each of which is a module with a ``main``."""
    for module, about in commands.COMMANDS.values():
        assert callable(importlib.import_module(f"recipe.atropos.{module}").main) and about
    before = os.times()
    program = [sys.executable, "-m", "recipe.atropos", "--help"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    after = os.times()
    assert done.returncode == 0 and all(f"  {name} " in done.stdout for name in commands.COMMANDS)
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 2, "of processor time: nothing heavy is imported for it"


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("recipe.atropos --help", "1"),
        ("recipe.atropos logs . service", ""),
        ("recipe.atropos.launch_services --help", ""),
        ("recipe.atropos.main --help", ""),
        ("recipe.atropos.utils.env_adapter --help", ""),
    ],
)
def test_output_that_nobody_reads_is_no_error(words, unbuffered, tmp_path):
    """As after ``| head``."""
    make_run(tmp_path).log("service").parent.mkdir()
    (tmp_path / "logs" / "service.log").write_text("a line\n" * 10)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", *words.split()],
        cwd=tmp_path,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("given", [[], ["trian"]])
def test_what_is_no_command_is_said_with_those_that_are(given, capsys):
    assert commands.main(given) == 2
    told = capsys.readouterr().err
    assert "verify-env" in told and ("trian: no such command" in told or not given)


RUN_COMMANDS = """
import contextlib, io, sys
from recipe.atropos.__main__ import main

for words in {words}:
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            status = main(words)
        except SystemExit as exit:
            status = exit.code
    print(words[0], "did you mean first?" in f"{{status}} {{told.getvalue()}}", "torch" in sys.modules, status)
"""


def test_commands_find_a_run_by_name_before_torch(tmp_path):
    """One resolver: a folder, or a name below runs/; who only reads a run, or names none, does not wait for torch."""
    make_run(tmp_path / "runs" / "first", started=1.0)  # it has ended
    wrong = [[name, "frist"] for name in ("status", "attach", "logs", "stop", "report", "export", "inspect", "replay")]
    right = [[name, "first"] for name in ("status", "attach", "logs", "stop")]
    start = ["train", "--resume-from", "frist", "--run-dir", "new", "inference.api_key=k"]
    program = [sys.executable, "-c", RUN_COMMANDS.format(words=[*wrong, *right, start])]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = [line.split(None, 3) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [words[0] for words in (*wrong, *right, start)], done.stderr
    assert {line[2] for line in lines} == {"False"}, lines
    assert [line[1] for line in lines] == ["True"] * len(wrong) + ["False"] * len(right) + ["True"], lines


def test_debug_show_is_inspect(capsys):
    with pytest.raises(SystemExit):
        debug.main(["show", "--help"])
    assert "verl-atropos inspect" in capsys.readouterr().out


def test_doctor_on_a_gpu_looks_at_what_only_gpus_need(monkeypatch):
    plan = plan_run(["actor_rollout_ref.model.path=model", "trainer.device=cuda", "inference.colocated=true"])
    found = examine(plan)
    assert {"gpus", "environments", "attention", "memory_saver"} < found.keys()
    assert not found["gpus"].ok, "this test's torch is for a CPU"
