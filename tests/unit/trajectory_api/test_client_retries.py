"""When the client of the Trajectory API tries again, and when it gives up."""

import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from recipe.atropos.sources.numbered import DataSourceConfig
from recipe.atropos.trajectory_api.client import TrajectoryApiError


class Api:
    """An API that answers the requests for a path with these statuses in turn, the last one from then on."""

    def __init__(self, **statuses):
        self.statuses, self.times = statuses, []

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path}", self._answer)
        self.server = TestServer(app)
        await self.server.start_server()
        self.url = str(self.server.make_url(""))
        return self

    async def __aexit__(self, *_):
        await self.server.close()

    async def _answer(self, request):
        self.times.append(time.monotonic())
        statuses = self.statuses[request.match_info["path"].replace("-", "_")]
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        return web.json_response({"status": "success", "env_id": 3, "detail": "so it is"}, status=status)


async def test_an_api_is_tried_as_often_as_the_configuration_says():
    async with Api(status=[503]) as api:
        async with DataSourceConfig(api.url, retry_attempts=2, retry_delay=1).client() as client:
            with pytest.raises(TrajectoryApiError, match="HTTP 503.*for 1 s; is the Trajectory API up"):
                await client.status()
    assert len(api.times) == 2 and api.times[1] - api.times[0] >= 1
