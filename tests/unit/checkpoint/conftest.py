"""A run whose checkpoints are exported."""

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GenerationConfig

from helpers.export import alone, configuration, saved_run, trained  # noqa: F401
from helpers.families import make_family


@pytest.fixture(scope="module")
def make_model(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = make_family(tmp_path_factory.mktemp("export") / family, family)
            GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=2).save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="module")
def small_run(tmp_path_factory, make_model, alone):  # noqa: F811
    """Three checkpoints of a Qwen2, sharded by FSDP2, and the engine of the last."""
    engines = [trained(make_model("qwen2")) for _ in range(3)]
    for engine in engines:
        fully_shard(engine.module, mesh=init_device_mesh("cpu", (1,)))
    options = ["data.train_batch_size=5", "inference.api_key=s3cret", "environment.target=/home/me/my_env.py:Mine"]
    run = saved_run(tmp_path_factory.mktemp("run") / "small", configuration(make_model("qwen2"), *options), *engines)
    return run, engines[-1]
