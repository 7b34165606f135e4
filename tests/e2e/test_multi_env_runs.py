"""Several environments that run: what becomes of the others when one dies."""

import asyncio
import os
import signal

import orjson
import psutil
import pytest

from helpers.environments import item_env
from helpers.interpreter import make_interpreter, write_environment
from helpers.launchers import launched
from helpers.runs import run_of
from helpers.services import get, group, post
from helpers.trainer import compose_config
from helpers.trajectory_api import running_trajectory_api
from helpers.waiting import until
from recipe.atropos.launcher.environment_processes import EnvironmentProcesses
from recipe.atropos.run.evaluations import read_evaluations
from recipe.atropos.run.record import read_metrics
from recipe.atropos.utils.files import LineReader
from recipe.atropos.utils.process import ServiceFailed

ITEM_ENV = f"{item_env.__file__}:ItemEnv"


def end(service):
    os.kill(service.pid, signal.SIGKILL)
    service.process.wait(10)


class Stage:
    """Two environments under the launcher's care, and the API; nobody samples."""

    def __init__(self, folder, model, api, *options):
        each = [
            f"environments.{name}.{key}" for name in "ab" for key in (f"target={ITEM_ENV}", "min_batch_allocation=0.5")
        ]
        sizes = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2"]
        settings = compose_config(f"actor_rollout_ref.model.path={model}", *each, *options, *sizes)
        self.api, self.run = api, run_of(settings, folder)
        self.environments = EnvironmentProcesses(self.run, api, "http://127.0.0.1:1")

    async def until(self, condition, seconds=60):
        async with asyncio.timeout(seconds):
            while not condition():
                await self.environments.poll()
                self.run.check()
                await asyncio.sleep(0.1)

    def service(self, name):
        return self.run.services[f"environment-{name}"]

    def registrations(self, name):
        return [
            line["registered"]
            for line in LineReader(self.run.files.path / f"environments/{name}.jsonl").new_lines()
            if "registered" in line
        ]

    def shares(self, *numbers):
        """Of a batch: what is allocated, and of the rest what the weight gives."""
        found = []
        for number in numbers:
            status = get(f"{self.api}/status-env", {"env_id": number})
            found.append(0.5 + status["unallocated_fraction"] * status["env_weight"])
        return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_of_an_environment_that_is_killed_nothing_is_waited_for(tmp_path, model_path):
    """First it is started again, then given up; each time its part of the batch is the other's."""

    async def scene(stage):
        stage.environments.start()
        await stage.until(lambda: stage.registrations("a") and stage.registrations("b"))
        [a], [b] = stage.registrations("a"), stage.registrations("b")
        assert stage.shares(a, b) == [0.5, 0.5]
        for number in range(2):
            post(f"{stage.api}/scored_data", group(number, size=2) | {"env_id": a})
        await stage.until(lambda: get(f"{stage.api}/batch")["batch"] is not None)  # b's allocation is not waited for
        first = stage.service("b")
        end(first)
        await stage.until(lambda: len(stage.registrations("b")) == 2)
        assert stage.service("b").pid != first.pid
        _, b = stage.registrations("b")
        assert stage.shares(a, b) == [0.5, 0.5]
        end(stage.service("b"))
        await stage.until(lambda: stage.shares(a) == [1.0])
        for number in range(2):
            post(f"{stage.api}/scored_data", group(number, size=2) | {"env_id": a})
        await stage.until(lambda: get(f"{stage.api}/batch")["batch"] is not None)  # after a's own tickets
        assert list(stage.run.services) == ["environment-a"]
        summary = stage.environments.summary()
        assert (summary["b"]["restarts"], summary["b"]["abandoned"], summary["a"]["abandoned"]) == (1, True, False)
        end(stage.service("a"))
        with pytest.raises(ServiceFailed, match="environment-a: ended once more after 0 restarts"):
            await stage.until(lambda: False, 10)

    with running_trajectory_api(tmp_path) as api:
        api.register(batch_size=4, max_token_len=2048)
        assert get(f"{api.url}/batch")["batch"] is None
        stage = Stage(tmp_path, model_path, api.url, "environments.a.max_restarts=0", "environments.b.max_restarts=1")
        try:
            asyncio.run(scene(stage))
        finally:
            stage.run.stop()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_environments_train_on_when_one_is_killed_for_good(tmp_path, model_path):
    """Both are evaluated before the training, after update 3 and at the end, each time all of it on one version."""
    folder = tmp_path / "run"
    each = {"target": ITEM_ENV, "min_batch_allocation": 0.5, "max_restarts": 0}
    options = [f"environments.{name}.{key}={value}" for name in "ab" for key, value in each.items()]
    options += ["environments.b.args.says=attribute", "evaluation.every=3", "--steps=5", "trainer.save_freq=-1"]
    with launched(folder, model_path, *options) as launcher:
        # it may join after a
        until(lambda: any(line.get("atropos/b/groups") for line in read_metrics(folder)), 240, launcher)
        psutil.Process(orjson.loads((folder / "services.json").read_bytes())["environment-b"]["pid"]).kill()
        assert launcher.process.wait(200) == 0, launcher.tail(40)
        assert "left running" not in launcher.tail()
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    both = [[line.get(f"atropos/{name}/groups", 0) for name in "ab"] for line in lines]  # each may join after the other
    assert all(sum(groups) == 16 for groups in both)
    assert lines[-1]["atropos/num_environments"] == 1 and "atropos/b/groups" not in lines[-1]
    output = launcher.log_path.read_text()
    assert "(a +0.500, b +0.500)" in output
    assert "environment-b ended once more after 0 restarts (environments.b.max_restarts), abandoned" in output

    found = read_evaluations(folder)
    assert sorted((entry["version"], entry["env"]) for entry in found) == [(v, e) for v in (0, 3, 5) for e in "ab"]
    assert all(entry["metrics"]["eval/total"] == 4 for entry in found), "none failed, none met two versions"
    waited = [line["step"] for line in lines if line["phase_s/evaluate"]]
    assert waited == [1, 4], "for the evaluation of the version that its push replaces"
    samples = [LineReader(folder / f"evaluation/{v}/a/samples.jsonl").new_lines() for v in (0, 3, 5)]
    assert [[sample["item"] for sample in each] for each in samples] == [[0, 1, 2, 3]] * 3, "the same items"
    summary = orjson.loads((folder / "summary.json").read_bytes())
    assert summary["environments"]["b"]["abandoned"] and not summary["environments"]["a"]["abandoned"]
    assert summary["heldout"]["a"]["version_after"] == 5 and summary["policy_version"] == 5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_own_interpreter_of_an_environment_trains_and_evaluates(tmp_path, model_path):
    """Beside one in the trainer's; neither could run in the other's."""
    python, target = make_interpreter(tmp_path / "venv"), write_environment(tmp_path / "own.py")
    targets = [f"environments.a.target={ITEM_ENV}", f"environments.b.target={target}"]
    options = [*targets, f"environments.b.python={python}", "--steps=2", "trainer.save_freq=-1"]
    folder = tmp_path / "run"
    with launched(folder, model_path, *options) as launcher:
        assert launcher.process.wait(300) == 0, launcher.tail(40)
    assert all(line["atropos/b/groups"] > 0 for line in read_metrics(folder))
    assert sorted((entry["version"], entry["env"]) for entry in read_evaluations(folder)) == [
        (version, name) for version in (0, 2) for name in "ab"
    ]
