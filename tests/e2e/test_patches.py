"""scripts/patches/apply.sh on the real wheels: affected versions and fixed ones."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.patches import APPLY, apply_to

NAMES = ("dict-chat-template", "ref-offload", "flush-cache")
MIXIN = "sglang/srt/managers/scheduler_update_weights_mixin.py"
SGLANG = "0.5.3 0.5.3.post3 0.5.4 0.5.4.post3 0.5.5 0.5.5.post3 0.5.6 0.5.6.post2 0.5.7 0.5.8 0.5.8.post1 0.5.9".split()
SGLANG += "0.5.10 0.5.10.post1 0.5.11 0.5.12 0.5.12.post1".split()
VERL = "0.6.0 0.6.1 0.7.0 0.7.1 0.8.0 0.9.0 0.9.1".split()
FEW = ["sglang==0.5.12", "verl==0.9.1"]
FEW += [pytest.param(what, marks=pytest.mark.slow) for what in ("sglang==0.5.6", "verl==0.6.1")]


def needed_of(what):
    """(files that are changed, names of the patches that do it)"""
    name, _, version = what.partition("==")
    number = [int(part) for part in version.split(".")[:3]]
    if name == "verl":
        workers = ("verl/workers/fsdp_workers.py",) if number < [0, 8] else ()
        return ("verl/workers/engine/fsdp/transformer_impl.py", *workers), {"ref-offload"}
    if number < [0, 5, 12]:
        return ("sglang/srt/managers/template_manager.py", MIXIN), {"dict-chat-template", "flush-cache"}
    return (MIXIN,), {"flush-cache"}


def unpacked(what, folder):
    """The wheel from the index; a test is skipped where there is none."""
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--dest", str(folder), what]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        pytest.skip(f"{what} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module", params=FEW)
def package(request, tmp_path_factory):
    """(what, folder): a wheel, nothing else beside it."""
    return request.param, unpacked(request.param, tmp_path_factory.mktemp("wheel"))


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
    return {name: (folder / name).read_bytes() for name in needed_of(what)[0]}


def test_patch_is_applied_once_and_reverted_to_the_byte(package):
    """It is applied only where it is needed, and in every file that the documents name."""
    what, folder = package
    (files, names), before = needed_of(what), contents(package)
    status, output = apply(folder, "--check")
    assert status == 1 and output.count(": needed") == len(files), output
    for name in NAMES:
        status, output = apply(folder, "--check", name)
        assert status == (name in names), output

    status, output = apply(folder, "--dry-run")
    assert status == 0 and output.count("# patched: ") >= len(files) and contents(package) == before, output

    assert apply(folder)[0] == 0
    patched = contents(package)
    for name, text in patched.items():
        assert text != before[name] and b"# patched: " in text
        ast.parse(text)
    status, output = apply(folder, "--check")
    assert status == 0 and output.count(": applied") == len(files), "nothing is needed any more"
    status, output = apply(folder)
    assert status == 0 and contents(package) == patched and "applied" in output, "the second time changes nothing"

    assert apply(folder, "--revert")[0] == 0
    assert contents(package) == before
    assert apply(folder, "--revert")[0] == 0 and contents(package) == before


@pytest.mark.slow
@pytest.mark.parametrize("what", [*(f"sglang=={v}" for v in SGLANG), *(f"verl=={v}" for v in VERL)])
def test_patches_fit_every_wheel_that_the_documents_mean(what, tmp_path):
    package = (what, unpacked(what, tmp_path))
    test_patch_is_applied_once_and_reverted_to_the_byte(package)
    if what.startswith("sglang"):
        test_patched_flush_that_fails_pauses_the_engine(package)


def test_patch_leaves_alone_what_somebody_else_changed(package):
    """The file is named."""
    what, folder = package
    if what != "verl==0.9.1":
        pytest.skip("one package with several lines to change is enough")
    file = folder / needed_of(what)[0][0]
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
    assert (
        status == 1
        and "verl 0.9.1: workers/engine/fsdp/transformer_impl.py: needed" in output
        and "sglang is not installed" in output
    ), output
    assert "this recipe needs no patch (verl_ext/engines.py)" in output


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
        if what.startswith(("sglang==0.5.3", "sglang==0.5.4", "sglang==0.5.5")):
            del scheduler._engine_paused  # it cannot be paused
        request = SimpleNamespace(flush_cache=True, torch_empty_cache=True)
        success, message, _ = namespace["update_weights_from_disk"](scheduler, request)
        assert success == flushed and scheduler._engine_paused == (not flushed)
        assert flushed or "generate nothing before" in message


def test_what_cannot_be_meant_is_said():
    status, output = apply_to(sys.executable, "flush")
    assert status == 2 and "unknown patch flush; choose from: dict-chat-template ref-offload flush-cache" in output
    status, output = apply_to("/no/such/python")
    assert status == 2 and "no interpreter /no/such/python" in output
    status, output = apply_to(sys.executable, "--force")
    assert status == 2 and "unknown option --force" in output
    status, output = apply_to(sys.executable, "--help")
    assert status == 0 and "--revert" in output
