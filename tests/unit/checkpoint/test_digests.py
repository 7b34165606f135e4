"""A checkpoint is used only as it was saved, and runs no code; what is changed is named, with what to do instead."""

import contextlib
import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from helpers.disk import flip, write_files
from recipe.atropos.checkpoint.export import _Checkpoint
from recipe.atropos.checkpoint.shards import Shards, ShardsError, load_tensors, save_state, tensors_only
from recipe.atropos.checkpoint.store import CheckpointDamaged, Checkpoints, digests_of, verify
from recipe.atropos.commands.replay import differing_tensors
from recipe.atropos.fsdp_workers import AtroposActorWorker
from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer
from recipe.atropos.run.record import RunRecord
from recipe.atropos.utils.files import read_json, sync, write_json

MODEL, OPTIMIZER = "actor/model_world_size_1_rank_0.pt", "actor/optim_world_size_1_rank_0.pt"
FILES = {"data.pt": b"data", MODEL: b"model", OPTIMIZER: b"optimizer", "actor/huggingface/config.json": b"{}"}


class Touches:
    """What touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def save(directory, step, files=None, digests=None):
    with Checkpoints(directory).saving(step, None, digests=digests) as folder:
        write_files(folder, files or FILES)
    return folder


def actor(load=None):
    """The worker of rank 0, whose engine loads with ``load``."""
    worker = object.__new__(AtroposActorWorker)
    worker._rank, worker._is_actor, worker.role = 0, True, "actor"
    worker.actor = SimpleNamespace(load_checkpoint=load, save_checkpoint=lambda *_: None)
    return worker


def trainer(directory, folder, load=None):
    """What a trainer resumes ``folder`` with."""
    settings = {"resume_mode": "resume_path", "resume_from_path": str(folder), "del_local_ckpt_after_load": False}
    made = object.__new__(RayGRPOAtroposTrainer)
    made.config = OmegaConf.create({"trainer": settings})
    made.checkpoints, made.record = Checkpoints(folder.parent), RunRecord(directory)
    made.actor = SimpleNamespace(load_checkpoint=load or (lambda *_, **__: None))
    return made


def test_digest_finds_every_flipped_bit_of_every_file(tmp_path):
    save(tmp_path, 2)
    folder = save(tmp_path, 4)
    assert read_json(folder / "complete.json")["digests"].keys() == FILES.keys()
    verify(folder, "*")
    for name, content in FILES.items():
        for place in range(8 * len(content)):
            flip(folder / name, place // 8, 1 << place % 8)
            with pytest.raises(CheckpointDamaged, match=f"{folder / name} is not as it was saved.*is that of .*step_2"):
                verify(folder, "*")
            flip(folder / name, place // 8, 1 << place % 8)
    verify(folder, "*")
    (folder / "data.pt").unlink()
    with pytest.raises(CheckpointDamaged, match="data.pt is not as it was saved"):
        verify(folder, "*")
    older = tmp_path / "global_step_2"
    flip(older / "data.pt", 0)
    with pytest.raises(CheckpointDamaged, match="move global_step_2 away; the checkpoint to go on from then is none"):
        verify(older, "*")


def test_digest_is_not_missed_in_an_older_checkpoint(tmp_path):
    folder = save(tmp_path, 2)
    saved = read_json(folder / "complete.json")
    del saved["digests"]
    write_json(folder / "complete.json", saved)
    assert Checkpoints(tmp_path).newest() == folder
    verify(folder, "*")
    (folder / "complete.json").unlink()  # trainer.resume_mode=resume_path forces it
    verify(folder, "*")


def test_digest_is_made_and_compared_by_the_rank_itself(tmp_path):
    folder, loaded = save(tmp_path, 2, digests={MODEL: "made by the rank that wrote it"}), []
    found = read_json(folder / "complete.json")["digests"]
    assert found[MODEL] == "made by the rank that wrote it", "and not again"
    assert found[OPTIMIZER] == digests_of(folder, "*/o*")[OPTIMIZER]
    folder = save(tmp_path, 2)
    worker = actor(lambda *given: loaded.append(given[0]))
    assert worker.save_checkpoint(str(folder / "actor")).keys() == {MODEL, OPTIMIZER}
    flip(folder / "data.pt", 0)  # the driver's
    worker.load_checkpoint(str(folder / "actor"))
    assert loaded == [str(folder / "actor")]
    flip(folder / OPTIMIZER, 3)
    with pytest.raises(CheckpointDamaged, match=OPTIMIZER):
        worker.load_checkpoint(str(folder / "actor"))
    assert len(loaded) == 1


@pytest.fixture
def synced(monkeypatch):
    """Paths that were synced, in order; of a folder, with the names in it."""
    found, fsync = [], os.fsync

    def record(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        found.append((path, frozenset(os.listdir(path)) if path.is_dir() else None))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return found


def test_checkpoint_is_on_disk_before_an_older_one_goes(tmp_path, monkeypatch, synced):
    """Else a power loss may leave neither: what was written last may not have reached the disk."""
    older, removed = save(tmp_path, 2), []
    remove = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: removed.append((*paths, [*synced])) or remove(*paths))
    with Checkpoints(tmp_path).saving(4, 1) as folder:
        write_files(folder, FILES)
        synced.clear()
    [before] = [before for path, _, before in removed if path == older / "complete.json"]
    assert {folder / name for name in FILES} <= dict(before).keys()
    assert {"global_step_2", "global_step_4"} <= dict(before)[tmp_path]
    assert dict(before)[folder / "actor"] >= {Path(name).name for name in (MODEL, OPTIMIZER)}
    assert dict(before)[folder] == {"actor", "complete.json", "data.pt"}
    [complete] = [i for i, (path, _) in enumerate(before) if path.name.startswith(".complete.json")]
    assert {path for path, _ in before[complete + 1 :]} >= {folder} and not older.exists()


def test_checkpoint_is_synced_by_the_rank_that_wrote_it(tmp_path, synced):
    """On a file system of several machines, no other one holds what is still to be written."""
    folder = save(tmp_path, 2)
    synced.clear()
    actor().save_checkpoint(str(folder / "actor"))
    assert {path for path, _ in synced} == {folder / MODEL, folder / OPTIMIZER}


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_checkpoint_is_saved_where_folders_cannot_be_synced(tmp_path, monkeypatch, code):
    """Some file systems take no sync of a folder; what they take and cannot do ends the saving."""

    def fail(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with contextlib.nullcontext() if code == errno.EINVAL else pytest.raises(OSError, match="Input/output error"):
        sync(tmp_path)


def test_digest_is_compared_before_a_checkpoint_is_used(tmp_path):
    """Before a run resumes, before an export, and before a replay's comparison."""
    folder, other, loaded = save(tmp_path, 2), save(tmp_path / "other", 2), []
    flip(folder / OPTIMIZER, 0)  # no part of these

    def resume():
        trainer(tmp_path, folder, lambda *_, **__: loaded.append(1))._load_checkpoint()

    def export():
        _Checkpoint(folder, OmegaConf.create(), False)

    def compare():
        differing_tensors(folder / "actor", other / "actor")

    for name, do in (("data.pt", resume), ("actor/huggingface/config.json", export), (MODEL, export), (MODEL, compare)):
        flip(folder / name, 0)
        with pytest.raises(CheckpointDamaged, match=f"{folder / name}"):
            do()
        flip(folder / name, 0)
    assert not loaded


def test_resuming_from_an_earlier_step_leaves_what_came_after_it(tmp_path):
    """Else a start without that path would go on from the step that was given up, and the next save remove this one."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    folder = save(checkpoints.directory, 2)
    save_state(folder / "data.pt", {"totals": {}})
    save(checkpoints.directory, 2, FILES | {"data.pt": (folder / "data.pt").read_bytes()})
    save(checkpoints.directory, 4)
    trainer(tmp_path, folder)._load_checkpoint()
    assert checkpoints.newest() == folder
    with checkpoints.saving(3, 2):
        assert folder in checkpoints.whole()
    assert checkpoints.newest().name == "global_step_3"


def test_resuming_runs_no_code_of_a_checkpoint(tmp_path):
    """Whoever loads the file, and with whatever arguments: verl's three loads have ``weights_only=False``."""
    folder = save(tmp_path / "checkpoints", 2)
    ran = tmp_path / "ran"
    torch.save({"totals": Touches(ran)}, folder / "data.pt")
    torch.save({"weight": Touches(ran)}, folder / MODEL)
    (folder / "complete.json").write_text("{}")  # as of an earlier version, without digests
    with pytest.raises(ShardsError, match=r"data.pt cannot be read: it holds io.open, and would run code"):
        trainer(tmp_path, folder)._load_checkpoint()
    worker = actor(lambda *_: torch.load(folder / MODEL, weights_only=False))
    with pytest.raises(ShardsError, match=f"{folder}/actor cannot be read: it holds io.open"):
        worker.load_checkpoint(str(folder / "actor"))
    for load in (lambda actor: differing_tensors(actor, actor), Shards):
        with pytest.raises(ShardsError, match=f"{MODEL} cannot be read: it holds io.open"):
            load(folder / "actor")
    assert not ran.exists()
    torch.load(folder / MODEL, weights_only=False)["weight"].close()
    assert ran.exists(), "else this test shows nothing"


def test_resuming_loads_what_verl_and_we_save(tmp_path):
    """verl's random states are of torch, numpy and Python; a learning rate's schedule may be a bound method."""
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    extra = {"lr_scheduler": schedule.state_dict(), "rng": BaseCheckpointManager.get_rng_state()}
    torch.save(extra, tmp_path / "extra.pt")
    record = RunRecord(tmp_path)
    record.totals.dropped, record.totals.mean_score_first = {"stale": 3}, 0.25
    save_state(tmp_path / "data.pt", record.state_dict())
    expected = torch.rand(3), np.random.rand(3), random.random()
    with tensors_only(tmp_path):
        loaded = torch.load(tmp_path / "extra.pt", weights_only=False)
    BaseCheckpointManager.load_rng_state(loaded["rng"])
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[2]
    assert np.array_equal(np.random.rand(3), expected[1]) and loaded["lr_scheduler"] == extra["lr_scheduler"]
    assert load_tensors(tmp_path / "data.pt") == record.state_dict()
