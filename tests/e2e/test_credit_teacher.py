"""``environment.credit.teacher``: a real server judges each sampled token, with more in its prompt or without."""

import asyncio
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.environments.teacher_env import Positional, TeacherConfig, server_of
from helpers.loss import in_the_loss
from helpers.sglang import call
from helpers.trainer import model_vocab
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.credit.group import CreditError
from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.utils.process import free_port


class SentEnv(Positional):
    """Two answers of at most 8 tokens to the item; what is sent stays."""

    async def _send_scored_data_to_api(self, scored_data):
        self.sent = scored_data


def solution(item):
    return f"The answer to {item} is 4.\n"


def nothing(item):
    return None


HINT = f"{__name__}:solution"


def sent(model, server, credit, item="go"):
    """(what is sent of one item, counts)"""
    settings = AdapterSettings(credit=json.dumps(credit))
    config = TeacherConfig(tokenizer_name=str(model), group_size=2, use_wandb=False)
    env = adapt(SentEnv, settings=settings)(config=config, server_configs=[server_of(model, server)], slurm=False)

    async def handle():
        groups, _ = await env.collect_trajectories(item)
        await env.handle_send_to_api(groups, item)

    asyncio.run(handle())
    return env.sent, env.report.counts


def judged(model, group, hint):
    """log of the teacher's probability over the policy's, (N, T), by transformers."""
    found, policy = [], AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = AutoTokenizer.from_pretrained(model).encode(hint, add_special_tokens=False)
    rows = zip(*(group[key] for key in ("tokens", "masks", "inference_logprobs")), strict=True)
    for tokens, masks, own in rows:
        with torch.no_grad():
            logprobs = policy(torch.tensor([before + tokens])).logits[0].log_softmax(-1)
        teacher = [logprobs[len(before) + t - 1, token].item() for t, token in enumerate(tokens)]
        found.append(np.where(np.array(masks) != -100, np.array(teacher) - own, 0.0))
    return found


@pytest.mark.parametrize(
    ("teacher", "hint"),
    [({"hint": HINT}, solution("go")), ({"base_url": ..., "api_key_env": "TEACHERS_KEY", "scale": 0.5}, "")],
    ids=["hint", "served"],
)
def test_credit_of_a_teacher_is_the_reverse_kl_of_each_token(model_path, server, teacher, hint, monkeypatch):
    monkeypatch.setenv("TEACHERS_KEY", "of nobody's interest")
    teacher = {name: server if value is ... else value for name, value in teacher.items()}
    group, counts = sent(model_path, server, {"teacher": teacher, "mix": 0.25})
    grpo = np.array([1.0, -1.0]) / np.sqrt(2)
    for row, kl, masks, outcome in zip(
        group["advantages"], judged(model_path, group, hint), group["masks"], grpo, strict=True
    ):
        outcomes = 0.25 * outcome * (np.array(masks) != -100)
        np.testing.assert_allclose(row, 0.75 * teacher.get("scale", 1.0) * kl + outcomes, atol=2e-3)
    assert bool(hint) == any(np.abs(kl).max() > 0.05 for kl in judged(model_path, group, hint)), (
        "the same, or told more"
    )
    assert group["group_overrides"]["credit"] == f"mix=0.25 teacher={teacher}" and not counts["teacher_missing"]
    arrived = in_the_loss([group], model_vocab(model_path)).advantages
    for row, values in zip(arrived, group["advantages"], strict=True):
        assert row == pytest.approx(values, abs=1e-4)


def test_credit_of_a_teacher_that_does_not_answer_is_counted(model_path, server):
    group, counts = sent(model_path, server, {"teacher": {"base_url": f"http://127.0.0.1:{free_port()}"}})
    assert counts["teacher_missing"] == 1 and counts["groups_sent"] == 0 and not group.get("advantages")
    assert "credit" not in group["group_overrides"] and group["scores"] == [1.0, 0.0]


def test_credit_of_a_teacher_that_refuses_is_an_error(model_path, server):
    """As one with another key, or at another path: no later group would get an answer."""
    with pytest.raises(InferenceError, match="HTTP 404"):
        sent(model_path, server, {"teacher": {"base_url": f"{server}/elsewhere"}})


@pytest.mark.parametrize(
    ("teacher", "told"),
    [
        ({"hint": f"{__name__}:nothing"}, "environment.credit.teacher=.*nothing"),
        ({"hint": f"{__name__}:no_such"}, "environment.credit.teacher.hint=.*no_such"),
        ({"base_url": ..., "api_key_env": "NOT_SET_HERE"}, "KeyError.*NOT_SET_HERE"),
    ],
)
def test_credit_of_a_teacher_names_what_is_wrong(model_path, server, teacher, told):
    teacher = {name: server if value is ... else value for name, value in teacher.items()}
    with pytest.raises(ConfigurationError, match=told):
        sent(model_path, server, {"teacher": teacher})


def test_credit_of_a_teacher_needs_temperature_and_tokenizer(model_path, server, monkeypatch):
    monkeypatch.setenv("ATROPOS_TEMPERATURE", "0.5")
    with pytest.raises(CreditError, match=r"judges at temperature 1, the policy sampled at \[0.5\]"):
        sent(model_path, server, {"teacher": {"hint": HINT}})
    monkeypatch.delenv("ATROPOS_TEMPERATURE")

    async def other(self, text):
        return [1, 2]

    monkeypatch.setattr(SGLangClient, "tokenize", other)
    with pytest.raises(CreditError, match="not the policy's tokenizer"):
        sent(model_path, server, {"teacher": {"base_url": server}})


def test_credit_of_a_teacher_is_at_temperature_1_always(server):
    """What ``rollout.temperature`` is refused for: the day that SGLang scales a prompt's logprobs, this fails."""

    def logprobs(temperature):
        params = {"max_new_tokens": 1, "temperature": temperature}
        ask = {"input_ids": [5, 6, 7, 8], "sampling_params": params, "logprob_start_len": 0}
        reply = call(server, lambda client: client.generate(**ask))
        return [value for value, *_ in reply["meta_info"]["input_token_logprobs"][1:]]

    assert logprobs(0.25) == pytest.approx(logprobs(1.0), abs=1e-5)
