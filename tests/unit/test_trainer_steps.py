"""Steps of the trainer and its record, without ranks: what is dropped, compared, sent to the ranks and restored."""

import contextlib
import math
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from helpers.runs import metrics_line, write_lines
from helpers.trainer import compose_config
from recipe.atropos import fsdp_workers, ray_trainer
from recipe.atropos.algorithm.advantages import RunningMoments
from recipe.atropos.checkpoint.store import Checkpoints
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.errors import ConfigurationError, NothingToTrain, Preempted
from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer
from recipe.atropos.run.record import RunRecord, read_metrics
from recipe.atropos.workers.actor import _without_padding

LIMITS = RowLimits(20, pad_token_id=0)
POLICY = 4  # the version that step 5 starts from


def a_group(versions, logprobs=(-0.5, -0.5)):
    """Rows of one prompt and one response token each, sampled by ``versions``; a positive logprob means none."""
    n = len(versions)
    return {
        "tokens": [[1, 5 + i] for i in range(n)],
        "masks": [[-100, 5 + i] for i in range(n)],
        "scores": [float(i) for i in range(n)],
        "inference_logprobs": [[1.0, logprob] for logprob in logprobs],
        "group_overrides": {"policy_version_min": list(versions), "policy_version_max": list(versions)},
    }


class Ranks:
    """In the place of the ranks: every logprob is -2."""

    rows_multiple = 1

    def data_parallel_size(self):
        return 1

    def log_probs(self, batch):
        values = torch.full(batch.batch["responses"].shape, -2.0)
        return {"old_log_probs": values, "entropys": torch.zeros_like(values)}, 0.1


@pytest.fixture
def trainer(tmp_path):
    trainer = RayGRPOAtroposTrainer.__new__(RayGRPOAtroposTrainer)
    trainer.config = compose_config("actor_rollout_ref.model.path=none", "trainer.atropos.max_staleness=1")
    trainer.limits, trainer.mini_batch_size, trainer.batch_size, trainer.actor = LIMITS, 2, 8, Ranks()
    trainer.record, trainer.global_steps = RunRecord(tmp_path), POLICY + 1
    trainer.metrics, trainer.timing_raw, trainer._later = {}, {}, []
    trainer.sampling_check = SimpleNamespace(metrics=lambda *_: {}, temperatures=lambda *_: None)
    return trainer


def test_survivors_the_newest_version_is_the_policys(trainer):
    """A row of a newer one is of an abandoned branch; the oldest may be max_staleness older than the policy."""
    groups = [a_group([POLICY, POLICY + 1]), a_group([POLICY - 1, POLICY - 2])]
    trainer.data_source = SimpleNamespace(next_batch=lambda *_: (7, groups), metrics=dict)
    batch = trainer._next_batch()
    versions = batch.non_tensor_batch["policy_version_min"]
    assert sorted(version for version in versions if version is not None) == [POLICY - 1, POLICY]
    assert trainer.record.totals.dropped == {"future_version": 1, "stale": 1}


def test_metrics_of_rows_tell_no_length_of_the_batch_as_a_limit(trainer):
    """verl's own ``clip_ratio`` would be the share of rows that are as long as the longest."""
    trainer.data_source = SimpleNamespace(next_batch=lambda *_: (7, [a_group([POLICY, POLICY])]), metrics=dict)
    batch = trainer._next_batch()
    trainer._compute_log_probs(batch)
    trainer.advantage_moments, trainer.kl_controller = RunningMoments(), None
    trainer._compute_advantages(batch)
    trainer.timing_raw["step"], trainer.logprob_tolerance, trainer._alarms_logged = 1.0, 1.0, set()
    trainer.checkpoint_manager, trainer.actor.world_size = SimpleNamespace(version=POLICY + 1), 1
    trainer.sampling_check.mode = "error"
    trainer.config.trainer.rollout_data_dir = None
    trainer._describe(batch)
    trainer._collect_metrics()
    assert trainer.metrics["response_length/max"] == 1 and trainer.metrics["critic/score/mean"] == 0.5
    assert not [name for name in trainer.metrics if "clip_ratio" in name]


def batches_of(*batches):
    """A source of numbered batches, and the numbers of those that it was told to be empty."""
    told, left = [], list(enumerate(batches, start=1))
    source = SimpleNamespace(next_batch=lambda *_: left.pop(0), metrics=dict, batch_is_empty=told.append)
    return source, told


def test_empty_batches_are_told_and_counted(trainer):
    """A row of weights that the policy has abandoned is not trained on."""
    stale, fresh = a_group([POLICY + 1] * 2), a_group([POLICY] * 2)
    trainer.data_source, told = batches_of([stale], [stale, stale], [fresh])
    trainer._next_batch()
    assert told == [1, 2] and trainer.metrics["atropos/empty_batches"] == 2
    assert (trainer.record.totals.batches, trainer.record.totals.empty_batches) == (3, 2)
    assert trainer.record.totals.dropped == {"future_version": 6} and trainer.metrics["atropos/batch_fill"] == 2 / 8


def test_a_batch_is_filled_by_trajectories(trainer):
    """Three of five rows: in mini-batches of two trajectories, and in the fill; each counts once in the entropy."""
    group = a_group([POLICY] * 5, [-0.5] * 5)
    group["scores"] = [1.0, 0.0, 1.0, 2.0, 1.0]
    group["group_overrides"]["trajectory"] = [7, 8, 7, 9, 7]
    trainer.data_source, _ = batches_of([group, a_group([POLICY] * 2)], [group])
    batch = trainer._next_batch()
    assert trainer.metrics["atropos/batch_fill"] == 5 / 8 and trainer.metrics["atropos/received"] == 7
    assert batch.meta_info["mini_batches"] == 2 and len(batch) == 10, "5 rows and 2, which padding makes 5"
    entropies = torch.where(torch.tensor(batch.non_tensor_batch["trajectory"] == 7), 3.0, 1.0)[:, None]
    log_probs = {"old_log_probs": torch.full((10, 1), -2.0), "entropys": entropies}
    trainer.actor.log_probs = lambda _: (log_probs, 0.1)
    trainer.config.actor_rollout_ref.actor.loss_agg_mode = "seq-mean-token-mean"
    trainer._compute_log_probs(batch)
    assert trainer.metrics["actor/entropy"] == pytest.approx((3 + 4 * 1) / 5)
    trainer.config.actor_rollout_ref.actor.policy_loss.loss_mode = "gspo"
    with pytest.raises(ConfigurationError, match="loss_mode=gspo is not defined for a trajectory of several rows"):
        trainer._next_batch()


def test_empty_batches_are_those_without_a_teacher_to_learn_from(trainer):
    """Also if it is away for a while: a batch that ends the run would come again, and end the next."""
    taught, plain = a_group([POLICY] * 2), a_group([POLICY] * 2)
    taught |= {"distill_token_ids": [[[0], [5]], [[0], [6]]], "distill_logprobs": [[[-0.5], [-0.5]]] * 2}
    trainer.limits = replace(LIMITS, needs_teacher=True)
    trainer.data_source, told = batches_of([plain, plain], [plain, taught])
    batch = trainer._next_batch()
    assert told == [1] and trainer.record.totals.dropped == {"no_teacher": 4} and trainer.metrics["atropos/rows"] == 4
    sent = []
    trainer.actor.update = lambda batch, learned, meanwhile: sent.append(learned.tolist()) or {}
    trainer._update_actor(batch, meanwhile=print)
    assert sent == [batch.non_tensor_batch["has_teacher"].tolist()] and sum(sent[0]) == 2
    batch.batch["response_mask"][batch.non_tensor_batch["has_teacher"]] = 0
    trainer._update_actor(batch, meanwhile=lambda _: None)
    assert len(sent) == trainer.metrics["atropos/batches_without_token"] == 1


def test_empty_batches_end_the_run_with_reasons_by_environment(trainer):
    trainer.config.trainer.atropos.max_empty_batches = 2
    named = a_group([POLICY - 2] * 2)
    named["group_overrides"]["env_name"] = "gsm8k_0"
    trainer.data_source, _ = batches_of([named], [named, a_group([POLICY + 1] * 2)], [a_group([POLICY] * 2)])
    with pytest.raises(NothingToTrain, match="gsm8k_0: stale 4; unknown: future_version 2") as ended:
        trainer._next_batch()
    assert "trainer.atropos.max_empty_batches=2 batches in a row had nothing to train on" in str(ended.value)


def test_a_checkpoint_has_the_whole_limit_of_the_ranks(trainer, tmp_path):
    """Not what a long step and a slow push have left of the step's."""
    limits = []
    trainer.actor.deadline = time.monotonic()
    trainer.actor.save = lambda folder, step: limits.append(trainer.actor.deadline) or {}
    trainer.checkpoints, trainer._model_identity = Checkpoints(tmp_path / "checkpoints"), {}
    trainer.data_source = SimpleNamespace(commit=lambda _: None)
    trainer._save_checkpoint()
    assert limits == [math.inf]


@pytest.mark.parametrize("save_freq", [20, -1])
@pytest.mark.parametrize("saved", [POLICY, POLICY - 1])
def test_a_trainer_preempted_as_it_waits_saves_its_last_step(trainer, saved, save_freq):
    """Also one that saves nothing else: it would train from the start, each time that it is requeued."""
    steps = []
    trainer.config.trainer.save_freq = save_freq
    trainer.preempted, trainer._saved_step = True, saved
    trainer._save_checkpoint = lambda: steps.append(trainer.global_steps)
    trainer.data_source = SimpleNamespace(next_batch=lambda poll: poll())
    with pytest.raises(Preempted, match=f"ends after step {POLICY};"):
        trainer._next_batch()
    assert steps == [POLICY][saved == POLICY :] and trainer.record.totals.batches == 0


@pytest.mark.parametrize("preempted", [True, False])
def test_a_trainer_is_preempted_at_once_but_while_it_trains(trainer, monkeypatch, preempted):
    """Servers may load for longer than SLURM waits, and there is nothing to save; an export may take longer too, and is
    made again. In between it ends by itself, also after its last step.
    """
    monkeypatch.setattr(ray_trainer, "Trackers", lambda *_: contextlib.nullcontext())
    before, found = signal.getsignal(signal.SIGUSR1), []
    trainer.global_steps, trainer.total_training_steps = 0, 1
    trainer.preempted, trainer._saved_step = False, 0
    trainer._load_checkpoint = lambda: None
    trainer._register = lambda _: contextlib.nullcontext()
    trainer.checkpoint_manager = SimpleNamespace(
        update_weights=lambda _: found.append(signal.getsignal(signal.SIGUSR1)), onload_servers=lambda: None
    )
    trainer._save_checkpoint = lambda: found.append(trainer.global_steps)
    trainer.fit_step = lambda: preempted and os.kill(os.getpid(), signal.SIGUSR1)
    try:
        with pytest.raises(Preempted, match="after step 1;") if preempted else contextlib.nullcontext():
            trainer.fit()
        assert preempted or signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [before, *[1] * preempted] and trainer.preempted is preempted, "saved if it was not before"


@pytest.mark.parametrize("last", [False, True])
def test_a_trainer_preempted_waits_for_no_answer(trainer, last, monkeypatch):
    """Nor does it push the weights of its last step: a resumed run does so, and evaluates them."""
    monkeypatch.setattr(ray_trainer, "open_source", lambda *arguments: arguments[-1])
    waits = trainer._register(0)
    trainer.preempted, trainer.total_training_steps = False, POLICY + 2 - last
    assert waits() and trainer._pushes
    trainer.preempted = True
    assert not waits() and not trainer._pushes


def test_a_trainer_preempted_in_a_push_leaves_it_for_no_server(trainer):
    """All may be lost, and come again only with another node; its step is recorded and saved all the same."""
    trainer.preempted, trainer.total_training_steps = False, POLICY + 9

    def wait_for_a_server(_, meanwhile):
        meanwhile()
        trainer.preempted = True
        meanwhile()

    trainer.checkpoint_manager = SimpleNamespace(update_weights=wait_for_a_server, version=POLICY)
    trainer._push_weights()
    assert trainer.metrics["atropos/policy_version"] == POLICY


def test_survivors_fresh_is_what_the_policys_own_version_sampled(trainer):
    for versions, fresh in (([POLICY, POLICY - 1], 1.5), ([POLICY - 1] * 2, None)):
        batch, _ = groups_to_data_proto([a_group(versions, (-0.5, -0.25))], LIMITS)
        trainer._compute_log_probs(batch)
        metrics = trainer._later.pop()()
        assert metrics.get("atropos/logprob_diff/fresh_mean") == fresh
        assert metrics["atropos/logprob_diff/mean"] == pytest.approx(1.625)


def test_survivors_bypassed_rows_without_logprobs_get_policys(trainer):
    trainer.config.algorithm.rollout_correction.bypass_mode = True
    batch, _ = groups_to_data_proto([a_group([POLICY] * 3, (-0.5, -0.75, 1.0))], LIMITS)
    trainer._compute_log_probs(batch)
    assert batch.batch["old_log_probs"][:, 0].tolist() == [-0.5, -0.75, -2.0]


def test_survivors_a_rows_temperature_is_sent_to_the_ranks():
    batch, _ = groups_to_data_proto([a_group([POLICY] * 2)], LIMITS)
    batch.batch["row_temperature"] = torch.tensor([1.0, 0.7])
    sent = _without_padding(batch, calculate_entropy=False)
    assert sent["row_temperature"].tolist() == pytest.approx([1.0, 0.7])


def test_survivors_sequences_are_counted_over_all_ranks(monkeypatch):
    """Of this rank's three rows two are trained on, as of the other's; a padding row counts on neither."""
    told = {}
    monkeypatch.setattr(fsdp_workers, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda counted, group: counted.mul_({"both ranks": 2}[group]))
    monkeypatch.setattr(
        fsdp_workers.TrainingWorker, "train_batch", lambda self, data: told.update(n=tu.get(data, "global_batch_size"))
    )
    worker = fsdp_workers.AtroposTrainingWorker.__new__(fsdp_workers.AtroposTrainingWorker)
    worker.engine = SimpleNamespace(get_data_parallel_group=lambda: "both ranks")
    worker.train_batch(TensorDict({"response_mask": torch.tensor([[1, 1], [0, 1], [0, 0]])}, batch_size=3))
    assert told == {"n": 4}


def test_survivors_a_resumed_record_is_the_checkpoints(tmp_path):
    """Steps after it are trained again, so their lines go; the moments of normalization are those at its step."""
    moments, restored = RunningMoments(), RunningMoments()
    record = RunRecord(tmp_path, {"advantage_moments": moments})
    moments.update(torch.tensor([1.0, 3.0]))
    record.totals.steps = 2
    state = record.state_dict()
    write_lines(record.directory.metrics, [metrics_line(step) for step in range(1, 5)])
    resumed = RunRecord(tmp_path, {"advantage_moments": restored})
    resumed.load_state_dict(state)
    resumed.begin()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert (restored.count, restored.mean, restored.std) == (2, 2.0, 1.0)
