"""A weight transport is one file: configuration, checks and pushes find it by its name."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file

import helpers.pigeon_transport  # noqa: F401  (registers it)
from helpers.sglang import make_tiny_model
from helpers.stub_sglang import stub_servers
from helpers.trainer import compose_config
from helpers.transports import engine, weights_of
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import ConfigurationError

MODEL = [
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
]
PIGEON = "trainer.atropos.weight_sync.transport=pigeon"


def test_a_new_transport_pushes_a_models_weights(tmp_path):
    model = make_tiny_model(tmp_path / "model", 0)
    weights = dict(weights_of(model))

    async def run():
        async with stub_servers(2) as servers:
            pusher = engine([server.url for server in servers], "pigeon", tmp_path)
            metrics = await pusher.send_weights(weights_of(model), 7, pusher.urls)
            assert [(server.version, server.paused) for server in servers] == [("7", False)] * 2
            return metrics

    assert asyncio.run(run())["weight_sync/bytes"] == sum(tensor.nbytes for tensor in weights.values())
    arrived = load_file(tmp_path / "weights" / "pigeon" / "model.safetensors")
    assert arrived.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in arrived.items())


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([PIGEON], None),
        ([PIGEON, "inference.colocated=true"], "transport=pigeon: set it to auto"),
        (["trainer.atropos.weight_sync.transport=dove"], "transport=dove; choose one of auto, disk, distributed, "),
    ],
    ids=["known", "refused", "unknown"],
)
def test_a_new_transport_is_known_by_its_file_and_checks(overrides, told):
    config = compose_config(*MODEL, *overrides)
    if told is None:
        check_config(config)
        return
    with pytest.raises(ConfigurationError, match=told):
        check_config(config)
