"""verl's real FSDP workers under Ray on a CPU: every trained token's logprob, and how ranks are placed and fail."""

import math
import os
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.util.placement_group import remove_placement_group
from transformers import AutoModelForCausalLM

from helpers.trainer import compose_config, model_vocab, random_group, running, trainer_config, update
from recipe.atropos.data.data_proto import groups_to_data_proto, rows_to_data_proto
from recipe.atropos.data.reading import read_groups
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.verl_ext.worker_group import LimitedWorkerGroup, RankTimeout

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]


def of_strategy(model_path, folder, strategy, world, *overrides):
    options = ["algorithm.rollout_correction.rollout_is=null", *overrides]  # the engine logprobs here are random
    values = {"groups": 4, "size": 4, "strategy": strategy, "world": world}
    return running(trainer_config(model_path, folder, ["http://127.0.0.1:1"], *options, **values))


@pytest.fixture(
    scope="module",
    params=[("fsdp2", 2), *(pytest.param(p, marks=pytest.mark.slow) for p in [("fsdp2", 1), ("fsdp", 1), ("fsdp", 2)])],
    ids=lambda p: f"{p[0]}-world{p[1]}",
)
def trainer(request, model_path, tmp_path_factory):
    strategy, world = request.param
    with of_strategy(model_path, tmp_path_factory.mktemp("run"), strategy, world) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def plain(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def token_logprobs(model, row):
    """(R_i,) logprobs of a row's response tokens by plain transformers, one unpadded sequence at a time."""
    ids = torch.from_numpy(np.concatenate([row.prompt, row.response]))[None]
    logprobs = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    start = len(row.prompt)
    return logprobs[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]]


def assert_logprobs(found, plain, rows):
    """``found``, (B, R), has the logprobs of the rows' trained tokens by plain transformers."""
    for values, row in zip(found[: len(rows)], rows, strict=True):
        mask = torch.from_numpy(row.mask)
        with torch.no_grad():
            torch.testing.assert_close(
                values[: len(row.response)][mask], token_logprobs(plain, row)[mask], atol=1e-4, rtol=0
            )


def a_batch(trainer, model_path, turns, seed):
    rng = np.random.default_rng(seed)
    return [random_group(rng, model_vocab(model_path), turns=turns, size=3, prompt=20) for _ in range(3)]


def test_a_rank_that_hangs_is_named_after_the_limit_and_goes_on(trainer, monkeypatch):
    pids = ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in trainer.actor.workers])
    monkeypatch.setattr(trainer.actor, "limit", 2.0)
    last = psutil.Process(pids[-1])
    last.suspend()
    try:
        with pytest.raises(
            RankTimeout, match=rf"empty_cache: no answer of rank {len(pids) - 1} of {len(pids)} within 2 s"
        ):
            trainer.actor.empty_cache()
    finally:
        last.resume()
    monkeypatch.setattr(trainer.actor, "limit", 60.0)
    trainer.actor.empty_cache()


@pytest.mark.parametrize("turns", [1, 3], ids=["single_turn", "multi_turn"])
def test_worker_logprobs_are_those_of_transformers(trainer, plain, model_path, turns):
    """Every trained token is compared."""
    rows, _ = read_groups(a_batch(trainer, model_path, turns, seed=turns), trainer.limits)
    assert len({len(row.prompt) for row in rows}) > 3, "left padding of several widths"
    batch = rows_to_data_proto(rows, trainer.limits, multiple_of=16)
    batch.meta_info["temperature"] = 1.0
    result, _ = trainer.actor.log_probs(batch)
    assert_logprobs(result["old_log_probs"], plain, rows)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_reference_policy_is_the_model_before_any_update(model_path, plain, tmp_path, strategy):
    options = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.optim.lr=1e-2"]
    with of_strategy(model_path, tmp_path, strategy, 1, *options) as trainer:
        groups = a_batch(trainer, model_path, turns=2, seed=3)
        rows, _ = read_groups(groups, trainer.limits)
        for step in (1, 2):
            batch, _ = groups_to_data_proto(groups, trainer.limits, multiple_of=16)
            update(trainer, batch, step)
        assert_logprobs(batch.batch["ref_log_prob"], plain, rows)
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


def test_placement_of_ranks_is_not_waited_for_without_a_limit(cluster, capfd):
    """Nine of four CPUs: refused after the limit, of which a line tells before, or 10 s where no node may join."""
    from recipe.atropos.workers.actor import DevicePool

    for grows, seconds in ((True, 11), (False, 10)):
        told = f"n_gpus_per_node=9: Ray found no room .* within {seconds} s; each rank takes .*free are.*lower them"
        with pytest.raises(ConfigurationError, match=told):
            DevicePool([9], "wide", timeout=11.0, grows=grows)
        assert ("n_gpus_per_node=9 waits at most 11 s for nodes; each rank takes" in capfd.readouterr().out) == grows
    [group] = DevicePool([1], "narrow", timeout=60.0, grows=False).get_placement_groups()
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
