"""The names of a mixture of experts, pushed to a real server."""

# ruff: noqa: F811  (a fixture that is imported)

import pytest

from helpers.families import make_model  # noqa: F401
from helpers.sglang import call, running_sglang
from helpers.trainer import model_vocab, running, trainer_config
from recipe.atropos.weight_sync.probe import probe_servers
from recipe.atropos.weight_sync.servers import WeightPushError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def served(make_model):
    """URL of a server of a Mixtral."""
    model = make_model("mixtral")
    with running_sglang(model, max_total_tokens=2048, log_path=model.parent / "server.log") as (_, url):
        yield url


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("transport", "strategy"), [("distributed", "fsdp2"), ("tensor", "fsdp")])
def test_names_of_moe_models_are_served(make_model, served, tmp_path, transport, strategy):
    """A server of other weights has the trainer's logprobs after a push, from ranks that hold shards."""
    model, first = (make_model("mixtral", seed) for seed in (1, 0))  # another push may have changed them
    call(served, lambda client: client.update_weights_from_disk(first, "default"))
    options = {"strategy": strategy, "world": 2, "transport": transport}
    with running(trainer_config(model, tmp_path, [served], **options)) as trainer:
        options = {"fleet": trainer.checkpoint_manager.fleet, "vocab_size": model_vocab(model)}
        options |= {"dtype": "float32", "temperature": 1.0, "compute": trainer._log_probs_of}
        with pytest.raises(WeightPushError, match="compute with other weights"):
            probe_servers(0, [served], **options)
        trainer.checkpoint_manager.update_weights(1)
        assert probe_servers(1, [served], **options)["weight_sync/probe_gap"] < 1e-4
