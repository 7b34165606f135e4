"""Which checkpoint of a run folder is resumed from, how many are kept, and by which model and values."""

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from helpers.disk import fill, write_files
from helpers.trainer import compose_config
from recipe.atropos.checkpoint.resumption import model_identity, prepare_folder
from recipe.atropos.checkpoint.store import Checkpoints, choose_checkpoint
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.launcher.startup import set_aside_store
from recipe.atropos.run.evaluations import heldout_scores
from recipe.atropos.run.folder import RunDir, RunDirError
from recipe.atropos.run.record import RunRecord, account_of_groups, update_summary
from recipe.atropos.utils.files import DiskFull, append_line, read_json

FILES = {"actor/model_world_size_1_rank_0.pt": b"model" * 3, "actor/huggingface/config.json": b"{}", "data.pt": b"data"}


def save(directory, *steps, keep=None, model=None, scores=None):
    """As the trainer saves; of small files."""
    for step in steps:
        with Checkpoints(directory).saving(step, keep, model, scores) as folder:
            write_files(folder, FILES)


def steps(directory):
    return [int(folder.name.removeprefix("global_step_")) for folder in Checkpoints(directory).whole()]


def test_checkpoints_need_the_batches_after_the_oldest(tmp_path):
    """The best one is kept beside the newest, and a run may go on from it."""
    assert Checkpoints(tmp_path).oldest_batch() == 0, "nothing is committed before the first"
    for step in (2, 4, 6, 8):
        with Checkpoints(tmp_path).saving(step, 2, scores={2: 1.0, 4: 0.5}, batch=10 * step):
            pass
    assert steps(tmp_path) == [2, 6, 8] and Checkpoints(tmp_path).oldest_batch() == 20


@pytest.mark.parametrize("tracker", [b"", b"seven", b"4", b"999", None])
def test_run_dir_resumes_whatever_the_tracker_says(tmp_path, tracker):
    save(tmp_path, 2, 4)
    path = tmp_path / "latest_checkpointed_iteration.txt"
    assert path.read_text() == "4", "for verl's own tools"
    path.unlink() if tracker is None else path.write_bytes(tracker)
    assert Checkpoints(tmp_path).newest().name == "global_step_4"


def test_run_dir_resumes_before_a_checkpoint_cut_at_any_byte(tmp_path):
    save(tmp_path, 2, 4)
    whole = {path: path.read_bytes() for path in (tmp_path / "global_step_4").rglob("*") if path.is_file()}
    assert len(whole) == 4
    for path, content in whole.items():
        for size in range(len(content) - 1):  # the last byte of complete.json is a line's end
            path.write_bytes(content[:size])
            assert Checkpoints(tmp_path).newest().name == "global_step_2", (path, size)
        path.write_bytes(content)
        assert Checkpoints(tmp_path).newest().name == "global_step_4"


@pytest.mark.parametrize("content", [None, b"[]", b"{}", b'{"step": 4, "files": {}}', b'{"files": [], "sequence": 2}'])
def test_run_dir_resumes_before_a_checkpoint_broken_by_hand(tmp_path, content, caplog):
    """And says so, also where an export, or a run that starts from this one's weights, takes an older one."""
    run = RunDir(tmp_path)
    save(run.checkpoints, 2, 4)
    assert choose_checkpoint(run).name == "global_step_4" and not caplog.text
    complete = run.checkpoints / "global_step_4/complete.json"
    complete.unlink() if content is None else complete.write_bytes(content)
    assert choose_checkpoint(run) == Checkpoints(run.checkpoints).newest() == run.checkpoints / "global_step_2"
    assert f"{run.checkpoints}/global_step_4 is passed over: " in caplog.text
    assert ("is damaged" in caplog.text) is (content is not None)


def test_run_dir_removes_what_a_kill_left_of_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 2)
    shutil.copytree(tmp_path / "global_step_2", tmp_path / "global_step_3")  # a folder of others
    (tmp_path / "global_step_3/complete.json").unlink()
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)  # a process that is killed tidies up nothing
        with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path).saving(4, 2) as folder:
            (folder / "data.pt").write_bytes(b"da")
            raise KeyboardInterrupt
    assert (tmp_path / "global_step_4/data.pt").exists()
    Checkpoints(tmp_path).remove_incomplete()
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert Checkpoints(tmp_path).newest().name == "global_step_2"


def test_run_dir_keeps_so_many_checkpoints_of_all_processes(tmp_path):
    save(tmp_path, 2, 4, keep=2)
    save(tmp_path, 6, keep=2)  # another Checkpoints, as another process has
    assert steps(tmp_path) == [4, 6]
    save(tmp_path, 8, keep=1)
    assert steps(tmp_path) == [8] and len(list(tmp_path.glob("global_step_*"))) == 1
    save(tmp_path, 10, 12)
    save(tmp_path, 9, keep=2)  # of a run that went back: the others are of a branch that it left
    assert steps(tmp_path) == [12, 9]


def test_run_dir_keeps_the_best_for_export_beside_the_newest(tmp_path):
    """Of equals the newest; a run resumes from the newest all the same."""
    scores = {0: 0.9, 2: 0.3, 4: 0.5}
    save(tmp_path, 2, 4, 6, keep=1, scores=scores)
    assert steps(tmp_path) == [4, 6]
    save(tmp_path, 8, 10, keep=2, scores=scores)
    assert steps(tmp_path) == [4, 8, 10] and Checkpoints(tmp_path).newest().name == "global_step_10"
    scores |= {8: 0.5, 10: 0.2}
    assert Checkpoints(tmp_path).best(scores).name == "global_step_8"
    save(tmp_path, 12, keep=1, scores=scores)
    assert steps(tmp_path) == [8, 12]


def test_run_dir_scores_for_export_are_of_the_same_environments(tmp_path):
    """One that was given up meanwhile, or that failed, would make steps look better or worse than they are."""
    for step, env, value in ((0, "a", 0.1), (0, "b", 0.9), (2, "a", 0.2), (4, "a", 0.4), (4, "b", 0.6), (4, "c", None)):
        line = {"step": step, "env": env, "metrics": {}, "main": None}
        told = {"error": "failed"} if value is None else {"metrics": {"accuracy": value}, "main": "accuracy"}
        append_line(RunDir(tmp_path).evaluations, line | told)
    assert heldout_scores(tmp_path) == {0: 0.5, 4: 0.5}
    alone = {"env": "a", "metrics": {"accuracy": 0.3}, "main": "accuracy"}
    append_line(RunDir(tmp_path).evaluations, {"step": 6, **alone})
    assert heldout_scores(tmp_path) == {0: 0.5, 4: 0.5}, "the other one failed, or was given up"
    append_line(RunDir(tmp_path).evaluations, {"step": 8, **alone})
    assert heldout_scores(tmp_path) == {0: 0.1, 2: 0.2, 4: 0.4, 6: 0.3, 8: 0.3}


def test_run_dir_has_a_whole_checkpoint_while_the_next_is_saved(tmp_path):
    save(tmp_path, 2, keep=1)
    with pytest.raises(RuntimeError), Checkpoints(tmp_path).saving(4, 1):
        assert steps(tmp_path) == [2]
        raise RuntimeError("inline_container.cc: . PytorchStreamWriter failed writing file")
    assert steps(tmp_path) == [2] and not (tmp_path / "global_step_4").exists()
    with pytest.raises(DiskFull, match=f"no space left on device: {tmp_path}/global_step_4"):
        with Checkpoints(tmp_path).saving(4, 1):
            raise RuntimeError("RayTaskError: OSError: [Errno 28] No space left on device")


def test_run_dir_that_goes_on_from_an_earlier_step_keeps_it(tmp_path):
    """While a later one, which is given up, is saved again; if that fails, the run can go on from it once more."""
    save(tmp_path, 4, 6, keep=2)
    with pytest.raises(ValueError), Checkpoints(tmp_path).saving(6, 2):
        assert steps(tmp_path) == [4]
        raise ValueError
    assert steps(tmp_path) == [4]


def test_run_dir_full_disk_ends_a_checkpoint_and_keeps_the_last(full_disk):
    save(full_disk, 2, keep=1)
    room = shutil.disk_usage(full_disk).free
    with pytest.raises(DiskFull, match=f"no space left on device: {full_disk}/global_step_4"):
        with Checkpoints(full_disk).saving(4, 1) as folder:
            (folder / "data.pt").write_bytes(b"x" * 2 * room)
    assert steps(full_disk) == [2] and not (full_disk / "global_step_4").exists()
    fill(full_disk)
    with pytest.raises(DiskFull):
        save(full_disk, 4, keep=1)
    assert steps(full_disk) == [2]


def test_run_dir_checkpoint_path_that_is_none_is_refused(tmp_path):
    save(tmp_path, 2)
    settings = OmegaConf.create({"resume_mode": "resume_path", "resume_from_path": f"{tmp_path}/global_step_2"})
    assert Checkpoints(tmp_path).to_resume(settings) == tmp_path / "global_step_2"
    write_files(tmp_path / "global_step_8", {"data.pt": b"of a data loader", "actor/model": b"by verl's own trainer"})
    for path in (str(tmp_path), f"{tmp_path}/global_step_7", f"{tmp_path}/global_step_8"):
        settings.resume_from_path = path
        with pytest.raises(ConfigurationError, match=f"trainer.resume_from_path={path}: no checkpoint"):
            Checkpoints(tmp_path).to_resume(settings)


@pytest.fixture
def configured(tmp_path, model_path):
    """Prepares the folder ``run`` for a configuration; its model is a copy that a test may change."""
    model = tmp_path / "model"
    shutil.copytree(model_path, model)

    def prepare(**options):
        config = compose_config("actor_rollout_ref.model.path=m")
        own = {"actor_rollout_ref.model.path": str(model), "run.dir": str(tmp_path / "run")}
        for key, value in {**own, **options}.items():
            OmegaConf.update(config, key, value)
        values = OmegaConf.to_container(config, resolve=True)
        read = {key: values[key] for key in ("run", "seed", "trainer", "data", "algorithm", "inference")}
        policy = {key: values["actor_rollout_ref"][key] for key in ("model", "actor")}
        config = OmegaConf.create({**read, "actor_rollout_ref": policy})  # all of it would take long to write
        folder = RunDir(config.run.dir)
        folder.path.mkdir(exist_ok=True)
        assert Path(config.trainer.rollout_data_dir) == folder.rollouts, "a key, so that a user may place it elsewhere"
        assert Path(config.trainer.atropos.weight_sync.directory) == folder.weights
        return prepare_folder(folder, config, {"torch": "1"})

    return prepare


def save_of(directory, ranks):
    """As so many ranks do, each its shards alone."""
    with Checkpoints(directory).saving(2, None) as folder:
        write_files(folder, {f"actor/model_world_size_{ranks}_rank_{rank}.pt": b"shard" for rank in range(ranks)})


@pytest.mark.parametrize(("saved", "now"), [(2, 1), (1, 2)])
def test_run_dir_of_another_number_of_ranks_is_refused(configured, tmp_path, saved, now):
    configured()
    save_of(tmp_path / "run/checkpoints", saved)
    configured(**{"trainer.n_gpus_per_node": saved})
    with pytest.raises(ConfigurationError, match=rf"n_gpus_per_node = {now}, and \S+step_2 was saved by {saved} ranks"):
        configured(**{"trainer.n_gpus_per_node": now})


@pytest.mark.parametrize(
    ("key", "value", "ranks", "then"),
    [("strategy", "fsdp", 1, "fsdp2"), ("fsdp_config.fsdp_size", 1, 2, -1), ("fsdp_config.fsdp_size", 2, 2, None)],
)
def test_run_dir_of_another_layout_of_ranks_is_refused(configured, tmp_path, key, value, ranks, then):
    """torch would say only that tensors, or groups of the optimizer, do not fit. As many as all ranks is no other."""
    configured(**{"trainer.n_gpus_per_node": ranks})
    save_of(tmp_path / "run/checkpoints", ranks)
    told = rf"{key}={value}, and \S+step_2 was saved with {then}: give that"
    with pytest.raises(ConfigurationError, match=told) if then else contextlib.nullcontext():
        configured(**{"trainer.n_gpus_per_node": ranks, f"actor_rollout_ref.actor.{key}": value})


@pytest.mark.parametrize(
    ("key", "value", "then"),
    [
        ("lora_rank", 16, 8),
        ("lora_rank", 0, 8),
        ("target_modules", ["q_proj"], r"\['o_proj', 'q_proj'\]"),
        ("exclude_modules", "lm_head", "null"),
    ],
)
def test_run_dir_of_another_adapter_is_refused(configured, tmp_path, key, value, then):
    """Its configuration stays; the order of the modules is no other."""
    model, file = "actor_rollout_ref.model.", tmp_path / "run/config.yaml"
    adapter = {f"{model}lora_rank": 8, f"{model}target_modules": ["q_proj", "o_proj"]}
    configured(**adapter)
    save(tmp_path / "run/checkpoints", 2)
    before = file.read_bytes()
    with pytest.raises(ConfigurationError, match=rf"{model}{key}=.*, and \S+step_2 was saved with {then}: give that"):
        configured(**adapter | {f"{model}{key}": value})
    assert file.read_bytes() == before
    configured(**adapter | {f"{model}target_modules": ["o_proj", "q_proj"]})


def test_run_dir_asks_the_run_of_a_checkpoint_for_its_layout(configured, tmp_path):
    configured(**{"actor_rollout_ref.actor.strategy": "fsdp"})
    save(tmp_path / "run/checkpoints", 2)
    (tmp_path / "run").rename(tmp_path / "other")
    write_files(tmp_path / "other/checkpoints", {".run_dir": str(tmp_path / "other").encode()})
    resume = {"trainer.resume_mode": "resume_path"}
    resume |= {"trainer.resume_from_path": str(tmp_path / "other/checkpoints/global_step_2")}
    with pytest.raises(ConfigurationError, match="strategy=fsdp2, and .* was saved with fsdp:"):
        configured(**resume)


def test_run_dir_leaves_another_runs_checkpoints_alone(configured, tmp_path):
    """Neither resumes from them, nor removes what the other is saving."""
    shared, run = tmp_path / "shared", tmp_path / "run"
    configured(**{"trainer.default_local_dir": str(shared)})
    save(shared, 2)
    with pytest.raises(ConfigurationError, match=f"dir={run}/checkpoints, and this run has its .* {shared}: give that"):
        configured()  # it would begin anew
    configured(**{"trainer.resume_mode": "disable"})
    for folder in (shared, run / "checkpoints"):
        write_files(folder / "global_step_3", {"incomplete": b""})
        with pytest.raises(ConfigurationError, match=f"dir={folder} is that of the run in {run}: resume"):
            configured(**{"run.dir": str(tmp_path / "other"), "trainer.default_local_dir": str(folder)})
        assert (folder / "global_step_3").exists()
    nowhere = tmp_path / "run/run.json/checkpoints"
    with pytest.raises(ConfigurationError, match=f"dir={nowhere}: Not a directory; give a folder that can be written"):
        configured(**{"trainer.default_local_dir": str(nowhere)})
    run.rename(tmp_path / "moved")
    configured(**{"run.dir": str(tmp_path / "moved"), "trainer.default_local_dir": str(shared)})


@pytest.mark.parametrize("place", ["run/checkpoints", "shared"])
def test_run_dir_that_was_moved_has_no_other_runs_checkpoints(configured, tmp_path, place):
    """Those of a run that was moved count; not those that a run saves where it was."""
    moved, options = RunDir(tmp_path / "moved"), {"trainer.default_local_dir": str(tmp_path / place)}
    configured(**options)
    (tmp_path / "run").rename(moved.path)
    if place == "shared":
        save(tmp_path / place, 2)
        assert choose_checkpoint(moved) == tmp_path / "shared/global_step_2"
    configured(**options)
    save(tmp_path / place, 4)
    with pytest.raises(ConfigurationError, match=f"^{moved.checkpoints} holds no whole checkpoint"):
        choose_checkpoint(moved)


def test_a_copied_run_leaves_the_original_its_wandb_run(configured, tmp_path):
    """Both would write to it; of a folder that was moved, it is the same run."""
    configured()
    folders = [RunDir(tmp_path / name) for name in ("run", "copy", "moved")]
    folders[0].wandb_run.write_text("1234abcd")
    shutil.copytree(folders[0].path, folders[1].path)
    configured(**{"run.dir": str(folders[1].path)})
    folders[0].path.rename(folders[2].path)
    configured(**{"run.dir": str(folders[2].path)})
    assert [folder.wandb_run.exists() for folder in folders] == [False, False, True]


def test_run_dir_trained_beyond_the_last_step_is_refused(configured, tmp_path):
    """It would train nothing, and evaluate weights of another step than the last."""
    configured()
    save(tmp_path / "run/checkpoints", 4)
    assert configured(**{"trainer.total_training_steps": 4}), "only the last evaluation or the export is left"
    with pytest.raises(ConfigurationError, match=r"total_training_steps=3, and \S+global_step_4 was trained further"):
        configured(**{"trainer.total_training_steps": 3})


def test_run_dir_of_another_model_is_refused(configured, tmp_path, model_path):
    configured()
    assert read_json(tmp_path / "run/run.json")["versions"] == {"torch": "1"}
    weights = tmp_path / "model/model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    configured()  # nothing is trained yet
    save(tmp_path / "run/checkpoints", 2, model=model_identity(str(tmp_path / "model")))
    checkpoint = tmp_path / "run/checkpoints/global_step_2"
    by_path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(checkpoint)}
    configured(**by_path)
    weights.write_bytes(original)
    # Also after a start that resumed nothing with the other model, which its folder's run.json then names.
    for options in ({}, by_path, {"trainer.resume_mode": "disable"}, {}, by_path):
        refused = "disable" not in options.values()
        expected = f"is another model than .*/model, which was trained to {checkpoint}: give that model"
        with pytest.raises(ConfigurationError, match=expected) if refused else contextlib.nullcontext():
            configured(**options)
    save(tmp_path / "run/checkpoints", 1, model=model_identity(str(tmp_path / "model")))
    assert any("model.path" in line for line in configured(**{"actor_rollout_ref.model.path": str(model_path)})), (
        "the newest is of this model, which is elsewhere now"
    )


def test_run_dir_with_other_values_is_reported(configured, tmp_path):
    assert configured(seed=1) == []
    assert configured(seed=2) == [], "nothing was trained"
    save(tmp_path / "run/checkpoints", 2)
    assert configured(seed=2) == []
    options = {"algorithm.adv_estimator": "rloo", "data.train_batch_size": 5, "inference.api_key": "secret"}
    changes = configured(seed=3, **options)
    assert changes[0] == "seed: 2 -> 3" and changes[1].startswith("data.train_batch_size: ")
    assert changes[1].endswith(" -> 5") and "algorithm.adv_estimator: grpo_atropos -> rloo" in changes[:4]
    assert not any("secret" in line for line in changes)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.yaml", "trainer: [1, {2", " is damaged (while parsing a flow"),
        ("config.yaml", "- a list", " is damaged (it holds a list, not a dict)"),
        ("run.json", "[]", " is damaged (it holds a list, not a dict)"),
        ("summary.json", "[1]", " is damaged (it holds a list, not a dict)"),
        ("metrics.jsonl", '{"step": 1}\n{"st', None),  # left by a kill
        ("metrics.jsonl", '{"step": 1}\n{"st\n', ", line 2 is damaged ("),
        ("evaluations.jsonl", "3\n", ", line 1 is damaged (it holds a int, not a dict)"),
        ("alarms.jsonl", "\n", ", line 1 is damaged ("),
        ("environments/gsm8k.jsonl", "x\n", ", line 1 is damaged ("),
    ],
)
def test_run_dir_that_is_damaged_starts_nothing(configured, tmp_path, name, content, problem):
    configured()
    save(tmp_path / "run/checkpoints", 2)
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    if problem is None:
        configured()
        return
    with pytest.raises(RunDirError) as refused:
        configured()
    assert f"{path}{problem}" in str(refused.value) and "\n" not in str(refused.value)


def test_run_dir_summary_keeps_what_several_processes_write(tmp_path):
    def write(name):
        for i in range(40):
            update_summary(tmp_path, {f"{name}{i}": i})

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, "abc"))
    assert len(read_json(RunDir(tmp_path).summary)) == 120


def test_run_dir_accounts_for_every_group(tmp_path):
    """Two starts: the steps that no checkpoint holds are trained again, on the same groups."""

    def train(record, *trained):
        for count in trained:
            record.totals.steps += 1
            record.totals.groups_trained += count
            record.totals.groups_dropped += 4 - count
            record.write_summary()

    first = RunRecord(tmp_path)
    first.begin()
    train(first, 4, 3)
    saved = first.state_dict()
    train(first, 2)
    second = RunRecord(tmp_path)
    second.load_state_dict(saved)
    second.begin()
    train(second, 2, 4)
    summary = read_json(RunDir(tmp_path).summary)
    assert account_of_groups(summary, 21) == {"received": 21, "trained": 13, "dropped": 3, "left": 5}


def test_a_checkpoint_of_another_run_brings_no_counts(tmp_path):
    other = RunRecord(tmp_path / "other")
    other.totals.steps, other.totals.batches, other.totals.groups_trained = 7, 9, 28
    record = RunRecord(tmp_path / "run")
    record.load_state_dict(other.state_dict())
    record.forget_counts()
    record.begin()
    summary = read_json(RunDir(tmp_path / "run").summary)
    assert (summary["steps"], summary["batches"], summary["policy_version"]) == (7, 9, None)
    assert account_of_groups(summary, 5) == {"received": 5, "trained": 0, "dropped": 0, "left": 5}


def test_only_a_run_that_goes_on_keeps_its_store(tmp_path):
    files = RunDir(tmp_path / "run")
    save(files.checkpoints, 3)
    save(tmp_path / "other/checkpoints", 3)

    def keeps_its_store(mode, folder=None):
        stores = {files.trajectories, files.environments, files.sessions, files.path / "sessions.sqlite-wal"}
        for store in stores:
            store.mkdir()
        config = {"resume_mode": mode, "resume_from_path": folder and str(folder / "global_step_3")}
        set_aside_store(files, OmegaConf.create(config | {"default_local_dir": str(files.checkpoints)}))
        found = {*files.path.iterdir()} - {files.checkpoints}
        for folder in found:
            folder.rmdir()
        assert found == stores or len(found - stores) == 4
        return found == stores

    assert keeps_its_store("auto") and keeps_its_store("resume_path", files.checkpoints)
    assert not keeps_its_store("disable") and not keeps_its_store("resume_path", tmp_path / "other/checkpoints")


def test_environments_that_join_a_new_store_are_counted_anew(tmp_path):
    """Else a run that begins again would announce none until more have joined than before."""
    files = RunDir(tmp_path)
    for mode, left in (("auto", {"environments_joined": 3, "steps": 1}), ("disable", {"steps": 1})):
        save(files.checkpoints, 3)
        update_summary(tmp_path, {"environments_joined": 3, "steps": 1})
        set_aside_store(files, OmegaConf.create({"resume_mode": mode, "default_local_dir": str(files.checkpoints)}))
        assert read_json(files.summary) == left
