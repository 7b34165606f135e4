"""The reward bridge in front of a real BaseEnv, and on the way from a real SGLang to a real API."""

import asyncio
import math
import re
import sys
import time
from pathlib import Path

import orjson
import pytest
import yaml
from transformers import AutoTokenizer

from helpers.environments import guess_env
from helpers.environments.answer_env import BARE, ITEMS, RIGHT, AnswerEnv, AnswerEnvConfig
from helpers.services import get, post, running_api
from helpers.sglang import make_tiny_model
from recipe.atropos.adapter import reward_bridge
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.reward_bridge import (
    RewardBridgeError,
    parse_bridge,
)
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.utils.process import start_service

BLOCK = {
    "format_markers": [{"pattern": "<think>", "weight": 0.1}],
    "answer_present": {"pattern": r"\\boxed\{(.*?)\}", "regex": True, "weight": 0.4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), seed=0))


def composed(bridge=None):
    """What ``adapt`` makes, without the step that sends only what a server sampled: none samples these answers."""
    return type("Composed", (adapt(AnswerEnv, bridge),), {"_restore": lambda self, group: None})


def make(folder, environment=AnswerEnv, **options):
    """An environment that writes what it would send into ``sent.jsonl`` of its working folder."""
    config = AnswerEnvConfig(tokenizer_name=folder, group_size=4, use_wandb=False, wandb_name="answers", **options)
    servers = [server.model_copy(update={"model_name": folder}) for server in AnswerEnv.config_init()[1]]
    env = environment(config, servers)
    asyncio.run(env.setup())
    return env


def written(env):
    """The groups that would have been sent since the last call."""
    env.jsonl_writer._fp.flush()
    with Path(env.config.data_path_to_save_groups).open("rb") as file:
        file.seek(getattr(env, "seen", 0))
        lines = file.readlines()
        env.seen = file.tell()
    return [orjson.loads(line) for line in lines]


def send(env, *items):
    """(item, group) of those that would be sent; each item goes all the way from its answers to the API's door."""

    async def through(item):
        group, _ = await env.collect_trajectories(item)
        if group is not None:
            await env.handle_send_to_api(group, item, do_send_to_api=False)
        return [(item, group) for group in written(env)]

    return [pair for item in items for pair in asyncio.run(through(item))]


def shaped_env(folder, tmp_path, block=BLOCK, **options):
    options = {"data_path_to_save_groups": str(tmp_path / "sent.jsonl")} | options
    return make(folder, composed(parse_bridge(block)), **options)


def test_shaped_scores_are_sent_and_the_raw_ones_stay_beside_them(folder, tmp_path):
    env = shaped_env(folder, tmp_path)
    [(_, group)] = send(env, ITEMS[0])
    assert group["scores"] == [1.5, 0.4, 0.0, 0.0]
    assert group["group_overrides"]["raw_scores"] == [1.0, 0.0, 0.0, 0.0]
    metrics = env.report.metrics()
    assert metrics["env/score/raw"] == 0.25 and metrics["env/score/shaped"] == pytest.approx(1.9 / 4)
    assert metrics["env/shaping/marker_0"] == 0.025 and metrics["env/shaping/answer_present"] == pytest.approx(0.2)
    assert metrics["env/shaping/weight"] == 1 and "env/shaping/rank_inversions" not in metrics


def test_a_group_of_equal_raw_scores_that_the_environment_dropped_is_sent_if_the_shaped_ones_differ(folder, tmp_path):
    env = shaped_env(folder, tmp_path)
    assert [(item, group["scores"]) for item, group in send(env, *ITEMS)] == [
        (ITEMS[0], [1.5, 0.4, 0.0, 0.0]),
        (ITEMS[1], [0.4, 0.0, 0.0, 0.0]),
    ]
    assert env.report.counts["shaping/recovered"] == env.report.counts["shaping/equal_raw"] == 2

    env = shaped_env(folder, tmp_path, BLOCK | {"send_equal_raw": False})
    assert [item for item, _ in send(env, *ITEMS)] == [ITEMS[0]]


def test_without_equal_raw_groups_those_that_an_environment_does_not_drop_itself_are_refused_and_counted(
    folder, tmp_path
):
    env = shaped_env(folder, tmp_path, BLOCK | {"send_equal_raw": False})
    group = {"tokens": [[5, 6]] * 4, "masks": [[-100, 6]] * 4, "scores": [1] * 4}
    asyncio.run(env.handle_send_to_api(group, do_send_to_api=False))
    assert env.report.counts["not_sent/equal_scores"] == 1
    env.config.ensure_scores_are_not_same = False
    asyncio.run(env.handle_send_to_api(group, do_send_to_api=False))
    assert env.report.counts["not_sent/equal_scores"] == 1, "an environment that wants them sent has its way"


def test_an_environment_without_the_bridge_beside_one_with_it_still_drops_its_groups(folder, tmp_path):
    shaped_env(folder, tmp_path)
    plain = make(folder, composed(), data_path_to_save_groups=str(tmp_path / "plain.jsonl"))
    sent = send(plain, *ITEMS)
    assert [group["scores"] for _, group in sent] == [[1.0, 0.0, 0.0, 0.0]]
    assert "raw_scores" not in (sent[0][1].get("group_overrides") or {})


def test_judged_is_what_the_policy_said_in_all_its_turns_without_special_tokens(folder, tmp_path):
    """The environment's turn has the marker; the policy's second one has half of it at its end."""
    block = {
        "format_markers": [{"pattern": "abc", "weight": 0.25, "count": "each"}],
        "length_bounty": {"target": 0, "slope": 0.01, "cap": 0.2},
        "clip": [0, 0.75],
    }
    env = shaped_env(folder, tmp_path, block)
    encode, end = env.tokenizer.encode, env.tokenizer.eos_token_id
    turns = [("abc?", False), ("abc", True), ("abc", False), ("ab", True), ("abc", False), ("c", True)]
    tokens, masks = [], []
    for text, trained in turns:
        ids = encode(text) + [end]
        tokens += ids
        masks += ids if trained else [-100] * len(ids)
    split = encode("ab") + [end] + encode("c")  # a special token inside: the text is without it
    group = {
        "tokens": [tokens, encode("p") + split, encode("p") + encode("ab\nc"), encode("p") + encode("x")],
        "masks": [masks, [-100] + split, [-100] + encode("ab\nc"), [-100] + encode("x")],
        "scores": [0.0] * 4,
        "group_overrides": None,
    }
    asyncio.run(env.handle_send_to_api(group, do_send_to_api=False))
    [sent] = written(env)
    assert sent["scores"] == pytest.approx([0.25 + 0.09, 0.25 + 0.04, 0.04, 0.01])


def test_the_shaping_follows_the_trainers_step_until_only_raw_scores_are_left(folder, tmp_path):
    env = shaped_env(folder, tmp_path, BLOCK | {"fade": {"from_step": 10, "to_step": 20}})
    expected = {10: [1.5, 0.4, 0, 0], 15: [1.25, 0.2, 0, 0], 20: [1.0, 0.0, 0.0, 0.0]}
    for env.curr_step, scores in expected.items():
        sent = send(env, *ITEMS)
        assert sent[0][1]["scores"] == pytest.approx(scores)
        assert len(sent) == (2 if env.curr_step < 20 else 1), "faded, equal raw scores are equal"
    assert sent[0][1]["scores"] == [1.0, 0.0, 0.0, 0.0]


def test_groups_in_which_shaping_put_a_lower_score_level_with_a_higher_are_counted(folder, tmp_path):
    env = shaped_env(folder, tmp_path)
    group = env.score(ITEMS[0])
    group["scores"] = [0.0, 0.0, 0.3, 0.0]  # an environment with steps between right and wrong
    asyncio.run(env.handle_send_to_api(group, do_send_to_api=False))
    assert env.report.counts["shaping/rank_inversions"] == 1


def test_advantages_of_the_environments_own_end_it_with_a_message(folder, tmp_path):
    env = shaped_env(folder, tmp_path, own_advantages=True)
    message = "environment answers sends advantages of its own.*reward_bridge has no effect there; leave it out"
    with pytest.raises(RewardBridgeError, match=message):
        send(env, ITEMS[0])

    async def work():  # BaseEnv logs the first and goes on
        await asyncio.sleep(60)

    env.setup = work
    with pytest.raises(EnvironmentFailure, match=message):
        asyncio.run(env.env_manager())


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
def test_a_score_that_is_no_number_is_not_shaped_into_one(folder, tmp_path, score):
    env = shaped_env(folder, tmp_path)
    group = env.score(ITEMS[0])
    group["scores"][1] = score
    asyncio.run(env.handle_send_to_api([group, None, env.score(ITEMS[0])], do_send_to_api=False))
    assert len(written(env)) == 1, "the other group of the item"
    assert sum(env.report.counts[f"not_sent/{reason}"] for reason in ("nan_score", "nonfinite_score")) == 1


def test_a_regular_expression_that_would_never_end_costs_its_group_and_is_counted(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(reward_bridge, "_MATCH_SECONDS", 0.1)
    env = shaped_env(folder, tmp_path, {"answer_present": {"pattern": "(a|aa|b?a)+$", "regex": True, "weight": 0.1}})
    began = time.monotonic()
    assert send(env, [RIGHT, "a" * 200 + "c", BARE, BARE]) == []
    assert env.report.counts["not_sent/marker_timeout"] == 1 and time.monotonic() - began < 5
    assert len(send(env, [RIGHT, "aaa", BARE, BARE])) == 1


def test_a_literal_that_the_judged_text_cannot_hold_is_refused(folder, tmp_path):
    with pytest.raises(RewardBridgeError, match=r"pattern '<\|im_end\|>' can never match"):
        shaped_env(folder, tmp_path, {"format_markers": [{"pattern": "<|im_end|>", "weight": 0.1}]})


def test_evaluation_is_the_same_with_and_without_the_bridge(folder, tmp_path):
    results = []
    for name in ("plain", "shaped"):
        environment = adapt(AnswerEnv, parse_bridge(BLOCK) if name == "shaped" else None)
        env = make(folder, environment, data_dir_to_save_evals=str(tmp_path / name))
        asyncio.run(env.evaluate())
        metrics = orjson.loads((tmp_path / name / "metrics.json").read_bytes())["results"]["all"]
        results.append((metrics, (tmp_path / name / "samples.jsonl").read_bytes()))
        assert not env.report.metrics()
    assert results[0] == results[1] and results[0][0] == {"eval/accuracy": 0.25}


# ---------------------------------------------------------------------- the whole way


WIDE = {"format_markers": [{"pattern": "[a-m]", "regex": True, "weight": 0.1, "count": "each"}], "clip": [0, 0.9]}


def serve(model_path, server, tmp_path, api_url, mood):
    """An environment whose guesses are all wrong, -1, which drops such a group itself."""
    (tmp_path / "bridge.yaml").write_text(yaml.safe_dump({"reward_bridge": WIDE}))
    program = guess_env.__file__
    command = [sys.executable, "-m", "recipe.atropos.utils.env_adapter", "serve", "--env", f"{program}:GuessEnv"]
    command += ["--reward-bridge", str(tmp_path / "bridge.yaml"), "--env.group_size=4", "--env.use_wandb=false"]
    command += [
        "--slurm=false",
        f"--env.rollout_server_url={api_url}",
        f"--env.tokenizer_name={model_path}",
        f"--env.mood={mood}",
    ]
    command += [f"--openai.model_name={model_path}", f"--openai.base_url={server}/v1", "--openai.api_key=x"]
    command += [f"--adapter.report={tmp_path / 'report.jsonl'}"]
    return start_service("environment", command, log_path=tmp_path / "environment.log")


def register(api_url):
    settings = {"wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 2048, "checkpoint_dir": ""}
    post(f"{api_url}/register", settings | {"save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 10})


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_groups_that_the_environment_drops_reach_the_api_shaped_with_their_raw_scores(model_path, server, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    with running_api(tmp_path) as api:
        register(api.url)
        environment = serve(model_path, server, tmp_path, api.url, "drops equal")
        try:
            batch, deadline = None, time.monotonic() + 90
            while batch is None:
                assert environment.poll() is None and time.monotonic() < deadline, environment.tail(40)
                batch = get(f"{api.url}/batch")["batch"]
                time.sleep(0.2)
        finally:
            environment.stop()
    assert len(batch) == 2
    for group in batch:
        assert group["group_overrides"]["raw_scores"] == [-1.0] * 4
        for score, masks in zip(group["scores"], group["masks"], strict=True):
            said = tokenizer.decode([mask for mask in masks if mask != -100], skip_special_tokens=True)
            assert score == pytest.approx(-1 + min(0.1 * len(re.findall("[a-m]", said)), 0.9))
    last = orjson.loads((tmp_path / "report.jsonl").read_bytes().splitlines()[-1])
    assert last["counts"]["shaping/recovered"] >= 2 and last["means"]["score/shaped"] > last["means"]["score/raw"] == -1


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_bridge_that_cannot_act_ends_the_environment_with_a_message(model_path, server, tmp_path):
    with running_api(tmp_path) as api:
        register(api.url)
        environment = serve(model_path, server, tmp_path, api.url, "own advantages")
        try:
            deadline = time.monotonic() + 90
            while environment.poll() is None:
                assert time.monotonic() < deadline, environment.tail(40)
                assert get(f"{api.url}/batch")["batch"] is None  # asked once, the API lets environments in
                time.sleep(0.2)
            assert environment.poll() != 0
        finally:
            environment.stop()
    assert "environment guess sends advantages of its own for each token" in environment.tail(40)
