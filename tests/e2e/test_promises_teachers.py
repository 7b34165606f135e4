"""What Atropos' own environments send for single tokens arrives in the loss, from real servers.

The environments themselves run where ATROPOS_DIR names a checkout.
"""

import asyncio
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.boxed_policy import make_boxed_policy
from helpers.gsm8k_checkout import write_hub_data
from helpers.launchers import environment_process
from helpers.loss import assert_taught, in_the_loss
from helpers.services import get
from helpers.sglang import call, running_sglang
from helpers.taught import taught
from helpers.trainer import model_vocab
from helpers.trajectory_api import running_trajectory_api
from helpers.waiting import until
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.demo.small_policy import Recipe, make_small_policy

BATCH, SIZE = 8, 4


def test_promises_sglang_teacher_answers_with_its_top_k(server, model_path):
    env = taught(model_path, server, teacher_top_k=3, max_token_length=200)
    env.running_items["x"] = {"item": "go"}
    asyncio.run(env.handle_env("x"))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for tokens, ids, logprobs in zip(
        *(env.sent[key] for key in ("tokens", "distill_token_ids", "distill_logprobs")), strict=True
    ):
        with torch.no_grad():
            top = model(torch.tensor([tokens])).logits[0].log_softmax(-1).topk(3)
        assert ids[0] == logprobs[0] == [] and len(ids) == len(logprobs) == len(tokens)
        assert ids[1:] == top.indices[:-1].tolist()
        np.testing.assert_allclose(logprobs[1:], top.values[:-1], atol=1e-3)
    assert_taught([env.sent], in_the_loss([env.sent], model_vocab(model_path)))


@pytest.fixture(scope="module")
def checkout():
    folder = Path(os.environ.get("ATROPOS_DIR", ""))
    if not (folder / "environments" / "gsm8k_server_teacher_distill.py").is_file():
        pytest.skip("ATROPOS_DIR names no checkout of Atropos")
    return folder.resolve()


def served(folder, target, flags):
    """(groups of two batches, last counts) of an environment run by the adapter with a real API, in ``folder``."""
    report = folder / "report.jsonl"
    with running_trajectory_api(folder) as api:
        api.register(batch_size=BATCH, max_token_len=3000)
        assert api.batch() is None
        own = {"env": target, "env.rollout_server_url": api.url, "env.use_wandb": False, "env.group_size": SIZE}
        # HF_DATASETS_CACHE: else another folder of this name may be found there
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cached")}
        command, flags = ["-m", "recipe.atropos.utils.env_adapter"], own | {"adapter.report": report} | flags
        with environment_process(folder, *command, flags=flags, **offline) as service:
            batches = [until(lambda: get(f"{api.url}/batch")["batch"], 240, service) for _ in range(2)]
    counts = orjson.loads(report.read_bytes().splitlines()[-1])["counts"]
    return [group for batch in batches for group in batch], counts


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_promises_atropos_teacher_environment_reaches_the_loss(checkout, server, tmp_path):
    """The policy is its own teacher: what is sent are the logprobs that it samples with."""
    model = make_boxed_policy(tmp_path / "boxed")
    call(server, lambda client: client.update_weights_from_disk(model, "0"))
    write_hub_data(tmp_path / "gsm8k")
    of_both = {"base_url": f"{server}/v1", "model_name": model, "server_type": "sglang"}
    flags = {f"{of}.{key}": value for of in ("openai", "teacher") for key, value in of_both.items()}
    flags |= {"env.tokenizer_name": model, "env.max_token_length": 1200, "teacher.tokenizer_name": model}
    groups, counts = served(
        tmp_path, checkout / "environments" / "gsm8k_server_teacher_distill.py", flags | {"env.teacher_top_k": 3}
    )
    assert "teacher_missing" not in counts and not [name for name in counts if name.startswith("failed")], counts
    for group in groups:
        for row, masks in enumerate(group["masks"]):
            for t, mask in enumerate(masks):
                if mask != -100:
                    top = dict(zip(group["distill_token_ids"][row][t], group["distill_logprobs"][row][t], strict=True))
                    assert len(top) == 3 and top[mask] == pytest.approx(group["inference_logprobs"][row][t], abs=1e-3)
    assert_taught(groups, in_the_loss(groups, model_vocab(model)))


CITIES = ("Rome", "Oslo")


@dataclass(frozen=True)
class Caller(Recipe):
    """In seconds: tool calls by heart, many of them wrong; the environment writes their JSON anew."""

    name: ClassVar[str] = "caller"

    hidden_size: int = 64
    steps: int = 250
    vocabulary: int = 1024
    batch_size: int = 8
    learning_rate: float = 5e-3
    prompts: tuple = ()

    def chats(self, seed, rng):
        chats = []
        for first, second, rest in self.prompts:
            for right in (True, False) * 30:
                answers = [called("weather", first), called("time", second if right else "Bern"), SUMMARY]
                chats.append(
                    [*rest[0], assistant(answers[0]), *rest[1], assistant(answers[1]), *rest[2], assistant(answers[2])]
                )
        return chats


SUMMARY = "<think>\ndone\n</think>\nIt is warm."


def assistant(content):
    return {"role": "assistant", "content": content}


def called(tool, city, spaces=True):
    call = json.dumps({"name": tool, "arguments": {"city": city}}, separators=(", ", ": ") if spaces else (",", ":"))
    return f"<think>\nso\n</think>\n<tool_call>\n{call}\n</tool_call>"


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_promises_turn_level_environment_reaches_the_loss(checkout, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.chdir(tmp_path)
    import environments.tool_use_turnlevel_advantage_server as upstream

    rows, prompts = [], []
    for city, other in itertools.permutations(CITIES):
        said = [("system", "Call."), ("human", city), ("gpt", called("weather", city)), ("tool", "warm")]
        said += [("gpt", called("time", other)), ("tool", "noon"), ("gpt", SUMMARY)]
        rows += [{"conversations": [{"from": name, "value": value} for name, value in said]}] * 30
        before = [
            {"role": "system", "content": f"Call.\n\n{upstream.DEFAULT_FEW_SHOT_EXAMPLE}"},
            {"role": "user", "content": city},
        ]
        tools = [
            [{"role": "tool", "content": f"{text}\n\n{helper}"}]
            for text, helper in (
                ("warm", upstream.DEFAULT_CONTINUATION_HELPER),
                ("noon", upstream.DEFAULT_NARRATION_HELPER),
            )
        ]
        prompts.append((city, other, [before, *tools]))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "hermes_reasoning_tool_use_fixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = tmp_path / "policy"
    make_small_policy(model, recipe=Caller(prompts=tuple(prompts)))
    with running_sglang(model) as (_, server):
        flags = {"openai.base_url": f"{server}/v1", "openai.model_name": model, "openai.server_type": "sglang"}
        flags |= {"env.tokenizer_name": model, "env.max_token_length": 1500, "env.max_gen_per_turn": 100}
        flags |= {"env.add_dynamic_few_shot": "false", "env.use_parallel_requests": "false"}
        target = checkout / "environments" / "tool_use_turnlevel_advantage_server.py"
        groups, counts = served(tmp_path, f"{target}:MultiTurnToolUseTurnLevelAdvantageEnv", flags)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert not [name for name in counts if name.startswith("failed") or "not_aligned" in name], counts
    turns, signs = set(), set()
    for group in groups:
        for tokens, masks, values in zip(group["tokens"], group["masks"], group["advantages"], strict=True):
            for start, end in trained_spans(masks):
                assert len(set(values[start:end])) == 1, "one advantage a turn"
                signs.add(values[start] > 0)
                turns.add(tokenizer.decode(tokens[:start]).count("<|im_start|>assistant"))
                text = tokenizer.decode(tokens[start:end])
                assert "<tool_call>" not in text or '"name": "' in text, "as it was sampled, not as it was rewritten"
    assert signs == {True, False} and max(turns) > 1, "of several turns, and of different worth"
    rows = [row for group in groups for row in zip(group["masks"], group["advantages"], strict=True)]
    for arrived, (masks, values) in zip(in_the_loss(groups, model_vocab(model)).advantages, rows, strict=True):
        trained = [value if mask != -100 else 0.0 for value, mask in zip(values, masks, strict=True)]
        assert arrived == pytest.approx(trained, abs=1e-3)
