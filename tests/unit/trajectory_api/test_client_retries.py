"""When the clients of the Trajectory API and of ``run-api`` try again, and when they give up."""

import asyncio
import time
from collections import Counter

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from recipe.atropos.adapter import stock_api
from recipe.atropos.adapter.stock_api import StockApi
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


def test_an_api_is_tried_as_often_as_the_configuration_says():
    async def scene():
        async with Api(status=[503]) as api:
            config = DataSourceConfig(api.url, retry_attempts=2, retry_delay=1)
            async with config.client() as client:
                with pytest.raises(TrajectoryApiError, match="HTTP 503.*for 1 s; is the Trajectory API up"):
                    await client.status()
            return api.times

    times = asyncio.run(scene())
    assert len(times) == 2 and times[1] - times[0] >= 1


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(stock_api, "_LONGEST_PAUSE", 0.01)


def with_stock_api(scene, retry_timeout=30.0, **statuses):
    """Return what ``scene(api, client)`` does, and the events that the client counts."""
    counts = Counter()

    async def run():
        async with Api(register_env=[200], **statuses) as api:
            async with StockApi(api.url, retry_timeout, lambda event, n=1: counts.update({event: n})) as client:
                return await scene(api, client)

    return asyncio.run(asyncio.wait_for(run(), 20)), counts


def group():
    return {"tokens": [[1]], "masks": [[1]], "scores": [1.0]}


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ([503] * 4 + [200], ""),
        ([503], "HTTP 503.*is run-api up"),
        ([422], "HTTP 422: so it is$"),
    ],
    ids=["it_recovers", "it_fails", "it_refuses"],
)
def test_a_post_to_run_api_is_tried_five_times(quick, statuses, error):
    async def scene(api, client):
        await client.register_env({})
        api.times.clear()
        if not error:
            await client.post_groups([group()])
        else:
            with pytest.raises(TrajectoryApiError, match=error):
                await client.post_groups([group()])
        return len(api.times)

    tried, _ = with_stock_api(scene, scored_data_list=statuses)
    assert tried == (1 if 422 in statuses else 5)


def test_what_run_api_answers_to_other_requests_is_final(quick):
    async def scene(api, client):
        await client.register_env({})
        api.times.clear()
        with pytest.raises(TrajectoryApiError, match="has lost environment 3"):
            await client.status(3)
        return len(api.times)

    tried, counts = with_stock_api(scene, status_env=[500])
    assert tried == 1 and counts["api_lost"] == 1


def test_run_api_that_is_gone_is_tried_for_the_timeout(quick):
    async def scene(api, client):
        await client.register_env({})
        await api.server.close()
        begun = time.monotonic()
        with pytest.raises(TrajectoryApiError, match="got no answer.*is run-api up") as error:
            await client.info()
        return time.monotonic() - begun, error.value.reason

    (seconds, reason), counts = with_stock_api(scene, retry_timeout=0.3)
    assert 0.3 <= seconds < 5 and reason == "api_unreachable" and counts["api_lost"] == 1


def test_the_wait_for_a_registration_is_not_run_apis_time(quick):
    """A post is kept until the environment is registered again, and tried as long as always from then on."""

    async def scene(api, client):
        posting = asyncio.create_task(client.post_groups([group()]))
        await asyncio.sleep(1.2)
        assert not posting.done() and not api.times
        await client.register_env({})
        await posting
        return len(api.times)

    tried, _ = with_stock_api(scene, retry_timeout=1, scored_data_list=[503, 200])
    assert tried == 3
