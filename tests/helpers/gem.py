"""What runs behind gem environments: their threads, and the tasks of a loop."""

import asyncio
import gc
import threading
import time

from helpers.environments import guess_env

GSM8K = "recipe.atropos.environments.gsm8k:GSM8kEnv"
SUMS = {"dataset_name": "synthetic", "train_size": 20}  # of gsm8k
GUESS, SEEDED = "helpers.environments.guess_env:GuessEnv", "helpers.environments.guess_env:SeededGuessEnv"
FIRST = f"{guess_env.RULES}\n\nBegin."


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "stepped-env"]


def tasks(env):
    """How many the loop has, without the one that counts."""
    loop = env.unwrapped._environment._thread.loop
    return asyncio.run_coroutine_threadsafe(count_tasks(), loop).result(10)


async def count_tasks():
    return len(asyncio.all_tasks()) - 1


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return found
