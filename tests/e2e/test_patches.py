"""scripts/patches/apply.sh on the real wheels: affected versions and fixed ones."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.patches import APPLY, apply_to

NAMES = ("dict-chat-template", "ref-offload", "flush-cache")
MIXIN = "sglang/srt/managers/scheduler_update_weights_mixin.py"
FILES = {
    "sglang==0.5.6": ("sglang/srt/managers/template_manager.py", MIXIN),
    "sglang==0.5.12": (MIXIN,),
    "verl==0.5.0": ("verl/workers/fsdp_workers.py",),
    "verl==0.9.1": ("verl/workers/engine/fsdp/transformer_impl.py",),
}
NEEDED = {
    "sglang==0.5.6": {"dict-chat-template", "flush-cache"},
    "sglang==0.5.12": {"flush-cache"},
    "verl==0.5.0": {"ref-offload"},
    "verl==0.9.1": {"ref-offload"},
}


@pytest.fixture(scope="module", params=sorted(FILES))
def package(request, tmp_path_factory):
    """(what, folder): a wheel as pip installs it, nothing else beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, request.param], check=True, timeout=180)
    return request.param, folder


def apply(folder, *arguments):
    """(exit status, output) with only the packages of ``folder`` to be found."""
    python = [sys.executable, "-S"]  # without the environment's own site-packages
    wrapper = Path(folder) / "python-of-the-wheel"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(python)} "$@"\n')
    wrapper.chmod(0o755)
    command = ["bash", str(APPLY), "--python", str(wrapper), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(folder)}
    )
    return done.returncode, done.stdout + done.stderr


def contents(package):
    what, folder = package
    return {name: (folder / name).read_bytes() for name in FILES[what]}


def test_patch_is_applied_once_and_reverted_to_the_byte(package):
    """It is applied only where it is needed."""
    what, folder = package
    before = contents(package)
    status, output = apply(folder, "--check")
    assert status == 1 and output.count(": needed") == len(NEEDED[what]), output
    for name in NAMES:
        status, output = apply(folder, "--check", name)
        assert status == (name in NEEDED[what]), output

    status, output = apply(folder, "--dry-run")
    assert status == 0 and "# patched: " in output and contents(package) == before, output

    assert apply(folder)[0] == 0
    patched = contents(package)
    for name, text in patched.items():
        assert text != before[name] and b"# patched: " in text
        ast.parse(text)
    assert apply(folder, "--check")[0] == 0, "nothing is needed any more"
    status, output = apply(folder)
    assert status == 0 and contents(package) == patched and "applied" in output, "the second time changes nothing"

    assert apply(folder, "--revert")[0] == 0
    assert contents(package) == before
    assert apply(folder, "--revert")[0] == 0 and contents(package) == before


def test_patch_leaves_alone_what_somebody_else_changed(package):
    """The file is named."""
    what, folder = package
    if what != "verl==0.9.1":
        pytest.skip("one package with several lines to change is enough")
    file = folder / FILES[what][0]
    before = file.read_text()
    line = "            if self.engine_config.forward_only:\n"
    assert before.count(line) == 1
    file.write_text(before.replace(line, "            if self.engine_config.forward_only and True:\n"))
    try:
        status, output = apply(folder, "ref-offload")
        assert status == 1 and f"{file} has only some of the lines" in output, output
    finally:
        file.write_text(before)


def test_patches_that_our_versions_need_are_open_upstream():
    status, output = apply_to(sys.executable, "--check")
    assert status == 1 and "verl 0.9.1: needed" in output and "sglang is not installed" in output, output
    assert "not needed here: verl_ext/engines.py" in output


def test_patched_flush_that_fails_pauses_the_engine(package):
    """The update fails. The patched methods themselves, on a scheduler that cannot flush because requests run."""
    what, folder = package
    if not what.startswith("sglang"):
        pytest.skip("about SGLang")
    assert apply(folder, "flush-cache")[0] == 0
    try:
        tree = ast.parse((folder / MIXIN).read_text())
    finally:
        apply(folder, "--revert", "flush-cache")
    mixin = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SchedulerUpdateWeightsMixin")
    names = ("update_weights_from_disk", "flush_cache_after_weight_update")
    methods = [node for node in mixin.body if getattr(node, "name", "") in names]
    for method in methods:
        for argument in method.args.args:
            argument.annotation = None
        method.returns = None
    namespace = {"UpdateWeightFromDiskReqOutput": lambda *values: values, "logger": SimpleNamespace(error=print)}
    exec(compile(ast.fix_missing_locations(ast.Module(methods, [])), "mixin", "exec"), namespace)

    for flushed in (True, False):
        worker = SimpleNamespace(update_weights_from_disk=lambda request: (True, "Succeeded"))
        scheduler = SimpleNamespace(
            tp_worker=worker, draft_worker=None, flush_cache=lambda flushed=flushed, **_: flushed, _engine_paused=False
        )
        if "flush_cache_after_weight_update" in namespace:
            after = namespace["flush_cache_after_weight_update"]
            scheduler.flush_cache_after_weight_update = lambda request, s=scheduler, after=after: after(s, request)
        request = SimpleNamespace(flush_cache=True, torch_empty_cache=True)
        success, message, _ = namespace["update_weights_from_disk"](scheduler, request)
        assert success == flushed and scheduler._engine_paused == (not flushed)
        assert flushed or "generation is paused" in message


def test_what_cannot_be_meant_is_said():
    status, output = apply_to(sys.executable, "flush")
    assert status == 2 and "unknown patch flush; choose from: dict-chat-template ref-offload flush-cache" in output
    status, output = apply_to("/no/such/python")
    assert status == 2 and "no interpreter /no/such/python" in output
    status, output = apply_to(sys.executable, "--force")
    assert status == 2 and "unknown option --force" in output
    status, output = apply_to(sys.executable, "--help")
    assert status == 0 and "--revert" in output
