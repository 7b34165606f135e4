"""``verl-atropos verify-env`` with a real SGLang server: what it shows is what passed, and what is trained on."""

import asyncio
import re

import orjson
import pytest

from helpers import ROOT
from helpers.adapter_cli import run_adapter
from helpers.sampled import assert_as_sampled
from recipe.atropos.commands.verify_env import verify
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.environments.gsm8k import GSM8kEnv, GSM8kEnvConfig
from recipe.atropos.utils import debug

GSM8K, GUESS = "recipe.atropos.environments.gsm8k:GSM8kEnv", "helpers.environments.guess_env:GuessEnv"
EXAMPLE = ROOT / "examples/my_env.py"


pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def shown(model_path, server, capsys):
    """(exit status, output) of the command."""

    def shown(env, *options):
        status = debug.main(["verify-env", "--env", str(env), "--model", str(model_path), "--url", server, *options])
        return status, re.sub(r"\s+", " ", capsys.readouterr().out)

    return shown


def test_verify_env_shows_a_group_from_messages_to_rows(shown, server):
    """All of its tokens were sampled."""
    options = ["--table", "dataset_name=synthetic", "group_size=3", "max_token_length=250", "max_answer_tokens=12"]
    status, output = shown(GSM8K, f"--url={server}/v1", *options, "ensure_scores_are_not_same=false")
    assert status == 0, output
    assert "system: Solve the problem step by step." in output and "user: " in output
    assert '"max_new_tokens":12' in output and "prompt, " in output and "answer 2, " in output
    assert "scores [-1.0, -1.0, -1.0]" in output and "sent: 1 of 1 groups" in output
    assert "row 2 of group 0: score -1" in output and "│ yes │" in output
    assert "with logprobs, weight versions -1 to -1 (not pushed by a trainer)" in output
    assert "ok: 3 rows with " in output and ", all sampled by the server" in output


@pytest.mark.parametrize(("page", "asked"), [(False, "Repeat this word: "), (True, " + ")], ids=["example", "page"])
def test_the_first_environment_can_be_trained_on(shown, tmp_path, page, asked):
    """The example, and the environment that docs/first-environment.md has as text."""
    [text] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/first-environment.md").read_text(), re.DOTALL)
    target = tmp_path / "sums_env.py" if page else EXAMPLE
    (tmp_path / "sums_env.py").write_text(text)
    options = ["group_size=4", "max_token_length=200", "ensure_scores_are_not_same=false"]
    status, output = shown(target, *options)
    assert status == 0, output
    assert asked in output and "ok: 4 rows with " in output and ", all sampled by the server" in output


def test_what_is_not_sent_is_named(shown):
    options = ["dataset_name=synthetic", "group_size=2", "max_token_length=250", "max_answer_tokens=4"]
    status, output = shown(GSM8K, *options)
    assert status == 1 and "NOT OK: 0 rows with 0 trained tokens" in output and "no row" in output
    assert "made None of the item: no group" in output or "equal_scores" in output


def test_verify_env_shows_each_turn_as_a_call(model_path, server):
    """A call has its messages; a row trains on the answers of all turns."""
    overrides = {"group_size": 2, "ensure_scores_are_not_same": False, "max_tokens": 6}
    result = asyncio.run(verify(GUESS, str(model_path), server, overrides))
    assert result.error is None and result.ok and len(result.rows) == 2
    assert len(result.exchanges) == 8
    plain = asyncio.run(verify(GUESS, str(model_path), server, overrides | {"way": "chat"}))
    for exchanges in (result.exchanges, plain.exchanges):
        assert sorted(len(exchange.messages) for exchange in exchanges) == [2, 2, 4, 4, 6, 6, 8, 8]
    for group in result.posted:
        for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
            trained = [token for token, mask in zip(tokens, masks, strict=True) if mask != -100]
            answers = [token for exchange in result.exchanges for answer in exchange.answers for token in answer.tokens]
            assert set(trained) <= set(answers) and len(trained) <= 4 * 6
    sampled = sum(len(answer.tokens) for exchange in result.exchanges for answer in exchange.answers)
    assert sum(int(row.mask.sum()) for row in result.rows) == sampled
    assert orjson.dumps(result.posted)


def test_verify_env_tells_tokens_that_no_reply_has_and_errors(shown, tmp_path):
    lying = tmp_path / "lying_env.py"
    lying.write_text(
        "from helpers.environments.guess_env import *\n"
        "class LyingEnv(GuessEnv):\n"
        "    async def collect_trajectory(self, item):\n"
        "        found, backlog = await super().collect_trajectory(item)\n"
        "        found['tokens'] += [7, 8]; found['masks'] += [7, 8]\n"
        "        return found, backlog\n"
    )
    options = ["group_size=1", "ensure_scores_are_not_same=false"]
    _, output = shown(f"{lying}:LyingEnv", *options)
    assert "not_sampled" in output, output  # the adapter takes them out, and counts it

    status, output = shown(GUESS, *options, "mood=breaks")
    assert status == 1 and "KeyError: 'in the second turn'" in output and "call 1: " in output


def test_an_environment_that_hangs_is_shown_where_it_waits(shown):
    status, output = shown(GUESS, "--timeout", "1", "mood=hangs")
    assert status == 1 and "not done within --timeout=1 s" in output and "guess_env.py" in output


def test_first_environments_flags_are_checked_as_its_page_says(tmp_path):
    """One that chooses its own items has no difficulty pools."""
    chosen = "recipe.atropos.environments.even_tokens"
    for env, flag in ((EXAMPLE, "answer_tokens=32"), (EXAMPLE, "answer_token=32"), (chosen, "difficulty_pools=0.5")):
        status, output = run_adapter(tmp_path, "serve", "--check", "--env", str(env), f"--env.{flag}")
        right = flag == "answer_tokens=32"
        assert status == (0 if right else 2), output
        assert ("the class is found and its flags are right" if right else "unknown flag --env.") in output, output


async def test_single_turn_runs_without_the_adapter(model_path, server, tmp_path):
    """Without the adapter a group is rolled out and evaluated: the server's tokens, with the model's logprobs."""
    sizes = {"train_size": 8, "eval_size": 3, "max_token_length": 250, "max_answer_tokens": 9, "group_size": 3}
    names = {"dataset_name": "synthetic", "tokenizer_name": str(model_path), "data_dir_to_save_evals": str(tmp_path)}
    _, [handle] = GSM8kEnv.config_init()
    handle.model_name, handle.base_url = str(model_path), f"{server}/v1"
    env = GSM8kEnv(GSM8kEnvConfig(**names, **sizes, use_wandb=False), [handle], slurm=False)
    await env.setup()
    group, backlog = await env.collect_trajectories(await env.get_next_item())
    await env.evaluate()
    assert backlog == [] and group["scores"] == [-1.0] * 3, "the model writes nonsense"
    assert_as_sampled(group, model_path)
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        [(start, end)] = trained_spans(masks)
        assert end == len(tokens) and 1 <= end - start <= 9
    assert env.eval_metrics == [("eval/percent_correct", 0.0), ("eval/total", 3)]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 3
