"""The class that ``adapt`` makes: one pipeline, one place for each method of BaseEnv."""

import inspect

from atroposlib.envs.base import BaseEnv

from recipe.atropos.adapter.adapted_env import AdaptedEnv
from recipe.atropos.adapter.flags import CommandLine
from recipe.atropos.adapter.lifecycle import Lifecycle
from recipe.atropos.adapter.posting import PostingEnv

FRONT, BEHIND = (AdaptedEnv, CommandLine, Lifecycle), (PostingEnv,)


def test_adapted_env_overrides_each_method_once_on_a_side():
    names = {name for name, _ in inspect.getmembers(BaseEnv, callable) if not name.startswith("__")}
    for side in (FRONT, BEHIND):
        overridden = [name for cls in side for name in vars(cls) if name in names]
        assert overridden and len(overridden) == len(set(overridden)), sorted(overridden)


def test_adapted_env_takes_no_public_name():
    """But for the documented ``report``, and what the adapter is configured by."""
    known = {"adapter_settings", "reward_bridge", "report", "owns_process", "only_checked"}
    known |= {"api_timeout", "trainer_timeout", "retry_seconds", "longest_wait"}
    own = {name for cls in (*FRONT, *BEHIND) for name in vars(cls) if not name.startswith("_")}
    assert own - known <= set(dir(BaseEnv)), own - known - set(dir(BaseEnv))
