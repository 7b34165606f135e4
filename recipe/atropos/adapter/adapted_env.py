"""The adapted environment: ``AdaptedEnv`` precedes the environment's class in the MRO, ``PostingEnv`` follows it.

``handle_send_to_api`` and ``_send_scored_data_to_api`` take a scored group through these steps:

    validate -> shape -> restore and stamp -> credit -> check -> the environment's own -> post

- ``AdaptedEnv`` handles what the environment produces.
- ``PostingEnv`` is a fixed ``BaseEnv``: the environment's own overrides, and their ``super()``, still apply.
- A group that is dropped on the way is counted by reason, as ``not_sent/REASON``.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from atroposlib.envs.base import BaseEnv

from recipe.atropos.adapter.completion_cache import ITEM, Item
from recipe.atropos.adapter.flags import CommandLine
from recipe.atropos.adapter.lifecycle import Lifecycle
from recipe.atropos.adapter.posting import PostingEnv
from recipe.atropos.adapter.recorded_calls import record_all_calls, sglang_servers
from recipe.atropos.adapter.replicas import take_part
from recipe.atropos.adapter.restore import chat_templates_give_lists, collect_each, restore_group
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.adapter.shaping import check_literals, dropped_by_environment, record_groups, recorded, shape
from recipe.atropos.adapter.teacher import TeacherFixes, taught_logprobs
from recipe.atropos.adapter.validate import as_groups, check_limits, validated
from recipe.atropos.algorithm.reward_bridge import RewardBridge
from recipe.atropos.credit.group import OF_TURNS, CreditError, give_credit, has_advantages, turns_of
from recipe.atropos.data.reasons import Reason, RefusedGroup
from recipe.atropos.data.scored_group import trajectory_numbers
from recipe.atropos.inference.client import InferenceError
from recipe.atropos.run.reporting import EnvReport

logger = logging.getLogger(__name__)

_PERMANENT = (401, 403, 404)  # statuses of a teacher that asking again does not change


class AdaptedEnv(CommandLine, Lifecycle):
    """Mixin; must precede a ``BaseEnv`` in the MRO, and be followed by ``PostingEnv``: see ``adapt``."""

    reward_bridge: RewardBridge | None = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        chat_templates_give_lists()
        settings = self.adapter_settings
        name = config.wandb_name or self.name or type(self).__name__
        self.report = EnvReport(name, settings.report, settings.replica or 0)
        take_part(self, config, settings)
        self._failure: Exception | None = None  # ends the environment
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # BaseEnv's
        self._calls = record_all_calls(self.server, self.tokenizer, self.report.count)
        if self.reward_bridge is not None:
            check_literals(self.reward_bridge, self.tokenizer)
            if self.reward_bridge.send_equal_raw:
                record_groups()

    # ------------------------------------------------------------------ items

    async def get_server_info(self) -> None:
        api = await self._api()
        self.config.rollout_server_url = api.keyed_url  # an environment's own requests send no key
        try:
            await super().get_server_info()
        finally:
            self.config.rollout_server_url = api.url
        self.report.add_line({"pid": os.getpid(), "registered": self.env_id})
        if not sglang_servers(self.server):
            logger.warning("%s: none of its servers is of type sglang, so nothing can be trained on", self.report.name)

    async def get_next_item(self) -> Any:
        item = await super().get_next_item()
        if item is None:  # BaseEnv would silently ask again forever
            if not self.report.counts["no_item"]:
                logger.error("%s: get_next_item() has no more items; nothing new begins", self.report.name)
            self.report.count("no_item")
        return item

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """Run the environment's own; with a reward bridge, recover a complete group of equal scores that it dropped."""
        ITEM.set(Item())  # for the current task, and those that it starts
        with recorded() as recovered:
            own = super().collect_trajectories
            if getattr(own, "__func__", None) is BaseEnv.collect_trajectories:
                groups, backlog = await collect_each(self.collect_trajectory, item, self.config.group_size, self.report)
            else:
                made = await own(item)
                if not (isinstance(made, tuple | list) and len(made) == 2):
                    raise TypeError(
                        f"collect_trajectories returned {made!r:.200}; return a group, several or None, and a list of "
                        "items to come next, as in GROUP, []"
                    )
                groups, backlog = made
        if self.reward_bridge is not None and not any(as_groups(groups)):
            if (dropped := dropped_by_environment(recovered, self.config.group_size)) is not None:
                self.report.count("shaping/recovered")
                groups = dropped
        return groups, backlog

    # ------------------------------------------------------------------ groups

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Any = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Validate, shape, restore, stamp and check; then call the environment's own, which ends in ``PostingEnv``."""
        ready = []
        for group in as_groups(scored_data):
            try:
                group = validated(group)
                numbers = trajectory_numbers(group["group_overrides"], len(group["scores"]))
                self.report.observe("score", *dict(zip(numbers, group["scores"], strict=True)).values())
                await self._shape(group)
                turns = turns_of(group)
                self._restore(group)
                counted = self.adapter_settings.credit is not None and OF_TURNS & group["group_overrides"].keys()
                if counted and turns != turns_of(group):
                    raise RefusedGroup(
                        Reason.PARTIAL_REPLY, "a turn that group_overrides tells of was not sampled whole"
                    )
                await self._credit(group, item)
                check_limits(group, self.config, self.max_token_len if abort_on_any_max_length_exceeded else 0)
            except RefusedGroup as refused:
                self.report.refuse(refused.reason, str(refused))
            else:
                ready.append(group)
        if not ready:
            return
        payload = ready if isinstance(scored_data, list) else ready[0]
        await super().handle_send_to_api(payload, item, do_send_to_api, abort_on_any_max_length_exceeded)
        if not do_send_to_api:
            self.report.count("groups_written", len(ready))

    @contextlib.contextmanager
    def _ends_on_failure(self) -> Iterator[None]:
        """End the environment if the block fails, as each of its groups would; of its own values too."""
        try:
            yield
        except RefusedGroup:
            raise
        except Exception as error:
            self._failure = error
            raise

    async def _shape(self, group: dict[str, Any]) -> None:
        if self.reward_bridge is not None:
            drop_equal = self.config.ensure_scores_are_not_same
            with self._ends_on_failure():
                await shape(self.reward_bridge, group, self.tokenizer, self.curr_step, drop_equal, self.report)

    def _restore(self, group: dict[str, Any]) -> None:
        if "policy_version_min" in group["group_overrides"]:  # from the session server: it is as it was sampled
            return
        restore_group(self._calls.caches["train"], group, self.report.counts, self.config.wandb_name)

    async def _credit(self, group: dict[str, Any], item: Any) -> None:
        credit, taught = self.adapter_settings.credit, None
        with self._ends_on_failure():
            if credit is None:
                if any(group["group_overrides"].get("branches") or ()) and not has_advantages(group):
                    raise CreditError("the environment sends branches: give environment.credit, which compares them")
                return
            if credit.teacher is not None:
                policy = sglang_servers(self.server)
                try:
                    taught = await taught_logprobs(credit.teacher, group, item, self.tokenizer, policy)
                except InferenceError as error:  # it is sent without, as by ``TeacherFixes``
                    if error.status in _PERMANENT:
                        raise
                    logger.warning("%s: no teacher: %s", self.report.name, error)
                    self.report.count("teacher_missing")
                    return
            await give_credit(group, credit, self.tokenizer, item, taught)

    # ------------------------------------------------------------------ wandb

    async def add_rollouts_for_wandb(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().add_rollouts_for_wandb(*args, **kwargs)
        except Exception as error:  # a failed wandb table must not cost a group
            self._count_failure("add_rollouts_for_wandb", error)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        await super().wandb_log({**(wandb_metrics or {}), **self.report.metrics()})


def adapt(
    environment: type[BaseEnv], bridge: RewardBridge | None = None, settings: AdapterSettings | None = None
) -> type[BaseEnv]:
    """Return a subclass of ``environment``, of the same name, with all adapter features; an already adapted class is
    returned unchanged unless ``bridge`` or ``settings`` is given.

    ``bridge`` shapes its scores before they are sent. ``settings`` are for use in code, instead of flags.
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
