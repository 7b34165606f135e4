"""One command line: ``python -m recipe.atropos COMMAND``."""

import importlib
import os
import subprocess
import sys

import pytest

from recipe.atropos import __main__ as commands
from recipe.atropos.commands.doctor import examine
from recipe.atropos.config.compose import load_config
from recipe.atropos.utils import debug


def test_each_command_is_a_module_with_a_main():
    for module, about in commands.COMMANDS.values():
        assert callable(importlib.import_module(f"recipe.atropos.{module}").main) and about


def test_help_is_answered_at_once_and_lists_every_command():
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "recipe.atropos", "--help"], capture_output=True, text=True, timeout=60
    )
    after = os.times()
    assert done.returncode == 0 and all(f"  {name} " in done.stdout for name in commands.COMMANDS)
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 2, "of processor time: nothing heavy is imported for it"


@pytest.mark.parametrize("given", [[], ["trian"]])
def test_what_is_no_command_is_said_with_those_that_are(given, capsys):
    assert commands.main(given) == 2
    told = capsys.readouterr().err
    assert "verify-env" in told and ("trian: no such command" in told or not given)


def test_debug_show_is_inspect(capsys):
    with pytest.raises(SystemExit):
        debug.main(["show", "--help"])
    assert "verl-atropos inspect" in capsys.readouterr().out


def test_doctor_on_a_gpu_looks_at_what_only_gpus_need(monkeypatch):
    config = load_config(["actor_rollout_ref.model.path=model", "trainer.device=cuda", "inference.colocated=true"])
    found = examine(config)
    assert {"gpus", "environments", "attention", "memory_saver"} < found.keys()
    assert not found["gpus"].ok, "this test's torch is for a CPU"
