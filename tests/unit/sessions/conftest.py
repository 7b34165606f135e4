import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_clients_of_earlier_tests():
    """OpenAI's client that is dropped unclosed closes itself in the loop that runs when it is collected: none of ours."""
    gc.collect()
