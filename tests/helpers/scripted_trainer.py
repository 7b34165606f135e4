"""A trainer that does not train: it takes batches, and says which ones are in its weights."""

import asyncio

from helpers.services import get, post


class ScriptedTrainer:
    """Registers at once, with weights that contain the batches through ``after``."""

    def __init__(self, api, batch_size, max_staleness=None, after=0, max_token_len=100):
        self.api, self.after = api, after
        registration = {"wandb_group": "", "wandb_project": "", "batch_size": batch_size, "checkpoint_dir": ""}
        registration |= {"max_token_len": max_token_len, "save_checkpoint_interval": -1, "starting_step": 0}
        registration |= {"num_steps": 9, "after": after, "max_staleness": max_staleness}
        self.epoch = post(f"{api}/register", registration)["epoch"]

    def groups(self):
        """The groups of the next batch, None if there is none."""
        groups = get(f"{self.api}/batch?after={self.after}")["batch"]
        self.after += groups is not None
        return groups

    def batch(self):
        """The numbers that the groups of the next batch tell by their first scores, None if there is none."""
        groups = self.groups()
        return groups and [int(group["scores"][0]) for group in groups]

    async def next_batch(self, manager, within=30):
        """The same, once there is one; ``manager`` is the environment's, which must not end meanwhile."""
        async with asyncio.timeout(within):
            while (numbers := await asyncio.to_thread(self.batch)) is None:
                assert not manager.done(), manager.exception()
                await asyncio.sleep(0.05)
        return numbers

    def push(self):
        """Say that the servers have weights that contain all batches taken."""
        post(f"{self.api}/weights", {"through": self.after}, {"Atropos-Epoch": str(self.epoch)})

    def counts(self, kind):
        """What the API has counted of ``kind``, by reason."""
        counts = get(f"{self.api}/diagnose")["counts"]
        return {name.partition("/")[2]: n for name, n in counts.items() if name.startswith(f"{kind}/")}
