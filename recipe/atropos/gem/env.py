r"""An Atropos environment as a ``gem.Env`` (package gem-llm), for frameworks that step through environments:

    env = gem.make(register("recipe.atropos.environments.gsm8k:GSM8kEnv"), tokenizer="Qwen/Qwen2.5-0.5B-Instruct")
    observation, info = env.reset()
    observation, reward, terminated, truncated, info = env.step(r"The answer is \boxed{7}")

- An episode is one item: the environment's own ``collect_trajectories`` runs in the background, and each answer that it
  asks its server for is a step. The action is that answer, as text.
- The reward of the last step is the environment's own score, that of the others 0.0. An unscored episode has reward NaN
  and ``info["unscored"]``, never 0; an environment that has never scored is an error after a few episodes.
- ``reset`` and ``step`` raise what the environment raises, and wait at most ``timeout`` seconds for its next event.
- ``reset`` ends an unfinished episode; ``close`` ends everything, and so does garbage collection.
- With ``reward_bridge`` the reward is the shaped score, and ``info`` keeps the environment's own.
"""

import logging
import math
from collections.abc import Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import gem
from atroposlib.envs.base import BaseEnv
from gem.envs.registration import ENV_REGISTRY
from gem.utils.constants import TERMINAL_STATE

from recipe.atropos.adapter.shaping import check_literals, check_no_advantages, judged
from recipe.atropos.algorithm.reward_bridge import KEY, RewardBridge, RewardBridgeError, parse_bridge, read_bridge
from recipe.atropos.errors import AtroposError
from recipe.atropos.gem.outer_policy import ActionRequest, Episode, Messages
from recipe.atropos.gem.stepped_env import (
    GRACE,
    SteppedEnvironment,
    configured,
    shared_environment,
    stepped_class,
)

logger = logging.getLogger(__name__)

_INSTEAD = {"group_size": 1, "ensure_scores_are_not_same": False, "use_wandb": False}  # over an environment's defaults
_IN_A_ROW = 8  # successive items without a request, or first episodes without a score, until NeverScored is raised


class NeverScored(AtroposError, RuntimeError):
    """Error for an environment that never scores; the message says what it returned."""


def register(target: str, **kwargs: Any) -> str:
    """Register ``atropos:TARGET`` for ``gem.make``, with ``kwargs`` as defaults of `AtroposEnv`; return that id.

    gem knows only registered ids, so call this once for each target in each process. Calling it again is no error.

    Raises:
        ValueError: it is registered with other defaults.
    """
    env_id = f"atropos:{target}"
    kwargs = {"target": target, **kwargs}
    if env_id not in ENV_REGISTRY:
        gem.register(env_id, f"{AtroposEnv.__module__}:{AtroposEnv.__name__}", **kwargs)
    elif ENV_REGISTRY[env_id].kwargs != kwargs:
        raise ValueError(f"{env_id} is registered with {ENV_REGISTRY[env_id].kwargs}; give {kwargs} to gem.make")
    return env_id


class AtroposEnv(gem.Env):
    """gem environment that runs episodes of ``target``, one after the other.

    Args:
        target: MODULE:Class or FILE.py:Class, as for ``env_adapter``, or the class.
        config: fields of the environment's configuration; they override its own ``config_init`` and ``group_size=1``,
            ``ensure_scores_are_not_same=False``, ``use_wandb=False``.
        tokenizer: name or folder; overrides ``config``'s ``tokenizer_name``, renders prompts and counts tokens.
        seed: for the first reset called without one; gem's vectorized environments give each its own.
        timeout: seconds that the environment may take for its setup, and between an answer and its next event.
        reward_bridge: shapes the reward: a YAML file, or the block as a mapping; see ``algorithm.reward_bridge``. Its
            ``fade`` counts trainer steps: set ``env.unwrapped.training_step`` (gem's wrappers hold a copy of the
            attribute) before an episode ends.

    The observation is the new text since the policy's last answer (of all messages where a conversation begins), or
    the whole prompt if the environment renders it itself. ``info`` has

    - ``messages`` (None if the environment renders the prompt), ``prompt`` and ``prompt_ids``: what it sent;
    - ``max_tokens``, ``stop``, ``sampling``: limits and parameters of the requested answer;
    - ``call``, ``choice``, ``choices``: which answer is requested. Calls are answered one at a time, in the order of
      their arrival; a call for n choices is n steps with the same observation;
    - ``cut``: the previous answer was truncated at ``max_tokens``, and the environment read the truncated text. An
      episode whose last answer was truncated counts as truncated, any other as terminated;
    - ``use_tool``: the observation is a tool's output, as gem's wrappers understand it;
    - after the last step ``groups``: what the environment made of the item; ``scores``: the reward is their mean;
      ``raw_scores``: the environment's own, the same without a reward bridge; ``dropped``: it made the group, but
      did not return it, as many do if all scores are equal; ``unscored``: why there is no reward, or None;
    - after ``reset`` ``skipped``, the number of items that the environment passed over without a request, and
      ``last_episode``: reward, truncated, scores, raw_scores, dropped and unscored of the previous one, because gem's
      vectorized environments return the beginning of the next episode in place of an end.

    With ``group_size`` above 1 an episode is a whole group, and its reward is the mean of the scores.

    Raises:
        EnvironmentTargetError: ``target`` names no environment.
        ValueError: the configuration is invalid for the environment.
        RewardBridgeError: no such file, or an invalid block.
    """

    training_step: int | None = None
    """Current step of the trainer; only a reward bridge with ``fade`` reads it."""
    _episode: Episode | None = None
    _closed = False

    def __init__(
        self,
        target: str | type[BaseEnv],
        *,
        config: Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
        seed: int | None = None,
        timeout: float = 600.0,
        reward_bridge: str | Path | Mapping[str, Any] | RewardBridge | None = None,
    ):
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: give seconds, more than 0")
        if isinstance(reward_bridge, str | Path):
            reward_bridge = read_bridge(reward_bridge)
        elif isinstance(reward_bridge, Mapping):
            reward_bridge = parse_bridge(reward_bridge)
        self._bridge = reward_bridge
        self._arguments = {
            **{"target": target, "config": config, "tokenizer": tokenizer, "seed": seed, "timeout": timeout},
            "reward_bridge": self._bridge,
        }
        self._class = stepped_class(target)
        own = {} if tokenizer is None else {"tokenizer_name": tokenizer}
        self._config = configured(self._class, {**_INSTEAD, **(config or {}), **own})
        self._timeout = timeout
        self._environment: SteppedEnvironment | None = None
        self._ask: ActionRequest | None = None  # the answer that the environment waits for
        self._last: dict[str, Any] | None = None
        self._unscored: int | None = 0  # unscored episodes since the first; None once one was scored

    def __del__(self) -> None:
        self._end_episode(wait=False)  # it may run in the event loop's own thread

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode with the next item; with ``seed``, with the first of an environment set up with that seed.

        That needs a ``seed`` in the environment's configuration. Without it, the environment continues with its items,
        and ``seed`` only seeds Python's and numpy's global generators, as everywhere in gem. Instances of one class and
        configuration without a seed share a ``BaseEnv``, so that each gets other items.

        Raises:
            TimeoutError: the environment did not request an answer in time, or did not end.
            NeverScored: it requests none.
            RewardBridgeError: a pattern of the reward bridge cannot match anything.
            Exception: what the environment raised.
        """
        if self._closed:
            raise RuntimeError(f"{self._class.__name__} is closed; make another")
        self._end_episode()
        super().reset(seed)
        if seed is None and self._environment is None:
            seed = self._arguments["seed"]
        if seed is not None and "seed" in type(self._config).model_fields:
            self._environment = SteppedEnvironment(self._class, self._config.model_copy(update={"seed": seed}))
        elif self._environment is None:
            self._environment = shared_environment(self._class, self._config)
        self._environment.set_up(self._timeout)
        if self._bridge is not None:
            check_literals(self._bridge, self._environment.base.tokenizer)
        for skipped in range(_IN_A_ROW):
            self._episode = self._environment.begin()
            event = self._next("its beginning")
            if isinstance(event, ActionRequest):
                observation, info = self._observe(event, cut=False)
                return observation, info | {"skipped": skipped, "last_episode": self._last}
            logger.warning("%s passed over an item: it asked for no answer", self._class.__name__)
        raise NeverScored(f"{self._class.__name__} asked for no answer to any of {_IN_A_ROW} items in a row")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give the environment the answer that it waits for.

        Raises:
            TypeError: ``action`` is not text.
            RuntimeError: the environment is not waiting for an answer.
            NeverScored: it has not scored any episode so far.
            TimeoutError: it neither requested another answer nor ended in time.
            ValueError: its scores are not finite numbers.
            RewardBridgeError: the reward bridge fades and ``training_step`` is not set, or the environment gives
                its own advantages.
            Exception: what the environment raised.
        """
        if self._ask is None:
            raise RuntimeError(f"{self._class.__name__} waits for no answer; call reset() to begin an episode")
        answer = self._ask.answer(action, self._environment.base.tokenizer)
        cut = answer.finish_reason == "length"
        made = self._episode.made
        event = self._next("an answer")
        if isinstance(event, ActionRequest):
            observation, info = self._observe(event, cut)
            return observation, 0.0, False, False, info
        reward, info = score(event, made)
        if self._bridge is not None:
            reward, info = self._shaped(reward, info)
        reported = ("scores", "raw_scores", "dropped", "unscored")
        self._last = {"reward": reward, "truncated": cut} | {key: info[key] for key in reported}
        self._count(info["unscored"])
        return TERMINAL_STATE, reward, not cut, cut, info | {"cut": cut, "use_tool": False}

    def close(self) -> None:
        """End the episode; no other can begin. Calling it again is no error.

        Raises:
            TimeoutError: the rollout continues although it was canceled.
        """
        self._closed = True
        try:
            self._end_episode()
        finally:
            self._environment = None

    def _end_episode(self, wait: bool = True) -> None:
        """End the episode. Raises TimeoutError if its rollout continues although it was canceled."""
        self._ask, episode, self._episode = None, self._episode, None
        if episode is None:
            return
        episode.close()
        if wait and not episode.wait(GRACE):
            name = self._class.__name__
            raise TimeoutError(f"{name}: its rollout goes on {GRACE:g} s after it was canceled, or it blocks the loop")

    def spawn(self, same_state: bool = False, **kwargs: Any) -> "AtroposEnv":
        """Return another environment with the same arguments, except ``kwargs``."""
        if same_state:
            raise NotImplementedError("a rollout that is under way cannot be copied; spawn with same_state=False")
        return AtroposEnv(**(self._arguments | kwargs))

    def _shaped(self, reward: float, info: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Return (reward, info) with shaped scores. What could not be judged is unscored, never shaped by 0."""
        bridge, step, name = self._bridge, self.training_step, self._class.__name__
        if bridge.fade is not None and step is None:
            raise RewardBridgeError(
                f"{KEY}.fade counts the trainer's steps: set env.unwrapped.training_step, now None, or leave fade out"
            )
        scores: list[float] = []
        for group in info["groups"]:
            check_no_advantages(group, name)
            try:
                terms = [bridge.terms(*each) for each in judged(self._environment.base.tokenizer, group)]
            except TimeoutError as error:
                return math.nan, info | {"scores": [], "unscored": str(error)}
            pairs = zip(group["scores"], terms, strict=True)
            scores += [bridge.shaped(float(raw), each, step or 0) for raw, each in pairs]
        return (sum(scores) / len(scores) if scores else reward), info | {"scores": scores}

    def _next(self, after: str) -> ActionRequest | Any:
        """Return the next request of the environment, or what it made of the item."""
        name = self._class.__name__
        self._ask = None
        event = self._episode.next(self._timeout)
        if event is None:
            self._end_episode()
            raise TimeoutError(
                f"{name}: no call of its server and no end within {self._timeout:g} s of {after}; "
                "if it needs longer, give a larger timeout"
            )
        if isinstance(event, ActionRequest):
            return event
        self._episode = None
        try:
            return event.result()
        except CancelledError as error:
            raise RuntimeError(f"the rollout of {name} was canceled") from error
        except Exception as error:
            error.add_note(f"raised by the environment {name} after {after}")
            raise

    def _observe(self, ask: ActionRequest, cut: bool) -> tuple[str, dict[str, Any]]:
        new = _new_messages(ask.messages or [], self._episode.asked)
        self._episode.asked.append(ask.messages)
        self._ask = ask
        info = {
            "messages": ask.messages,
            "prompt": ask.prompt,
            "prompt_ids": ask.prompt_ids,
            "max_tokens": ask.max_tokens,
            "stop": ask.stop,
            "sampling": ask.sampling,
            "call": ask.call,
            "choice": ask.choice,
            "choices": ask.choices,
            "cut": cut,
            "use_tool": bool(new) and new[-1].get("role") == "tool",
        }
        return "\n\n".join(map(_text, new)) if new else ask.prompt, info

    def _count(self, unscored: str | None) -> None:
        if unscored is None:
            self._unscored = None
        elif self._unscored is not None:
            self._unscored += 1
            if self._unscored % _IN_A_ROW == 0:
                raise NeverScored(
                    f"{self._class.__name__}: {_IN_A_ROW} episodes and no score; {unscored} of the last. One that "
                    f"scores only whole groups may need config={{'group_size': 4}}; it has {self._config.group_size}"
                )


def _new_messages(messages: Messages, earlier: list[Messages | None]) -> Messages:
    """Return the messages after the last answer; all of them if they go on after none of the ``earlier`` requests: of a
    new conversation, answers are examples.
    """
    goes_on = any(each and each != messages and each == messages[: len(each)] for each in earlier)
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    return messages[answers[-1] + 1 :] if answers and goes_on else messages


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", f"[{part.get('type')}]") for part in content)


def score(returned: Any, made: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """Return (reward, info) from the result of ``collect_trajectories`` and the groups made on the way.

    Raises:
        ValueError: a score is not finite, or there are not as many as sequences.
    """
    groups = [group for group in (returned if isinstance(returned, list) else [returned]) if group]
    dropped = False
    if not groups:
        whole = [group for group in made if group.get("scores") and len(group["scores"]) == len(group["tokens"])]
        groups, dropped = whole[-1:], bool(whole)
    scores = []
    for group in groups:
        found, expected = (len(group.get(name, ())) for name in ("scores", "tokens"))
        if found != expected:
            raise ValueError(f"{found} scores for {expected} sequences")
        scores += map(float, group["scores"])
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"scores {scores}: they must be finite")
    unscored = None if scores else f"the environment made {returned!r:.80} and no scores"
    reward = sum(scores) / len(scores) if scores else math.nan
    info = {"scores": scores, "raw_scores": scores, "groups": groups, "dropped": dropped, "unscored": unscored}
    return reward, info
