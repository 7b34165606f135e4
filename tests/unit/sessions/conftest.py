import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_clients_of_earlier_tests():
    """A client of OpenAI that is dropped unclosed closes itself in whatever loop runs when it is collected."""
    gc.collect()
