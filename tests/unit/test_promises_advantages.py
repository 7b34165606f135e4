"""What Atropos' own environments send for single tokens arrives in the loss: turn-level advantages, a teacher's top-k.

With groups of the shape that they send; test_promises_teachers has the environments themselves.
"""

import asyncio
import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from atroposlib.envs.server_handling.sglang_server import SGLangServer

from helpers.adapter_cli import run_adapter
from helpers.environments import teacher_env
from helpers.environments.teacher_env import Positional
from helpers.loss import assert_taught, in_the_loss
from helpers.taught import taught
from helpers.trainer import random_group
from recipe.atropos.adapter.cli import adapt
from recipe.atropos.adapter.teacher import most_likely
from recipe.atropos.data.data_proto import groups_to_data_proto
from recipe.atropos.data.rows import RowLimits, trained_spans
from recipe.atropos.errors import EnvironmentFailure

V = 40


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
        _, report = groups_to_data_proto([group], RowLimits(200, 0, vocab_size=V))
        assert report.dropped == {"ragged_distillation": 3}


# ---------------------------------------------------------------------- a teacher


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


# ---------------------------------------------------------------------- the environments of a checkout


def test_promises_modules_come_from_the_checkout(tmp_path):
    """They are those that atroposlib lacks. Of a teacher's flags, which only serve has, evaluate takes no notice."""
    (tmp_path / "atroposlib" / "envs").mkdir(parents=True)
    (tmp_path / "environments").mkdir()
    source = Path(teacher_env.__file__).read_text()
    (tmp_path / "atroposlib" / "envs" / "lacking.py").write_text(source.partition("class TaughtEnv")[0] + FLAGS)
    file = tmp_path / "environments" / "own.py"
    file.write_text(OWN)
    for command, flag, expected in (
        ("serve", "--teacher.base_url=http://127.0.0.1:1/v1", 0),
        ("evaluate", "--teacher.base_url=http://127.0.0.1:1/v1", 0),
        ("evaluate", "--teacher.base_ur=x", 2),
    ):
        status, output = run_adapter(tmp_path, command, "--env", str(file), flag, "--check")
        assert status == expected and ("unknown flag --teacher.base_ur" in output) == (status == 2), output


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
