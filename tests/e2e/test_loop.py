"""The trainer between a real Trajectory API and a real SGLang server; groups are posted by hand."""

import asyncio
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from helpers.export import assert_export_is_what_is_served
from helpers.services import post, running_api
from helpers.sglang import greedy, make_tiny_model, running_sglang, sampled_groups, version_of
from helpers.trainer import (
    CPU_OVERRIDES,
    fit_on,
    model_vocab,
    post_when_registered,
    pushed_weights,
    random_group,
    running,
    trainer_config,
    update,
)
from helpers.waiting import until
from random_models import CHAT_TEMPLATE
from recipe.atropos import ray_trainer
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.process import start_service
from recipe.atropos.verl_ext import worker_group
from recipe.atropos.weight_sync.probe import sample
from recipe.atropos.weight_sync.servers import WeightPushError

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("cluster")]


def make_trainer(model_path, server, api_url, run_dir, *overrides):
    options = ["trainer.atropos.max_wait_time=60", *overrides]
    return running(trainer_config(model_path, run_dir, [server], *options, groups=2, size=4, lr=1e-3, api=api_url))


def make_sharded(model_path, server, folder, strategy, world, *overrides):
    """A trainer of so many ranks, without a Trajectory API."""
    sharding = [f"actor_rollout_ref.actor.strategy={strategy}", f"trainer.n_gpus_per_node={world}"]
    return make_trainer(model_path, server, "http://127.0.0.1:1", folder, *sharding, *overrides)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        pytest.param("fsdp2", 1, marks=pytest.mark.slow),
        ("fsdp2", 2),
        pytest.param("fsdp", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pushed_and_exported_weights_are_the_trainers(model_path, server, tmp_path, strategy, world):
    """Bit for bit on the way; 1e-4 between the engine's and the worker's logprobs of fresh samples (FSDP in fp32).

    An export answers in transformers as the server does, token for token.
    """
    with make_sharded(model_path, server, tmp_path, strategy, world) as trainer:
        trainer.checkpoint_manager.update_weights(100)
        with safe_open(model_path / "model.safetensors", framework="pt") as opened:
            base = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        pushed = pushed_weights(tmp_path, 100)
        assert pushed.keys() == base.keys()
        assert all(torch.equal(pushed[name], base[name]) for name in base), "before any update: the model's own"

        before = greedy(server)
        for version in (101, 102):
            batch, _ = groups_to_data_proto(sampled_groups(server), trainer.limits, trainer.mini_batch_size)
            update(trainer, batch, version)
            assert trainer.metrics["atropos/logprob_diff/max"] < 1e-4, f"samples of version {version - 1}"
            stale = trainer.actor.log_probs(batch)[0]["old_log_probs"]
            gap = (stale - batch.batch["rollout_log_probs"])[batch.batch["response_mask"].bool()].abs().max()
            assert gap > 1e-3, "the update moved the policy away from its samples"
            trainer.checkpoint_manager.update_weights(version)
        assert trainer.checkpoint_manager.version == 102
        assert version_of(server) == "102"
        assert greedy(server) != before
        assert not all(
            torch.equal(a, b) for a, b in zip(pushed_weights(tmp_path, 102).values(), base.values(), strict=True)
        )
        kept = (tmp_path / "weights" / "weight_versions").glob("[!.]*")
        assert [path.name for path in kept] == ["version_102"], "old versions are removed"
        assert_export_is_what_is_served(trainer, server, pushed_weights(tmp_path, 102), tmp_path / "exported")


def samples(server, steps, fresh):
    """Two groups a step: of the first ``fresh`` from its own weights, and those of the last one again and again."""
    for version in range(steps):
        if version < fresh:
            serves(server, version)
            groups = sampled_groups(server)[:2]
        yield from groups


@pytest.fixture(scope="module")
def fitted(model_path, server, tmp_path_factory):
    """A trainer that has trained four steps on fresh samples and two on the last of them; it probes its pushes."""
    folder = tmp_path_factory.mktemp("fitted")
    options = ["trainer.total_training_steps=6", "trainer.atropos.weight_sync.verify=probe"]
    with running_api(folder) as api, make_trainer(model_path, server, api.url, folder / "run", *options) as trainer:
        fit_on(trainer, samples(server, 6, fresh=4))
        yield trainer


def test_engine_and_trainer_agree_on_fresh_samples_alone(fitted):
    """1e-4 in fp32 through the whole loop, API included; what lets them part is the policy's own change."""
    lines = read_metrics(fitted.config.run.dir)
    gaps = [line["atropos/logprob_diff/max"] for line in lines]
    kl = [line["rollout_corr/k3_kl"] for line in lines]
    assert len(gaps) == 6 and max(gaps[:4]) < 1e-4 < 1e-3 < gaps[4], gaps
    assert kl[3:] == sorted(kl[3:]) and kl[5] > 10 * max(kl[:4]), kl


def test_probe_catches_other_weights_and_older_keys(fitted, model_path, server, tmp_path):
    """True pushes pass.

    In both faults the server reports the new version, so a look at the version alone finds nothing."""
    manager, weights = fitted.checkpoint_manager, Path(fitted.config.run.dir, "weights", "weight_versions")
    older, newer = tmp_path / "older", weights / "version_12"
    assert manager.update_weights(11)["weight_sync/probe_gap"] < 1e-4
    shutil.copytree(weights / "version_11", older)
    batch, _ = groups_to_data_proto(sampled_groups(server), fitted.limits, fitted.mini_batch_size)
    update(fitted, batch, step=1)  # large enough to be seen
    assert manager.update_weights(12)["weight_sync/probe_gap"] < 1e-4

    asyncio.run(load(server, older, "13", flush_cache=True))
    with pytest.raises(WeightPushError, match=f"report version 13 but compute with other weights.* on {server}"):
        manager.verify(13, [server])

    asyncio.run(load(server, older, "13", flush_cache=True, resume=True))
    sample([server], manager.fleet, model_vocab(model_path), 1.0)  # its keys are in the cache now
    asyncio.run(load(server, newer, "14", flush_cache=False))
    with pytest.raises(WeightPushError, match="or with keys of older ones"):
        manager.verify(14, [server])
    assert version_of(server) == "14" and manager.version == 12

    manager.update_weights(15)  # a whole push fixes it, and lets the server go on
    assert manager.version == 15 and greedy(server)


async def load(server, folder, version, flush_cache, resume=False):
    """What a push does, one part of it: the server takes the weights of a folder under a version's name."""
    client = SGLangClient(server)
    await client.update_weights_from_disk(folder, version, flush_cache=flush_cache)
    if resume:
        await client.resume()


def fit(model_path, server, run_dir, folder, groups, *overrides):
    """A whole ``fit`` on ``groups``, posted in their order; returns the trainer's last pushed weights.

    ``groups`` may be an iterator that takes its time.
    """
    folder.mkdir()
    with running_api(folder) as api, make_trainer(model_path, server, api.url, run_dir, *overrides) as trainer:
        fit_on(trainer, groups)
    return pushed_weights(run_dir, trainer.total_training_steps), trainer


def a_day_passes_at_each_batch(patch):
    """For the trainer's and the ranks' clocks, between asking for a batch and having it."""
    days, next_batch = [], RayGRPOAtroposTrainer._next_batch
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 86_400 * len(days), time=time.time)

    def late(self):
        days.append(None)
        return next_batch(self)

    patch.setattr(RayGRPOAtroposTrainer, "_next_batch", late)
    patch.setattr(ray_trainer, "time", clock)
    patch.setattr(worker_group, "time", clock)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(model_path, server, tmp_path, monkeypatch):
    """Weights, Adam's moments, statistics: four steps at once, and two with another process going on for two.

    The uninterrupted run waits longer for its batches than ranks may take for a step.
    """
    rng = np.random.default_rng(5)
    groups = [random_group(rng, model_vocab(model_path)) for _ in range(8)]  # two a step
    for group in groups:
        group["scores"] = rng.normal(size=4).tolist()
    options = ["trainer.save_freq=2", "trainer.total_training_steps=4", "trainer.max_actor_ckpt_to_keep=null"]
    options.append("trainer.atropos.advantage_normalization=global")  # its statistics go on too
    with monkeypatch.context() as patch:
        a_day_passes_at_each_batch(patch)
        whole, _ = fit(model_path, server, tmp_path / "whole", tmp_path / "a", groups, *options)
    half = tmp_path / "half"
    fit(model_path, server, half, tmp_path / "b", groups[:4], *options, "trainer.total_training_steps=2")
    # A step that the checkpoint does not hold, and half a line: what a killed trainer leaves.
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "atropos/mean_score": 9}\n{"step": 4, "atro')
    resumed, trainer = fit(model_path, server, half, tmp_path / "c", groups[4:], *options)
    assert whole.keys() == resumed.keys() and len(whole) > 20
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name
    assert [line["step"] for line in read_metrics(half)] == [1, 2, 3, 4]
    assert trainer.record.totals.steps == 4 and trainer.record.totals.sequences_trained == 32
    for i, line in enumerate(read_metrics(half)):
        assert line["atropos/mean_score"] == pytest.approx(np.mean([g["scores"] for g in groups[2 * i : 2 * i + 2]]))
    assert trainer.advantage_moments.count == trainer.record.totals.tokens_trained


KILLED_BEFORE_A_PUSH = """
import os, signal
from recipe.atropos.main import main
from recipe.atropos.ray_trainer import RayGRPOAtroposTrainer

push = RayGRPOAtroposTrainer._push_weights

def push_or_die(self):
    if self.global_steps == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    push(self)

RayGRPOAtroposTrainer._push_weights = push_or_die
main()
"""


@pytest.mark.slow
def test_trainer_killed_before_a_push_leaves_no_wrong_sample(model_path, server, tmp_path):
    """It dies in step 4 with its checkpoint at 2: what version 3 sampled is of a branch that is no more."""
    run = tmp_path / "run"
    options = ["trainer.save_freq=2", "trainer.total_training_steps=4", "data.train_batch_size=2"]
    options += ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.optim.lr=1e-3", f"run.dir={run}"]
    options += ["data.max_prompt_length=64", "data.max_response_length=64"]
    with running_api(tmp_path) as api:
        addresses = [f"inference.urls=[{server}]", f"trainer.atropos.api_url={api.url}"]
        command = [sys.executable, "-c", KILLED_BEFORE_A_PUSH, *CPU_OVERRIDES, *addresses, *options]
        command.append(f"actor_rollout_ref.model.path={model_path}")
        first = start_service("trainer", command, log_path=tmp_path / "trainer.log", cwd=tmp_path)
        try:
            post_when_registered(api.url, stamped(server, range(4)))
            assert first.process.wait(120) == -signal.SIGKILL, first.tail()
        finally:
            first.stop(grace=1)
        assert version_of(server) == "3" and (run / "checkpoints/global_step_2").exists()
        for group in stamped(server, [3]):
            post(f"{api.url}/scored_data", group)

        with make_trainer(model_path, server, api.url, run, *options) as trainer:
            fit_on(trainer, stamped(server, [2, 3]))
    lines = {line["step"]: line for line in read_metrics(run)}
    assert lines[3]["atropos/dropped/future_version"] == 8 and "atropos/dropped/future_version" not in lines[4]
    assert all(lines[step]["atropos/logprob_diff/max"] < 1e-4 for step in (1, 2, 3, 4)), "each by its own weights"
    assert all(lines[step]["atropos/staleness/max"] == 0 for step in (1, 2, 3, 4))
    assert version_of(server) == "4" and trainer.record.totals.dropped == {"future_version": 8}


def serves(server, version):
    """Wait until the server has these weights."""
    until(lambda: version_of(server) == str(version), told=lambda: f"never served version {version}")


def stamped(server, versions):
    """Two groups sampled by each of these versions, as soon as the server has it, with that version on them."""
    for version in versions:
        serves(server, version)
        for group in sampled_groups(server)[:2]:
            known = dict.fromkeys(("policy_version_min", "policy_version_max"), [version] * len(group["tokens"]))
            yield group | {"group_overrides": known}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True, "chat_template": {"default": CHAT_TEMPLATE}, "pad": False}),
        ("qwen3", {"vocab_size": 320, "chat_template": None}),
    ],
)
def test_models_of_other_architectures_train(family, options, tmp_path):
    """benchmarks/models.py tries all of them, by the launcher; every other test trains Qwen2."""
    model = make_tiny_model(tmp_path / "model", 0, family, **options)
    options = ["trainer.total_training_steps=3", "trainer.atropos.weight_sync.verify=probe"]
    with running_sglang(model, max_total_tokens=4096) as (_, server):
        fit(model, server, tmp_path / "run", tmp_path / "api", samples(server, 3, fresh=3), *options)
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 3 and all(line["actor/grad_norm"] > 0 for line in lines)
    for name in ("atropos/logprob_diff/max", "weight_sync/probe_gap"):
        assert max(line[name] for line in lines) < 1e-4, name
