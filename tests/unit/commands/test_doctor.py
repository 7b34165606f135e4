"""What the doctor says of a machine and a run, with the fix of each fault."""

import json
import re
import shutil
import socket
import tomllib
from urllib.parse import urlsplit

import pytest
import wandb
from packaging.specifiers import SpecifierSet

from helpers import ROOT
from helpers.configs import loaded
from recipe.atropos.__main__ import main
from recipe.atropos.commands import doctor
from recipe.atropos.commands.doctor import examine_run
from recipe.atropos.launcher.run_plan import plan_run
from recipe.atropos.utils.process import free_port

ADAPTER = "actor_rollout_ref.model.lora_rank=8"


@pytest.fixture
def results(tmp_path, model_path):
    """A function that returns the results for a copy of the tiny model, and for further settings."""
    model = tmp_path / "model"
    shutil.copytree(model_path, model)

    def examine(*overrides):
        sizes = ["data.max_prompt_length=8", "data.max_response_length=8"]
        return examine_run(loaded(f"actor_rollout_ref.model.path={model}", *sizes, *overrides), has_model=True)

    examine.model = model
    return examine


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_doctor_finds_nothing_wrong_with_a_model_that_fits(results):
    assert "model" not in examine_run(loaded("actor_rollout_ref.model.path=model"), has_model=False)
    found = results()
    names = ["ports", "memory", "shared_memory", "disk", "wandb", "model", "tokenizer", "chat_template", "sizes"]
    assert list(found) == names and all(result.ok for result in found.values()), found
    assert found["wandb"].message.startswith("not used")


def test_doctor_names_ports_that_are_taken(results, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = results(f"api.port={port}")["ports"]
        assert not given.ok and f"api.port={port} is taken" in given.message and "null" in given.message
        monkeypatch.setattr(doctor, "API_PORT", port)
        monkeypatch.setattr(doctor, "GATEWAY_PORT", free_port())
        usual = results()["ports"]
    assert usual.state == "note" and f"{port} taken" in usual.message


@pytest.mark.parametrize(
    ("limit", "name", "fix"),
    [
        ("_LEAST_MEMORY", "memory", "end other"),
        ("_LEAST_SHARED", "shared_memory", "--shm-size"),
        ("_LEAST_DISK", "disk", "--run-dir"),
    ],
)
def test_doctor_says_what_there_is_too_little_of(results, monkeypatch, limit, name, fix):
    monkeypatch.setattr(doctor, limit, 10**6)
    found = results()[name]
    assert not found.ok and fix in found.message


def test_doctor_looks_for_room_where_checkpoints_will_be(results, tmp_path, monkeypatch):
    """Whose base has no moments beside an adapter."""
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor, "_parameters", lambda path: 1 << 30)
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: disk._replace(free=(20 if path == tmp_path else 1000) << 30)
    )
    for folder, options, told in (
        (tmp_path, [ADAPTER], "14 needed for 3 checkpoints"),
        ("/", [], "38 needed for 3 checkpoints"),
        ("/", ["trainer.max_actor_ckpt_to_keep=1"], "3 checkpoints"),
        ("/", ["trainer.max_actor_ckpt_to_keep=4"], "5 checkpoints"),
        ("/", ["trainer.save_freq=-1"], "logs and trajectories$"),
        (tmp_path, [ADAPTER, "actor_rollout_ref.actor.checkpoint.save_lora_only=true"], "2 needed for 3 .* adapter$"),
        (tmp_path, [], "38 needed for 3 .*, or give another trainer.default_local_dir"),
    ):
        found = results("run.dir=/", f"trainer.default_local_dir={folder}", *options)["disk"]
        assert re.search(told, found.message) and found.ok == ("another" not in told)


def test_doctor_looks_for_a_login_to_wandb(results, no_wandb_login, tmp_path, monkeypatch):
    def found():
        return results("trainer.logger=[console,wandb]")["wandb"]

    def log_in(host):
        (tmp_path / "netrc").write_text(f"machine {host} login user password {'5' * 40}\n")

    host = urlsplit(wandb.Settings().base_url).netloc
    assert not found().ok and "wandb login" in found().message and "WANDB_MODE=offline" in found().message
    log_in(host)
    assert found().ok and found().message == f"logged in to {host}"
    (tmp_path / "settings").write_text("[default]\nbase_url = https://own.example.org:8080\n")  # wandb login --host
    assert "nobody is logged in to own.example.org:8080" in found().message
    log_in("own.example.org:8080")
    assert found().message == "logged in to own.example.org:8080"
    for name in ("netrc", "settings"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    assert "nobody is logged in to W&B" in found().message
    for name in ("netrc", "settings"):
        (tmp_path / name).unlink()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not found().ok
    monkeypatch.setenv("WANDB_BASE_URL", "no address")
    assert not found().ok
    (tmp_path / "netrc").write_bytes(b"\xff\xfe")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert found().ok


def test_doctor_names_what_a_models_folder_lacks(results):
    """A chat template, a tokenizer that can be read (the reason is told once), or any."""
    for file in results.model.glob("chat_template*"):
        file.unlink()
    change(results.model / "tokenizer_config.json", chat_template=None)
    found = results()["chat_template"]
    assert found.state == "note" and "instruct model" in found.message
    (results.model / "tokenizer.json").write_text("{")
    found = results()
    assert [found[name].state for name in ("tokenizer", "chat_template", "sizes")] == ["FAILED", "skipped", "skipped"]
    assert "cannot be loaded from this machine" in found["tokenizer"].message
    assert found["chat_template"].message == found["sizes"].message
    assert found["sizes"].message == "not checked, since the tokenizer cannot be loaded"
    for file in results.model.glob("*token*"):
        file.unlink()
    found = results()["tokenizer"]
    assert not found.ok and "save_pretrained" in found.message


def test_doctor_names_a_configuration_that_is_damaged(results):
    """By a download that was interrupted, for example; the other checks are made."""
    (results.model / "config.json").write_text('{"vocab_size": 1')
    found = results("trainer.save_freq=1")
    for name in ("disk", "model"):
        assert not found[name].ok and "config.json cannot be read" in found[name].message
    assert found["memory"].ok


@pytest.mark.parametrize(
    ("settings", "overrides", "fix"),
    [
        ({"vocab_size": 7}, [], "resize_token_embeddings"),
        ({"max_position_embeddings": 15}, [], "lower the lengths"),
        ({}, ["inference.args.max_total_tokens=15"], "raise it"),
        ({}, ["inference.args.max-total-tokens='15'"], "raise it"),
    ],
    ids=["vocabulary", "positions", "server", "spelled"],
)
def test_doctor_compares_the_sizes_of_model_and_tokenizer(results, settings, overrides, fix):
    change(results.model / "config.json", **settings)
    found = results(*overrides)["sizes"]
    assert not found.ok and fix in found.message


def test_doctor_claims_nothing_of_a_size_that_is_not_known(results):
    file = results.model / "config.json"
    file.write_text(file.read_text().replace("max_position_embeddings", "renamed"))
    assert "; positions unknown for 16" in results()["sizes"].message


@pytest.mark.parametrize(("device", "note"), [("auto", True), ("cpu", False)])
def test_doctor_notes_that_no_gpu_is_visible(device, note, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    found = doctor.examine(plan_run(["actor_rollout_ref.model.path=model", f"trainer.device={device}"]))["gpus"]
    assert found.ok and (found.state == "note") == note and ("would run on the CPU" in found.message) == note


@pytest.mark.parametrize("compiles", [True, False])
def test_doctor_looks_for_the_compiler_that_torch_needs(compiles, monkeypatch):
    key = "actor_rollout_ref.actor.use_torch_compile"
    plan = plan_run(["actor_rollout_ref.model.path=model", "trainer.device=cpu", f"{key}={compiles}"])
    monkeypatch.setenv("CXX", "/no/such/compiler")
    found = doctor.examine(plan)["compiler"]
    assert found.ok != compiles and key in found.message
    monkeypatch.setenv("CXX", "true")
    assert doctor.examine(plan)["compiler"].ok


def test_doctor_names_packages_and_a_python_of_other_versions(monkeypatch):
    assert doctor._pins()
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["torch==1.0", "gone>=2", "rich", "x; extra=='gem'"])
    found = doctor.result_of(doctor._pins)
    assert not found.ok and "gone is missing" in found.message and "needed is torch==1.0" in found.message
    assert "rich" not in found.message and "make trainer-env" in found.message
    assert doctor.result_of(doctor._python).ok
    asked = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    for version in ("3.10", "3.11", "3.12", "3.13"):
        monkeypatch.setattr(doctor.sys, "version_info", tuple(map(int, version.split("."))))
        assert doctor.result_of(doctor._python).ok == asked.contains(version)
    found = doctor.result_of(doctor._python)
    assert not found.ok and "make env PYTHON=python3.11" in found.message


def test_plan_of_a_small_policy_asks_for_a_model():
    with pytest.raises(SystemExit, match="path=small-policy-code: a small policy for a CPU.*give --model"):
        main(["plan", "--preset", "code", "--gpu-memory", "80"])


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_doctor_and_plan_take_the_options_of_train(command, tmp_path, capsys):
    """A mistake in each is told as by train, which is how one sees that all of them were read."""
    config = tmp_path / "own.yaml"
    config.write_text("{lr: 1}")
    options = ["--preset", "demo", "--steps", "3", "--gpus", "1", "--seed", "2", "--run-dir", str(tmp_path), "sed=1"]
    with pytest.raises(SystemExit) as told:
        main([command, *options, "--config", str(config), "--model", "m", "--resume-from", "frist"])
    assert "lr=1: this key has another name here" in str(told.value) and "sed: no such key" in str(told.value)
    with pytest.raises(SystemExit, match=r"resume_from=frist with actor_rollout_ref.model.path \(--model\)"):
        main([command, *options[:-1], "--model", "m", "--resume-from", "frist"])
    with pytest.raises(SystemExit, match="resume_from=frist: no run there"):
        main([command, *options[:-1], "--resume-from", "frist"])
