"""Which items come, given the scores of those before: difficulty pools and the curriculum. No server."""

import asyncio
import json
from collections import Counter

import pytest
from pydantic import Field

from helpers.items import asked as asked_only
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.algorithm.reward_bridge import parse_bridge
from recipe.atropos.environments.calculator import CalculatorEnvConfig
from recipe.atropos.environments.gsm8k import GSM8kEnv, GSM8kEnvConfig
from recipe.atropos.environments.items import ItemsEnv, ItemsEnvConfig
from recipe.atropos.environments.program import ProgramEnv, ProgramEnvConfig
from recipe.atropos.environments.word_problems import SYNTHETIC_STEPS
from recipe.atropos.errors import ConfigurationError

SCORES = {"always": [1.0, 1.0], "never": [0.0, 0.0], "mixed": [1.0, 0.0]}


class ScoredConfig(ItemsEnvConfig):
    items: list[dict] = Field([])


class ScoredEnv(ItemsEnv):
    """Its items say how their groups are scored, unless all are scored ``now``; sends nothing."""

    name = "scored"
    now = None
    env_config_cls = ScoredConfig

    @staticmethod
    def load(config):
        return config.items, config.items[:1]

    async def eval_item(self, item):
        return {"correct": True}

    async def collect_trajectories(self, item):
        scores = self.now or item.get("scores") or SCORES[item["solved"]]
        rows = {"tokens": [[5, 6]] * len(scores), "masks": [[-100, 6]] * len(scores)}
        return {**rows, "scores": scores, "group_overrides": item.get("overrides")}, []

    async def handle_send_to_api(self, *args, **kwargs):
        pass


def asked(env, count, delay=0):
    """The next items, each rolled out as BaseEnv does, its scores known ``delay`` items later."""

    async def roll_out():
        found, waiting = [], []
        for number in range(count):
            found.append(await env.get_next_item())
            env.running_items[str(number)] = {"item": found[-1], "worker": None}
            waiting.append(str(number))
            while len(waiting) > delay:
                await env.handle_env(waiting.pop(0))
        return found

    return asyncio.run(roll_out())


POOLED = [{"number": number, "solved": solved} for solved in SCORES for number in range(20)]


def test_difficulty_pools_ask_less_what_has_equal_scores(make_env):
    """At a share of 0.25: once in the first epoch, then in a quarter of 80, within four standard deviations."""
    env, epochs = make_env(ScoredEnv, items=POOLED, difficulty_pools=0.25), 81
    counts = Counter()
    while env.position < len(POOLED) * epochs:
        [item] = asked(env, 1)
        counts[item["solved"], item["number"]] += env.position <= len(POOLED) * epochs
    assert [counts["mixed", number] for number in range(20)] == [epochs] * 20
    for solved in ("always", "never"):
        each = [counts[solved, number] - 1 for number in range(20)]
        assert abs(sum(each) / 20 - 20) < 4 * (80 * 0.25 * 0.75 / 20) ** 0.5
        assert min(each) > 0, "nothing is left out for ever"


def test_difficulty_pools_let_go_of_what_is_mixed_again(make_env):
    env = make_env(ScoredEnv, items=POOLED, difficulty_pools=0.25)
    asked(env, 60)
    assert len(env.pool) == 40
    env.now = [1.0, 0.0]
    asked(env, 2000)
    assert env.pool == {}
    asked(env, -env.position % 60)  # to the end of the epoch
    assert {json.dumps(item) for item in asked(env, 60)} == {json.dumps(item) for item in POOLED}


def test_difficulty_pools_are_the_same_with_the_same_scores(make_env, tmp_path):
    """Also after a resumption in the middle of an epoch."""
    make = {"items": POOLED, "difficulty_pools": 0.25, "seed": 3}
    first, again, resumed = (make_env(ScoredEnv, **make) for _ in range(3))
    assert asked(first, 130) == asked(again, 130)
    for env in (again, resumed):
        env.checkpoint_dir, env.wandb_prepend, env.curr_step = str(tmp_path), "scored_0", 7
    again.save_checkpoint(7)
    resumed.load_checkpoint()
    assert asked(first, 200) == asked(resumed, 200)
    other = make_env(ScoredEnv, **make | {"seed": 4})
    assert asked(other, 330) != asked(make_env(ScoredEnv, **make), 330)


def test_difficulty_pools_follow_the_environments_own_scores(make_env):
    """Those of trajectories, before a reward bridge shapes them: equal ones here."""
    bridge = parse_bridge({"length_bounty": {"target": 0, "slope": 0.01, "cap": 0.2}})
    rows = {"overrides": {"trajectory": [0, 1, 0]}, "level": 1}
    items = [rows | {"scores": [0.5, 0.5, 0.5]}, rows | {"scores": [1.0, 0.25, 1.0]}]
    options = {"difficulty_pools": 0.5, "curriculum_threshold": 1.0, "group_size": 2}
    env = make_env(adapt(ScoredEnv, bridge), items=items, **options)
    asked(env, 2)
    assert [*env.pool.values()] == [0.5] and sorted(env.stage_scores) == [0.5, 0.625]


@pytest.mark.parametrize(("size", "follows"), [(2, False), (1, True)])
def test_one_score_that_is_left_of_a_group_says_nothing(make_env, size, follows):
    """Neither that the item is always or never solved, nor that its level is; of groups of one there is no more."""
    items = [{"level": 1, "scores": [1.0]}]
    env = make_env(ScoredEnv, items=items, group_size=size, difficulty_pools=0.5, curriculum_threshold=0.5)
    asked(env, 1)
    assert (bool(env.pool), bool(env.stage_scores)) == (follows, follows)


def curriculum(threshold, scores, **options):
    """An environment with three levels; ``scores[level]`` are its groups'."""
    items = [{"number": n, "level": level, "scores": scores[level]} for level in scores for n in range(10)]
    return {"items": items, "curriculum_threshold": threshold, **options}


def test_curriculum_begins_a_level_when_the_one_before_is_solved(make_env):
    """After 32 groups of a mean of at least the threshold, of the highest level alone."""
    scores = {1: [1.0, 0.75], 2.5: [1.0, 0.5, 0.75], 7: [0.0, 1.0]}
    env = make_env(ScoredEnv, **curriculum(0.75, scores))
    assert {item["level"] for item in asked(env, 32)} == {1} and env.stage == 1
    seen = asked(env, 200)
    second = [item["level"] for item in seen].index(7)
    assert {item["level"] for item in seen[:second]} == {1, 2.5} and env.stage == 2
    assert sum(item["level"] == 2.5 for item in seen[:second]) >= 32, "a mean of exactly the threshold is enough"
    asked(env, -env.position % 30)  # to the end of the epoch
    assert Counter(item["level"] for item in asked(env, 60)) == {1: 20, 2.5: 20, 7: 20}, "the easy ones too"

    env = make_env(ScoredEnv, **curriculum(0.9, scores))
    assert {item["level"] for item in asked(env, 200)} == {1}, "its mean is 0.875"


def test_curriculum_is_resumed_in_its_level(make_env, tmp_path):
    scores = {1: [1.0, 1.0], 2: [1.0, 0.0]}
    env, resumed = (make_env(ScoredEnv, **curriculum(0.8, scores)) for _ in range(2))
    for each in (env, resumed):
        each.checkpoint_dir, each.wandb_prepend, each.curr_step = str(tmp_path), "scored_0", 7
    asked(env, 20)
    env.save_checkpoint(7)
    resumed.load_checkpoint()
    assert asked(resumed, 40) == asked(env, 40) and env.stage == resumed.stage == 1


def test_curriculum_counts_what_difficulty_pools_leave_out(make_env):
    """Half of the level is always solved and hardly comes any more; alone, the other half would never pass."""
    scores = {1: [1.0, 0.4], 2: [1.0, 0.0]}
    options = curriculum(0.8, scores, difficulty_pools=0.01)
    options["items"] += [{"number": 10 + n, "level": 1, "scores": [1.0, 1.0]} for n in range(10)]
    env = make_env(ScoredEnv, **options)
    asked(env, 60)
    assert env.stage == 1


def test_difficulty_pools_hold_what_has_come_back(make_env):
    """Scores that are late change nothing yet, and no item comes twice in an epoch."""
    env = make_env(ScoredEnv, items=POOLED, difficulty_pools=0.25)
    found = asked(env, 60, delay=30)
    assert len({json.dumps(item) for item in found}) == 60
    assert len(env.pool) == sum(item["solved"] != "mixed" for item in found[:30])


def test_items_in_flight_at_a_checkpoint_come_again(make_env, tmp_path):
    """And those of the backlog: each is rolled out once in its epoch. What is no training item is not saved."""
    env, resumed, again, old = (make_env(ScoredEnv, items=POOLED) for _ in range(4))
    for each in (env, resumed, again, old):
        each.checkpoint_dir, each.wandb_prepend, each.curr_step = str(tmp_path), "scored_0", 7
    begun = asked(env, 50, delay=8)
    env.backlog = [begun[41], {"number": 99}]
    env.running_items.pop("42")
    env.save_checkpoint(7)
    resumed.load_checkpoint()
    assert resumed.backlog == [begun[41], *begun[43:]]
    done = [*begun[:41], begun[42], *resumed.backlog, *asked(resumed, 10)]
    assert sorted(map(json.dumps, done)) == sorted(map(json.dumps, POOLED))
    resumed.save_checkpoint(8)
    again.curr_step = 8
    again.load_checkpoint()
    assert again.backlog == resumed.backlog, "of a run that is resumed twice"
    path = tmp_path / "env_checkpoints/scored_0/step-7.json"
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "unfinished"})
    )
    old.load_checkpoint()
    assert old.position == 50 and old.backlog == []


@pytest.mark.parametrize(("train", "test"), [(0, 81), (81, 0)])
def test_a_split_without_items_is_refused_before_the_start(train, test):
    class Few(GSM8kEnv):
        @staticmethod
        def load(config):
            return [{}] * train, [{}] * test

    expected = rf"Few.load\(\) returns {train} items to train on and {test} held-out ones, with .*--env.eval_size=256: "
    with pytest.raises(ConfigurationError, match=expected):
        Few.check_config(GSM8kEnvConfig())


def test_curriculum_needs_levels_and_names_the_item(tmp_path):
    """Before anything starts; of a program's items and of word problems too."""
    items = tmp_path / "items.jsonl"
    items.write_text('{"level": 1}\n{"level": "2"}\n{"level": 3}\n')
    message = r"--env.curriculum_threshold=0.8: item 2 has no number 'level': \{'level': '2'\}; give each item one"
    with pytest.raises(ConfigurationError, match=message):
        program = {"command": "true", "items": str(items), "held_out": str(items)}
        ProgramEnv.check_config(ProgramEnvConfig(**program, curriculum_threshold=0.8))
    with pytest.raises(ConfigurationError, match="item 1 has no number 'level'"):
        GSM8kEnv.check_config(GSM8kEnvConfig(dataset_name="synthetic", train_size=9, curriculum_threshold=0.8))
    GSM8kEnv.check_config(CalculatorEnvConfig(dataset_name=SYNTHETIC_STEPS, train_size=9, curriculum_threshold=0.8))


def test_curriculum_of_word_problems_by_steps_or_given_levels(make_env, tmp_path):
    env = make_env(GSM8kEnv, dataset_name=SYNTHETIC_STEPS, train_size=30, eval_size=5, curriculum_threshold=0.5)
    steps = {item["answer"].count("<<") for item in asked_only(env, 20)}
    assert steps == {2} and env._levels == [2, 3]
    rows = [{"question": f"{n}?", "answer": f"#### {n}", "level": n % 2, "source": "x"} for n in range(10)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = make_env(GSM8kEnv, dataset_name=str(tmp_path), curriculum_threshold=0.5)
    assert {item["level"] for item in asked_only(env, 20)} == {0}
