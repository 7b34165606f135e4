"""The gem environment inside of Ray workers, beside progress bars and ``datasets`` in another thread."""

import re
import sys
import threading

import pytest
import ray
from gem.envs.registration import make_vec

from helpers.sglang import make_tiny_model
from recipe.atropos.gem.env import register

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("cluster")]

GSM8K = "recipe.atropos.environments.gsm8k:GSM8kEnv"
EPISODES, SECONDS = 30, 180

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find the folder of the tests


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), seed=0))


class Busy:
    """A thread that goes on reading and changing data sets with progress bars, as loaders in Ray workers do."""

    def __init__(self):
        self.rounds, self.error, self._ended = 0, None, threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self):
        import datasets
        from tqdm.auto import tqdm

        datasets.enable_progress_bars()
        try:
            while not self._ended.is_set():
                rows = datasets.Dataset.from_dict({"x": list(range(2000))})
                rows = rows.map(lambda row: {"y": row["x"] + 1}, desc="map").filter(
                    lambda row: row["y"] % 2, desc="keep"
                )
                assert sum(1 for _ in tqdm(rows, desc="read")) == 1000
                with tqdm(total=10) as bar, tqdm(total=10, position=1) as other:
                    for _ in range(10):
                        bar.update()
                        other.write("a line between the bars")
                self.rounds += 1
        except BaseException as error:
            self.error = repr(error)

    def end(self):
        """How often it was through. Raises what it raised."""
        self._ended.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive() and self.error is None, self.error
        return self.rounds


class Worker:
    """Plays in its process; ``play`` runs in the main thread of a plain actor, in another one of a threaded actor."""

    def play(self, model):
        busy, config = Busy(), {"dataset_name": "synthetic", "train_size": 20}
        arguments = {"tokenizer": model, "config": config, "timeout": 60.0}
        rewards = self._play_vector(arguments)
        while not busy.rounds and busy.error is None and busy.thread.is_alive():
            rewards += self._play_vector(arguments)
        return rewards, busy.end(), threading.current_thread() is threading.main_thread()

    def _play_vector(self, arguments):
        vector, rewards = make_vec([register(GSM8K)] * 6, async_mode=True, **arguments), []
        _, infos = vector.reset()
        for _ in range(EPISODES // 6):
            questions = [info["messages"][-1]["content"] for info in infos]
            _, found, _, _, infos = vector.step([_answer(text, right=i % 2) for i, text in enumerate(questions)])
            rewards += found.tolist()
        for env in vector.envs:
            env.close()
        return rewards


def _answer(question, right):
    """Each environment of a vector has a seed, and so problems, of its own: read from the question."""
    a, b = map(int, re.findall(r"\d+", question))
    return rf"\boxed{{{(a + b if ' more.' in question else a - b) if right else -1}}}"


@pytest.mark.parametrize("threads", [1, 2])
def test_gem_steps_in_ray_workers_beside_datasets_and_bars(model, threads):
    actors = [ray.remote(Worker).options(num_cpus=1, max_concurrency=threads).remote() for _ in range(2)]
    try:
        found = ray.get([actor.play.remote(model) for actor in actors], timeout=SECONDS)
    finally:
        for actor in actors:
            ray.kill(actor)
    for rewards, rounds, main_thread in found:
        assert rounds >= 1 and main_thread == (threads == 1)
        assert rewards == [-1.0, 1.0] * (len(rewards) // 2) and len(rewards) >= EPISODES
