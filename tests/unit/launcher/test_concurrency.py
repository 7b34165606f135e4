"""Enough is in flight for the servers: what the launcher asks environments for, and what these make of it."""

import math
from types import SimpleNamespace

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

from helpers.configs import loaded
from helpers.runs import run_of
from recipe.atropos.adapter.posting import PostingEnv
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.config.derived import groups_in_flight, request_limits
from recipe.atropos.config.env_specs import environment_specs
from recipe.atropos.inference.join_commands import join_settings
from recipe.atropos.launcher.environment_processes import environment_command
from recipe.atropos.launcher.startup import session_command
from recipe.atropos.sources.numbered import DataSourceConfig

BATCH = ["actor_rollout_ref.model.path=m", "data.train_batch_size=128", "actor_rollout_ref.rollout.n=8"]
TWO = "environments={a: {weight: 3.0, group_size: 4}, b: {weight: 1.0, min_batch_allocation: 0.5}}"


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        ([], [256]),  # nothing bounds what is ahead: a batch more
        (["trainer.atropos.max_staleness=0"], [128]),
        (["trainer.atropos.max_staleness=3"], [512]),
        (["environment.group_size=16", "trainer.atropos.max_staleness=0"], [64]),
        ([TWO, "trainer.atropos.max_staleness=0"], [192, 64]),
        (["environment.replicas=3", "trainer.atropos.max_staleness=0"], [43]),  # of each
        (["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"], [8]),  # BaseEnv's own at least
    ],
)
def test_groups_in_flight_follow_from_batch_and_staleness(overrides, groups):
    config = loaded(*BATCH, *overrides)
    assert [groups_in_flight(config, spec) for spec in environment_specs(config).values()] == groups


def test_requests_have_room_and_time_for_long_answers(tmp_path):
    options = [*BATCH, "data.max_response_length=16384", "trainer.atropos.max_staleness=1"]
    config = loaded(*options)
    limits = {"num_max_requests_at_once": 2048, "timeout": 3277}  # 2 x 128 groups of 8; 5 tokens a second
    assert request_limits(config) == limits
    [spec] = environment_specs(config).values()
    command = environment_command(run_of(config, tmp_path, options), spec, "serve", "http://api", "http://gateway")
    assert {f"--openai.{name}={value}" for name, value in limits.items()} <= set(command)
    assert f"--env.worker_timeout={2.0 * 3277}" in command, "half of the wait for a batch"
    sessions = run_of(loaded(*options, "sessions.enabled=true"), tmp_path)
    assert "--timeout=3277" in session_command(sessions, SimpleNamespace(gateway="http://gateway"), "http://api")
    env, openai = join_settings(config, "http://api", "http://gateway")
    assert env["max_num_workers"] == 256 and limits.items() <= openai.items()
    assert DataSourceConfig.from_config(config).longest_wait == ("max_wait_time", 4 * 3277)
    assert config.evaluation.timeout == 2 * 3277
    assert loaded(*options, "evaluation.timeout=9").evaluation.timeout == 9
    short = loaded(*BATCH, "data.train_batch_size=16")
    assert (short.trainer.atropos.max_wait_time, short.evaluation.timeout) == (1232, 616)
    assert request_limits(short) == {}, "atroposlib's own, or the environment's, are enough"


@pytest.mark.parametrize(
    ("preset", "groups"), [("gsm8k", 128), ("golden", 128), ("qwen2.5-0.5b-1gpu", 128), ("qwen2.5-7b-8gpu", 256)]
)
def test_groups_in_flight_of_presets_are_what_staleness_allows(preset, groups):
    config = loaded(f"preset={preset}")
    [spec] = environment_specs(config).values()
    assert "max_num_workers" not in spec.args and groups_in_flight(config, spec) == groups


@pytest.mark.parametrize(
    ("own", "most", "expected"),
    [
        ({}, math.inf, 256),
        ({"max_num_workers": 5}, math.inf, 5),
        ({"max_num_workers_per_node": 3}, math.inf, 3),
        ({}, 9, 9),
        ({"max_num_workers": 5}, 9, 5),
    ],
    ids=["default", "workers", "workers_per_node", "most", "fewer"],
)
def test_groups_in_flight_of_an_environment_may_be_its_own(own, most, expected):
    env = Plain.__new__(Plain)
    env.adapter_settings = AdapterSettings(groups_in_flight=256)
    env.config, env.server, env._most_items = BaseEnvConfig(**own), Servers(), most
    env._set_max_num_workers()
    assert env.max_num_workers == expected


class Plain(PostingEnv):
    async def get_next_item(self): ...

    async def evaluate(self, *args, **kwargs): ...


class Servers:
    servers = [APIServerConfig()]
