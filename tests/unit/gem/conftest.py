import pytest
from transformers import AutoTokenizer

from helpers.gem import GUESS
from helpers.sglang import make_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("model"), seed=0))


@pytest.fixture
def make(tokenizer):
    """Environments of this test's own, closed at its end."""
    from recipe.atropos.gem.env import AtroposEnv  # here: gem may be missing

    made = []

    def make(target=GUESS, **arguments):
        config = arguments.pop("config", {}) | {"wandb_name": f"{len(made)}"}  # nothing is shared, unless asked for
        made.append(
            AtroposEnv(target, tokenizer=tokenizer.name_or_path, config=config, **({"timeout": 60.0} | arguments))
        )
        return made[-1]

    yield make
    for env in made:
        env.close()
