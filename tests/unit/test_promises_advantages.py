"""What Atropos' own environments send for single tokens arrives in the loss: turn-level advantages, a teacher's top-k.

Always with groups of the shape that they send; with the environments themselves where ATROPOS_DIR names a checkout.
"""

import asyncio
import copy
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import orjson
import pytest
import torch
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.adapter_cli import run_adapter
from helpers.boxed_policy import ANSWERS, make_boxed_policy
from helpers.environments import teacher_env
from helpers.environments.teacher_env import Positional, TaughtEnv, TeacherConfig, server_of
from helpers.loss import assert_taught, in_the_loss
from helpers.services import get, post, running_api
from helpers.sglang import call, running_sglang
from helpers.trainer import model_vocab, random_group
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.completion_cache import trained_spans
from recipe.atropos.adapter.teacher import most_likely
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits
from recipe.atropos.demo.small_policy import Recipe, make_small_policy
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.utils.process import start_service

V, BATCH, SIZE = 40, 8, 4


# ---------------------------------------------------------------------- groups of their shape


def turn_level_group(rng):
    """Two turns of each sequence, an advantage for each turn on all of its tokens, 0 on all others."""
    group = random_group(rng, V, turns=2, size=4)
    group["advantages"] = []
    for masks in group["masks"]:
        values = [0.0] * len(masks)
        for start, end in trained_spans(masks):
            values[start:end] = [float(rng.normal())] * (end - start)
        group["advantages"].append(values)
    return group


def test_promises_turn_advantages_reach_the_loss():
    rng = np.random.default_rng(0)
    groups = [turn_level_group(rng) for _ in range(3)]
    found = in_the_loss(groups, V)
    sent = [values for group in groups for values in group["advantages"]]
    for arrived, values in zip(found.advantages, sent, strict=True):
        assert arrived == pytest.approx(values, abs=1e-4)
    scored = [{key: value for key, value in group.items() if key != "advantages"} for group in groups]
    assert in_the_loss(scored, V).advantages != found.advantages, "those of the scores are others"


def asked(group, k, extra):
    """What a teacher answers about each sequence; ``extra``: as vLLM, which adds the token that stands there."""
    generator = torch.Generator().manual_seed(1)
    ids, logprobs = [], []
    for tokens in group["tokens"]:
        full = torch.randn(len(tokens), V, generator=generator).log_softmax(-1)
        tops = [[]] + [full[t].topk(k).indices.tolist() for t in range(1, len(tokens))]
        if extra:
            tops = [[]] + [list(dict.fromkeys([tokens[t], *tops[t]])) for t in range(1, len(tokens))]
        ids.append(tops)
        logprobs.append([full[t][torch.tensor(top, dtype=int)].tolist() for t, top in enumerate(tops)])
    return ids, logprobs


@pytest.mark.parametrize("extra", [False, True], ids=["sglang", "vllm"])
def test_promises_teachers_top_k_reaches_the_loss(extra):
    groups = [random_group(np.random.default_rng(seed), V, turns=2, size=3) for seed in range(2)]
    for group in groups:
        found = [most_likely(*sequence, 4) for sequence in zip(*asked(group, 4, extra), strict=True)]
        group["distill_token_ids"], group["distill_logprobs"] = map(list, zip(*found, strict=True))
        assert {len(top) for ids in group["distill_token_ids"] for top in ids[1:]} == {4}
    assert_taught(groups, in_the_loss(groups, V))
    untaught = [{key: value for key, value in group.items() if "distill" not in key} for group in groups]
    assert not in_the_loss(untaught, V).gradient.any()
    if extra:  # as vLLM's stand
        group = copy.deepcopy(groups[0])
        group["distill_token_ids"], group["distill_logprobs"] = asked(group, 4, extra)
        _, report = groups_to_data_proto([group], RowLimits(100, 100, 0, vocab_size=V))
        assert report.dropped == {"ragged_distillation": 3}


# ---------------------------------------------------------------------- a teacher


def taught(model, url="http://127.0.0.1:1", teacher="default", **config):
    config = {"tokenizer_name": str(model), "group_size": 2, "use_wandb": False, "teacher_enabled": True} | config
    teacher = {"teacher_server_configs": server_of(model, url, api_key="")} if teacher == "default" else {}
    return adapt(TaughtEnv)(config=TeacherConfig(**config), server_configs=[server_of(model, url)], **teacher)


def test_promises_teacher_is_connected_whatever_the_constructor(model_path):
    env = taught(model_path)
    assert isinstance(env.teacher_server.servers[0], SGLangServer) and env.config.teacher_enabled
    assert taught(model_path, teacher=None).teacher_server is None, "as for evaluate"
    assert "TeacherFixes" not in [base.__name__ for base in adapt(Positional).__mro__]


def test_promises_teacher_is_missed_by_process(model_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["env", "process"])
    with pytest.raises(EnvironmentFailure, match="process asks no teacher: give --env.teacher_enabled=false, or serve"):
        taught(model_path, teacher=None)


def test_promises_teacher_that_does_not_answer_is_counted(model_path):
    env = taught(model_path, teacher_answers=False)
    for overrides, expected in (({}, 1), ({"skip_teacher_top_k": True}, 1), ({"teacher_top_k": -1}, 1), ({}, 2)):
        group = {"tokens": [[5, 6]], "group_overrides": overrides}
        assert asyncio.run(env._attach_teacher_distillation(group))["distill_token_ids"] is None
        assert env.report.counts["teacher_missing"] == expected


@pytest.mark.e2e
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


# ---------------------------------------------------------------------- the environments of a checkout


@pytest.mark.parametrize("command", ["serve", "evaluate"])
def test_promises_modules_that_atroposlib_lacks_come_from_the_checkout(tmp_path, command):
    """And of a teacher's flags, which only serve has, evaluate takes no notice."""
    (tmp_path / "atroposlib" / "envs").mkdir(parents=True)
    (tmp_path / "environments").mkdir()
    source = Path(teacher_env.__file__).read_text()
    (tmp_path / "atroposlib" / "envs" / "lacking.py").write_text(source.partition("class TaughtEnv")[0] + FLAGS)
    file = tmp_path / "environments" / "own.py"
    file.write_text(OWN)
    flags = ["--teacher.base_url=http://127.0.0.1:1/v1", "--check"]
    status, output = run_adapter(tmp_path, command, "--env", str(file), *flags)
    assert status == 0, output
    status, output = run_adapter(tmp_path, command, "--env", str(file), "--teacher.base_ur=x", "--check")
    assert status == 2 and "unknown flag --teacher.base_ur" in output


FLAGS = """
class WithFlags(TeacherDistillationEnv):
    @classmethod
    def get_cli_serve_config_cls(cls):
        from atroposlib.utils.cli import get_prefixed_pydantic_model
        class Serve(super().get_cli_serve_config_cls(), get_prefixed_pydantic_model(APIServerConfig, "teacher.")):
            pass
        return Serve
"""
OWN = """
from atroposlib.envs.lacking import Positional, WithFlags
class Own(Positional, WithFlags):
    name = "own"
    @classmethod
    def config_init(cls):
        from atroposlib.envs.base import APIServerConfig
        return cls.env_config_cls(wandb_name="own"), APIServerConfig()
"""


@pytest.fixture(scope="module")
def checkout():
    folder = Path(os.environ.get("ATROPOS_DIR", ""))
    if not (folder / "environments" / "gsm8k_server_teacher_distill.py").is_file():
        pytest.skip("ATROPOS_DIR names no checkout of Atropos")
    return folder.resolve()


def served(folder, target, flags):
    """(groups of two batches, last counts) of an environment run by the adapter with a real API, in ``folder``."""
    report = folder / "report.jsonl"
    with running_api(folder) as api:
        registration = {"wandb_group": "", "wandb_project": "", "batch_size": BATCH, "max_token_len": 3000}
        steps = {"checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 10**6}
        post(f"{api.url}/register", registration | steps)
        get(f"{api.url}/batch")
        flags = {"env.rollout_server_url": api.url, "env.use_wandb": False, "env.group_size": SIZE} | flags
        command = [sys.executable, "-m", "recipe.atropos.utils.env_adapter", "serve", "--env", str(target)]
        service = start_service(
            "env",
            [*command, *(f"--{key}={value}" for key, value in flags.items())],
            log_path=folder / "env.log",
            cwd=folder,
            env={
                "ATROPOS_ENV_REPORT": str(report),
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_CACHE": str(folder / "cached"),  # else another folder of this name may be found there
            },
        )
        try:
            batches, deadline = [], time.monotonic() + 240
            while len(batches) < 2:
                assert service.poll() is None and time.monotonic() < deadline, service.tail(60)
                batches += filter(None, [get(f"{api.url}/batch")["batch"]])
                time.sleep(0.1)
        finally:
            service.stop(grace=10)
    counts = orjson.loads(report.read_bytes().splitlines()[-1])["counts"]
    return [group for batch in batches for group in batch], counts


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_promises_atropos_teacher_environment_reaches_the_loss(checkout, server, tmp_path):
    """The policy is its own teacher: what is sent are the logprobs that it samples with."""
    model = make_boxed_policy(tmp_path / "boxed")
    call(server, lambda client: client.update_weights_from_disk(model, "0"))
    data = tmp_path / "gsm8k" / "main"
    data.mkdir(parents=True)
    for split, size in (("train", 20), ("test", 6)):
        rows = [{"question": f"{split} {i}?", "answer": f"so\n#### {ANSWERS[i % 2]}"} for i in range(size)]
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (data.parent / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
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
    """In seconds: two tool calls by heart, the second right in half of them; the environment writes their JSON anew."""

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


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_promises_atropos_turn_level_environment_reaches_the_loss(checkout, tmp_path, monkeypatch):
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
    model, threads = tmp_path / "policy", torch.get_num_threads()
    torch.set_num_threads(1)
    make_small_policy(model, recipe=Caller(prompts=tuple(prompts)))
    torch.set_num_threads(threads)
    with running_sglang(model) as (_, server):
        flags = {"openai.base_url": f"{server}/v1", "openai.model_name": model, "openai.server_type": "sglang"}
        flags |= {"env.tokenizer_name": model, "env.max_token_length": 1500, "env.max_gen_per_turn": 100}
        flags |= {"env.add_dynamic_few_shot": "false", "env.use_parallel_requests": "false"}
        target = checkout / "environments" / "tool_use_turnlevel_advantage_server.py"
        groups, counts = served(tmp_path, f"{target}:MultiTurnToolUseTurnLevelAdvantageEnv", flags)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert not [name for name in counts if name.startswith("failed") or "not_aligned" in name], counts
    levels = set()
    for group in groups:
        for tokens, masks, values in zip(group["tokens"], group["masks"], group["advantages"], strict=True):
            for number, (start, end) in enumerate(trained_spans(masks)):
                assert len(set(values[start:end])) == 1, "one advantage a turn"
                levels.add((number, values[start] > 0))
                text = tokenizer.decode(tokens[start:end])
                assert "<tool_call>" not in text or '"name": "' in text, "as it was sampled, not as it was rewritten"
    assert {(1, True), (1, False)} <= levels
    rows = [row for group in groups for row in zip(group["masks"], group["advantages"], strict=True)]
    for arrived, (masks, values) in zip(in_the_loss(groups, model_vocab(model)).advantages, rows, strict=True):
        trained = [value if mask != -100 else 0.0 for value, mask in zip(values, masks, strict=True)]
        assert arrived == pytest.approx(trained, abs=1e-3)
