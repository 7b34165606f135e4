"""An environment with everything that the adapter adds: ``AdaptedEnv`` in front of its class, ``PostingEnv`` behind.

A scored group passes, in ``handle_send_to_api`` and ``_send_scored_data_to_api``:

    validate -> shape -> restore and stamp -> check -> the environment's own -> wait for its turn -> post

- In front stands what acts on what an environment makes.
- Behind it, in the place of ``BaseEnv``, stands what it inherits, fixed: its own methods, and their ``super()``, count.
- A group that is left out on the way is counted by its reason, ``not_sent/REASON``.
"""

import logging
import os
from typing import Any

from atroposlib.envs.base import BaseEnv

from recipe.atropos.adapter.completion_cache import ITEM, Item
from recipe.atropos.adapter.evaluate_metrics import Evaluating
from recipe.atropos.adapter.flags import CommandLine
from recipe.atropos.adapter.lifecycle import Lifecycle
from recipe.atropos.adapter.pacing import Paced
from recipe.atropos.adapter.reporting import EnvReport
from recipe.atropos.adapter.reward_bridge import RewardBridge
from recipe.atropos.adapter.sampled import chat_templates_give_lists, collect_each, restore_group
from recipe.atropos.adapter.sampled_calls import record_all_calls, sglang_servers
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.adapter.shaping import check_literals, dropped_by_environment, record_groups, recorded, shape
from recipe.atropos.adapter.teacher import TeacherFixes
from recipe.atropos.adapter.validate import Refused, as_groups, check_limits, validated

logger = logging.getLogger(__name__)


class AdaptedEnv(CommandLine, Lifecycle, Evaluating):
    """Mixin; must precede a ``BaseEnv`` in the MRO, and have ``PostingEnv`` behind it: see ``adapt``."""

    reward_bridge: RewardBridge | None = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        chat_templates_give_lists()
        self.report = EnvReport(config.wandb_name or self.name or type(self).__name__, self.adapter_settings.report)
        self._failure: Exception | None = None  # ends the environment
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # BaseEnv's
        if not sglang_servers(self.server):
            logger.warning("%s: none of its servers is of type sglang, so nothing can be trained on", self.report.name)
        self._calls = record_all_calls(self.server, self.tokenizer, self.report.count)
        if self.reward_bridge is not None:
            check_literals(self.reward_bridge, self.tokenizer)
            if self.reward_bridge.send_equal_raw:
                record_groups()

    # ------------------------------------------------------------------ what comes in

    async def get_server_info(self) -> None:
        await super().get_server_info()
        self.report.add_line({"pid": os.getpid(), "registered": self.env_id})

    async def get_next_item(self) -> Any:
        item = await super().get_next_item()
        if item is None:  # BaseEnv asks again, for ever, and says nothing
            if not self.report.counts["no_item"]:
                logger.error("%s: get_next_item() has no more items; nothing new begins", self.report.name)
            self.report.count("no_item")
        return item

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """The environment's own; with a reward bridge, a whole group of equal scores that it dropped comes back."""
        ITEM.set(Item())  # for the task that this runs in, and those that it starts
        with recorded() as made:
            own = super().collect_trajectories
            if getattr(own, "__func__", None) is BaseEnv.collect_trajectories:
                groups, backlog = await collect_each(self.collect_trajectory, item, self.config.group_size, self.report)
            else:
                groups, backlog = await own(item)
        if self.reward_bridge is not None and not any(as_groups(groups)):
            if (dropped := dropped_by_environment(made, self.config.group_size)) is not None:
                self.report.count("shaping/recovered")
                groups = dropped
        return groups, backlog

    # ------------------------------------------------------------------ what goes out

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Any = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Validate, shape, restore and stamp, check; the environment's own, which ends in ``PostingEnv``."""
        ready = []
        for group in as_groups(scored_data):
            try:
                group = validated(group)
                for score in group["scores"]:
                    self.report.observe("score", score)
                await self._shape(group)
                self._restore(group)
                check_limits(group, self.config, self.max_token_len if abort_on_any_max_length_exceeded else 0)
            except Refused as refused:
                self.report.refuse(refused.reason, str(refused))
            else:
                ready.append(group)
        if not ready:
            return
        payload = ready if isinstance(scored_data, list) else ready[0]
        await super().handle_send_to_api(payload, item, do_send_to_api, abort_on_any_max_length_exceeded)
        if not do_send_to_api:
            self.report.count("groups_written", len(ready))

    async def _shape(self, group: dict[str, Any]) -> None:
        if self.reward_bridge is None:
            return
        drop_equal = self.config.ensure_scores_are_not_same
        try:
            await shape(self.reward_bridge, group, self.tokenizer, self.curr_step, drop_equal, self.report)
        except Refused:
            raise
        except Exception as error:
            self._failure = error
            raise

    def _restore(self, group: dict[str, Any]) -> None:
        restore_group(self._calls.caches["train"], group, self.report.count, self.config.wandb_name)

    # ------------------------------------------------------------------ what is shown

    async def add_rollouts_for_wandb(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().add_rollouts_for_wandb(*args, **kwargs)
        except Exception as error:  # a table for the eye is not worth a group
            self._count_failure("add_rollouts_for_wandb", error)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        await super().wandb_log({**(wandb_metrics or {}), **self.report.metrics()})


class PostingEnv(Paced):
    """Behind the environment, in the place of ``BaseEnv``: the last two steps of a group."""

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Wait for its turn, and post."""
        try:
            groups = await self._wait_for_turn(as_groups(scored_data))
            if groups and await self._post(groups, several=isinstance(scored_data, list)):
                self._take_places(groups)
        except Exception as error:  # BaseEnv would only log it
            self._count_failure("handle_send_to_api", error)


def adapt(
    environment: type[BaseEnv], bridge: RewardBridge | None = None, settings: AdapterSettings | None = None
) -> type[BaseEnv]:
    """A subclass of ``environment`` with everything that the adapter adds, of the same name; itself where it has that.

    With ``bridge`` its scores are shaped before they are sent. ``settings``: in code, instead of flags.
    """
    body: dict[str, Any] = {"__doc__": environment.__doc__, "__module__": environment.__module__}
    if bridge is not None:
        body["reward_bridge"] = bridge
    if settings is not None:
        body["adapter_settings"] = settings
    if issubclass(environment, AdaptedEnv):
        return environment if len(body) == 2 else type(environment.__name__, (environment,), body)
    teacher = (TeacherFixes,) if hasattr(environment, "teacher_config_init") else ()
    return type(environment.__name__, (AdaptedEnv, *teacher, environment, PostingEnv), body)
