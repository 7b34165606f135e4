"""The items of an environment's replicas: each has its own, a resumed one goes on with them. No server."""

import asyncio
import logging

import pytest
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.items import asked
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.flags import UsageError, take_settings
from recipe.atropos.adapter.replicas import checkpoint_name
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.environments.items import ItemsEnv, ItemsEnvConfig
from recipe.atropos.environments.reasoning import ReasoningEnv
from recipe.atropos.errors import ConfigurationError


class NumberedConfig(ItemsEnvConfig):
    size: int = 10


class NumberedEnv(ItemsEnv):
    """Items are numbers."""

    name = "numbered"
    env_config_cls = NumberedConfig

    @staticmethod
    def load(config):
        return [*range(config.size)], [0]

    async def eval_item(self, item):
        return {"correct": True}


class SeededConfig(BaseEnvConfig):
    seed: int | None = 5


class SeededEnv(BaseEnv):
    name = "seeded"
    env_config_cls = SeededConfig

    async def setup(self):
        pass

    async def get_next_item(self):
        pass

    async def evaluate(self, *args, **kwargs):
        pass


class PlainEnv(SeededEnv):
    env_config_cls = BaseEnvConfig


def replica(environment, number, replicas):
    return adapt(environment, settings=AdapterSettings(replica=number, replicas=replicas))


def test_replicas_ask_each_item_once_an_epoch(make_env):
    """Whatever the number of items and of replicas, and always the same ones each."""
    env = make_env(NumberedEnv)

    def epochs(number, replicas, count):
        env.shard, env.position = (number, replicas), 0
        asyncio.run(env.setup())
        size = len(range(number, env.config.size, replicas))
        return [asked(env, size) for _ in range(count)]

    @settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 99))
    def check(size, replicas, seed):
        env.config.size, env.config.seed = size, seed
        replicas = min(size, replicas)
        found = [epochs(number, replicas, 3) for number in range(replicas)]
        for epoch in range(3):
            assert sorted(item for each in found for item in each[epoch]) == [*range(size)]
        assert all(len({frozenset(epoch) for epoch in each}) == 1 for each in found)
        if replicas == 1:
            assert found[0] == [[*env.order(epoch)] for epoch in range(3)], "as ever"

    check()


def test_replicas_of_the_adapter_share_generated_tasks(make_env):
    """Also where the environment has an order of its own. More replicas than items are refused."""
    options = {"task": "chain_sum", "train_size": 20, "eval_size": 2}
    found = [make_env(replica(ReasoningEnv, number, 3), **options) for number in range(3)]
    asking = [{problem["question"] for problem in asked(env, 6)} for env in found]
    assert len(set.union(*asking)) == 18 and all(len(each) == 6 for each in asking)
    with pytest.raises(ConfigurationError, match="replicas=5: there are 4 items"):
        make_env(replica(NumberedEnv, 4, 5), size=4)


class LeveledEnv(NumberedEnv):
    """Only item 0 is of the lowest level."""

    @staticmethod
    def load(config):
        return [{"number": number, "level": min(number, 2)} for number in range(config.size)], [0]


@pytest.mark.timeout(20)
def test_replicas_have_a_curriculum_of_their_own_items(make_env):
    """It begins with the lowest level that they have; one of all items would leave them nothing to ask, for ever."""
    found = [make_env(replica(LeveledEnv, number, 3), curriculum_threshold=0.5) for number in range(3)]
    assert [[item["level"] for item in asked(env, 3)] for env in found] == [[0] * 3, [1] * 3, [2] * 3]


def test_resumed_replica_goes_on_with_its_items(make_env, tmp_path, caplog):
    """From the newest checkpoint up to the trainer's step; of another number of replicas anew, and says so."""

    def start(number, replicas, step):
        env = make_env(replica(NumberedEnv, number, replicas), size=30)
        env.checkpoint_dir, env.curr_step = str(tmp_path), step
        env.wandb_prepend = checkpoint_name("numbered", env.adapter_settings)
        return env

    first, other = start(1, 2, 0), start(0, 2, 0)
    asked(first, 20), asked(other, 3)
    for env, position in ((first, 20), (other, 3)):
        env.save_checkpoint(4, {"extra": position})
    following = asked(first, 40)
    first.save_checkpoint(8)
    resumed = start(1, 2, 7)
    resumed.load_checkpoint()
    assert asked(resumed, 40) == following and resumed.extra == 20 and not caplog.records
    anew = start(1, 3, 7)
    anew.load_checkpoint()
    assert "numbered_1_of_3: none up to step 7, so items begin anew" in caplog.text
    assert asked(anew, 10) == asked(start(1, 3, 0), 10)


def test_environment_without_a_shard_gets_a_seed_or_a_warning(make_env, caplog):
    caplog.set_level(logging.WARNING, "recipe.atropos.adapter.replicas")
    assert [make_env(replica(SeededEnv, number, 3)).config.seed for number in range(3)] == [5, 6, 7]
    said = "replicas=3 of SeededEnv: it has no shard, so each has a seed of its own, and items may be asked by several"
    assert [record.message for record in caplog.records] == [said] * 3
    caplog.clear()
    assert make_env(replica(SeededEnv, 1, 2), seed=None).config.seed is None
    make_env(replica(PlainEnv, 1, 2))
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "it has neither a shard nor a seed, so all may ask the same items"
    ] * 2
    caplog.clear()
    assert make_env(replica(NumberedEnv, 1, 2)).shard == (1, 2)
    assert make_env(adapt(SeededEnv)).config.seed == 5 and not caplog.records


@pytest.mark.parametrize("flags", [["--adapter.replicas=2"], ["--adapter.replica=2", "--adapter.replicas=2"]])
def test_flags_of_a_replica_fit_together(flags):
    with pytest.raises(UsageError, match="--adapter.replicas=2: .* give 0 to 1"):
        take_settings([*flags])
    assert take_settings(["--adapter.replica=1", "--adapter.replicas=2"]).replica == 1
