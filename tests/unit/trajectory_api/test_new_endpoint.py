"""A new endpoint of the Trajectory API is one function, which clients use at once."""

from typing import Annotated

import msgspec
import pytest
from aiohttp.test_utils import RawTestServer

from helpers.trajectory_service import join, registration
from recipe.atropos.trajectory_api import delivery
from recipe.atropos.trajectory_api.app import Api
from recipe.atropos.trajectory_api.client import TrajectoryApiClient, TrajectoryApiError
from recipe.atropos.trajectory_api.endpoints import ENDPOINTS, Int, endpoint
from recipe.atropos.utils.secret import environments_key

SECRET = "s3cret"


@pytest.fixture
def rename_env():
    """An endpoint for trainers, which gives an environment another name."""

    @endpoint("POST", "/rename-env", for_trainers=True)
    async def rename_env(service, env_id: Int, name: Annotated[str, msgspec.Meta(min_length=1)]) -> dict[str, str]:
        environment = service.environments.get(env_id)
        before, environment.name = environment.name, name
        return {"before": before}

    yield
    del ENDPOINTS["POST", "/rename-env"]


async def test_a_new_endpoint_is_one_function(service, rename_env):
    await delivery.register(service, registration(8, after=0))
    env_id = await join(service)
    async with RawTestServer(Api(service, SECRET).handle, auto_decompress=False) as server:
        url = str(server.make_url(""))
        async with TrajectoryApiClient(url, SECRET, retry_timeout=0) as client:
            message = {"env_id": env_id, "name": "other"}
            assert await client.call("POST", "/rename-env", message) == {"before": "env_0"}
            for wrong, status in (({"env_id": 3, "name": "x"}, 404), ({"env_id": env_id, "name": ""}, 422)):
                with pytest.raises(TrajectoryApiError, match="env_id=3|rename_env: .*name") as refused:
                    await client.call("POST", "/rename-env", wrong)
                assert refused.value.status == status
        async with TrajectoryApiClient(url, environments_key(SECRET), retry_timeout=0) as environment:
            with pytest.raises(TrajectoryApiError, match="takes the trainer's key"):
                await environment.call("POST", "/rename-env", message)
    assert service.environments.by_id[env_id].name == "other"
