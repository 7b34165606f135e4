"""The names of a mixture of experts, pushed to a real server."""

# ruff: noqa: F811  (a fixture that is imported)

import contextlib

import pytest

from helpers.families import make_model  # noqa: F401
from helpers.sglang import call, running_sglang
from helpers.trainer import close, compose_config, model_vocab, started
from recipe.atropos.utils.process import unstopped
from recipe.atropos.weight_sync.probe import probe_servers
from recipe.atropos.weight_sync.servers import WeightPushError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def family_server(make_model):
    """URL of a real server of a family."""
    with contextlib.ExitStack() as stack:
        running = {}

        def start(family):
            if family not in running:
                log_path = make_model(family).parent / f"{family}.log"
                options = {"max_total_tokens": 2048, "log_path": log_path}
                service, running[family] = stack.enter_context(running_sglang(make_model(family), **options))
                unstopped.remove(service)  # it is not of the test that asked for it first
            return running[family]

        yield start


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("family", "strategy", "world"), [("mixtral", "fsdp2", 2), ("mixtral", "fsdp", 1)])
def test_names_of_moe_models_are_served(make_model, family_server, tmp_path, family, strategy, world):
    """A server of other weights has the trainer's logprobs after a push, from ranks that hold shards."""
    model, server = make_model(family, seed=1), family_server(family)
    first = make_model(family)  # another push may have changed them
    call(server, lambda client: client.update_weights_from_disk(first, "default"))
    config = compose_config(
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.actor.strategy={strategy}",
        f"trainer.n_gpus_per_node={world}",
        "trainer.atropos.weight_sync.transport=tensor",
        f"inference.urls=[{server}]",
        f"run.dir={tmp_path}",
    )
    trainer = started(config)
    try:
        options = {"fleet": trainer.checkpoint_manager.fleet, "vocab_size": model_vocab(model)}
        options |= {"dtype": "float32", "temperature": 1.0, "compute": trainer._log_probs_of}
        with pytest.raises(WeightPushError, match="compute with other weights"):
            probe_servers(0, [server], **options)
        trainer.checkpoint_manager.update_weights(1)
        assert probe_servers(1, [server], **options)["weight_sync/probe_gap"] < 1e-4
    finally:
        close(trainer)
