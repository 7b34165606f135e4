"""verl's real FSDP workers under Ray on a CPU: the reference policy, and how ranks are placed and fail."""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray.util.placement_group import remove_placement_group
from transformers import AutoModelForCausalLM

from helpers.gradients import assert_logprobs, rows_of
from helpers.trainer import compose_config, model_vocab, random_group, running, trainer_config, update
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.verl_ext.worker_group import LimitedWorkerGroup

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_reference_policy_is_the_model_before_any_update(model_path, tmp_path, strategy):
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    options = ["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.rollout_correction.rollout_is=null"]
    values = {"groups": 4, "size": 4, "strategy": strategy, "world": 1, "lr": 1e-2}
    with running(trainer_config(model_path, tmp_path, ["http://127.0.0.1:1"], *options, **values)) as trainer:
        rng, vocab = np.random.default_rng(3), model_vocab(model_path)
        groups = [random_group(rng, vocab, turns=2, size=3, prompt=20) for _ in range(3)]
        for step in (1, 2):
            batch, _ = groups_to_data_proto(groups, trainer.limits, multiple_of=16)
            update(trainer, batch, step)
        rows = rows_of(plain, groups)
        assert_logprobs(rows, batch.batch["ref_log_prob"])
        moved = (batch.batch["old_log_probs"] - batch.batch["ref_log_prob"]).abs() * batch.batch["response_mask"]
        assert (moved[: len(rows)].amax(-1) > 1e-3).all()
        assert trainer.metrics["actor/kl_loss"] > 1e-4


@pytest.mark.parametrize(
    ("options", "elsewhere"),
    [
        ([], []),
        (["trainer.default_local_dir={}/saved"], ["saved"]),
        (["trainer.atropos.weight_sync.transport=disk"], []),  # in run.dir
        (
            ["trainer.atropos.weight_sync.transport=disk", "trainer.atropos.weight_sync.directory={}/weights"],
            ["weights"],
        ),
    ],
)
def test_cluster_check_tries_each_folder_that_nodes_share(cluster, tmp_path, options, elsewhere):
    from recipe.atropos.launcher.cluster_check import check_nodes

    options = ["actor_rollout_ref.model.path=none", f"run.dir={tmp_path}/run", *(o.format(tmp_path) for o in options)]
    found = check_nodes(compose_config(*options), pairs=False)
    assert [each.problem for each in found if each.check == "folder"] == [""] * (1 + len(elsewhere))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted(["run", *elsewhere])
    assert [each.problem for each in found if each.check == "token"] == [""], "this Ray has one"


def test_placement_of_ranks_is_not_waited_for_without_a_limit(cluster, capfd, monkeypatch):
    """Nine of four CPUs: refused after the limit, of which a line tells before, or sooner where no node may join."""
    from recipe.atropos.workers import actor

    monkeypatch.setattr(actor, "_RESERVE_SECONDS", 2.0)
    monkeypatch.setattr(actor, "_QUIET_SECONDS", 1.0)
    for grows, seconds in ((True, 3), (False, 2)):
        told = f"n_gpus_per_node=9: Ray found no room .* within {seconds} s; each rank takes .*free are.*lower them"
        with pytest.raises(ConfigurationError, match=told):
            actor.DevicePool([9], "wide", timeout=3.0, grows=grows)
        assert ("n_gpus_per_node=9 waits at most 3 s for nodes; each rank takes" in capfd.readouterr().out) == grows
    [group] = actor.DevicePool([1], "narrow", timeout=60.0, grows=False).get_placement_groups()
    assert group.bundle_specs == [{"CPU": 1.0}]
    remove_placement_group(group)


def test_placement_of_rank_0_away_from_local_servers_is_refused(cluster, monkeypatch):
    """It pushes to them; refused before the model is loaded."""
    from recipe.atropos.workers import actor

    pool = actor.DevicePool([1], "alone", timeout=60.0, grows=False)
    local, other = ["http://10.0.0.1:30000", "http://127.0.0.1:30001"], ["http://10.0.0.1:30000"]
    pool.check_reach(local)
    node = ray.util.get_node_ip_address()
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    pool.check_reach(other)
    told = f"http://127.0.0.1:30001: the trainer's rank 0, .* is on node {node} .*: set inference.host=10.0.0.1"
    with pytest.raises(ConfigurationError, match=told):
        pool.check_reach(local)
    config = compose_config(
        "actor_rollout_ref.model.path=none", "inference.urls=[http://localhost:1]", "trainer.n_gpus_per_node=1"
    )
    with pytest.raises(ConfigurationError, match="http://localhost:1: the trainer's rank 0"):
        actor.ActorGroup(config)
    for group in pool.pgs:
        remove_placement_group(group)


def test_loss_of_a_rank_is_told_instead_of_what_its_peers_report():
    """It decides whether the trainer is started again."""

    @ray.remote(num_cpus=0)
    class Rank:
        def breaks(self):
            raise RuntimeError("connection closed by peer")

        def dies(self):
            os._exit(1)

    group = SimpleNamespace(limit=60.0, deadline=math.inf)
    with pytest.raises(ray.exceptions.RayActorError):
        LimitedWorkerGroup.wait(group, "update", [Rank.remote().breaks.remote(), Rank.remote().dies.remote()])
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        LimitedWorkerGroup.wait(group, "update", [Rank.remote().breaks.remote() for _ in range(2)])
