"""A server for ``BaseEnv`` answered from outside: the code that steps through an environment acts as its policy.

- Each call of the environment to its server (chat, completion, tokens and logprobs; also by the managed server) becomes
  one ``ActionRequest`` for each of its ``n`` choices, and waits until all are answered or its episode is closed. It is
  sent once: there are no retries.
- An answer is treated as an inference server treats its model's output: it ends at the stop string that ends first,
  and after ``max_tokens`` tokens including the end-of-turn token; the finish reason says which. Its tokens are the
  tokenizer's, and its logprobs are 1.0, which environments write for missing logprobs.
- A call outside any episode is an error, and so is a call for prompt logprobs, which cannot be answered here.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServer
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion

from recipe.atropos.adapter.recorded_calls import MESSAGES, openai_response
from recipe.atropos.adapter.shaping import recorded

Messages = list[dict[str, Any]]

_NO_LOGPROB = 1.0
_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_NOT_SAMPLING = ("model", "split", "prompt", "input_ids", "messages", "n", "stop", *_LIMITS)


@dataclass(frozen=True)
class Answer:
    """Answer: ``text`` as the environment reads it; ``token_ids`` with the token or stop string that ended it."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"


@dataclass(eq=False)
class ActionRequest:
    """Request for one answer: choice ``choice`` of ``choices`` of the environment's ``call``-th call, from 0."""

    call: int
    choice: int
    choices: int
    prompt: str
    prompt_ids: list[int]
    messages: Messages | None = None  # None if the environment rendered the prompt
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)  # the call's other arguments: temperature, tools, ...
    future: Future[Answer] = field(default_factory=Future)

    def answer(self, text: str, tokenizer: Any) -> Answer:
        """Deliver the policy's text. It is discarded if the environment no longer waits for it.

        Raises:
            TypeError: it is not text.
        """
        if not isinstance(text, str):
            raise TypeError(f"an action is the policy's text, not {type(text).__name__} {text!r:.80}")
        answer = as_served(text, tokenizer, self.max_tokens, self.stop)
        with contextlib.suppress(InvalidStateError):  # the environment canceled this call
            self.future.set_result(answer)
        return answer


def as_served(text: str, tokenizer: Any, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Answer:
    """Return what an inference server would return for the model output ``text``."""
    if tokenizer.eos_token:
        text = text.removesuffix(tokenizer.eos_token)
    counted = text
    first = min((word for word in stop if word in text), key=lambda word: text.find(word) + len(word), default=None)
    if first is not None:
        text = text[: text.find(first)]
        counted = text + first
    token_ids = tokenizer.encode(counted, add_special_tokens=False)
    if first is None and tokenizer.eos_token_id is not None:
        token_ids.append(tokenizer.eos_token_id)
    if max_tokens is None or len(token_ids) <= max_tokens:
        return Answer(text, token_ids, "stop")
    token_ids = token_ids[:max_tokens]
    return Answer(tokenizer.decode(token_ids, skip_special_tokens=True), token_ids, "length")


class Episode:
    """Channel between one rollout, in the event loop's thread, and the code that answers its calls, in any other."""

    def __init__(self, rollout: Callable[[], Coroutine[Any, Any, Any]], loop: asyncio.AbstractEventLoop):
        self.made: list[Any] = []  # every ScoredDataGroup of the environment, also those that it then drops
        self.asked: list[Messages | None] = []  # the messages of each request that was observed
        self._loop = loop
        self._calls = 0
        self._events: SimpleQueue[ActionRequest | Future[Any]] = SimpleQueue()
        self._task: asyncio.Task | None = None
        self._waiting: set[ActionRequest] = set()
        self._closed = False  # no call is answered any more
        self._outcome = asyncio.run_coroutine_threadsafe(self._run(rollout), loop)
        self._outcome.add_done_callback(self._events.put)

    async def _run(self, rollout: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        _EPISODE.set(self)
        self._task = asyncio.current_task()
        try:
            if self._closed:
                raise asyncio.CancelledError
            with recorded() as self.made:
                outcome = await rollout()
                self.made[:] = [group for group in self.made if not group.by_base]
                return outcome
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, and with it every other episode
            raise RuntimeError(f"the environment ended its process: {error!r}") from error
        finally:
            self._closed = True
            for ask in list(self._waiting):
                ask.future.cancel()

    async def ask(self, choices: int, **call: Any) -> list[Answer]:
        """Return the answers to one call, in the order of its choices."""
        if self._closed:  # a task left over from an ended rollout
            raise asyncio.CancelledError("this episode is over")
        number, self._calls = self._calls, self._calls + 1
        asks = [ActionRequest(number, choice, choices, **call) for choice in range(choices)]
        self._waiting.update(asks)
        for ask in asks:
            self._events.put(ask)
        try:
            return await asyncio.gather(*(asyncio.wrap_future(ask.future) for ask in asks))
        finally:
            self._waiting.difference_update(asks)

    def next(self, timeout: float) -> ActionRequest | Future[Any] | None:
        """Return the environment's next request, or its rollout's outcome; None if neither came in ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return None
            if not isinstance(event, ActionRequest) or not event.future.cancelled():
                return event

    def close(self) -> None:
        """Cancel the rollout and its pending requests; returns at once."""
        self._closed = True
        if self._task is not None and not self._loop.is_closed():  # else it ends before its first step
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for ask in list(self._waiting):
            ask.future.cancel()
        self._task.cancel()

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds; return whether the rollout has ended."""
        return bool(wait([self._outcome], timeout).done)


_EPISODE: ContextVar[Episode | None] = ContextVar("episode", default=None)  # whose rollout, or task of it, is calling


class OuterPolicyServer(APIServer):
    """``BaseEnv.server_cls`` of a stepped environment; ``tokenizer`` is the environment's."""

    tokenizer: Any = None

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(
            "the environment asks its server for the logprobs of a prompt; a policy that answers in text has none"
        )

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        messages = kwargs["messages"]
        prompt = self.tokenizer.apply_chat_template(
            messages,
            tools=kwargs.get("tools"),
            tokenize=False,
            add_generation_prompt=not messages or messages[-1]["role"] != "assistant",
        )
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        return self._response(True, prompt_ids, await self._ask(kwargs, messages, prompt, prompt_ids))

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        prompt, prompt_ids = self._prompt(kwargs)
        return self._response(False, prompt_ids, await self._ask(kwargs, None, prompt, prompt_ids))

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[list, list, list, list]:
        prompt, prompt_ids = self._prompt(kwargs)
        answers = await self._ask(kwargs, MESSAGES.get(), prompt, prompt_ids)
        return (
            prompt_ids,
            [list(answer.token_ids) for answer in answers],
            [[_NO_LOGPROB] * len(answer.token_ids) for answer in answers],
            [{"type": answer.finish_reason} for answer in answers],
        )

    # The public methods of APIServer retry a call that raises, which would ask the policy a second time.
    chat_completion = _chat_completion_wrapper
    completion = _completion_wrapper
    tokens_and_logprobs_completion = _tokens_and_logprobs_completion_wrapper

    def _response(self, chat: bool, prompt_ids: list[int], answers: Sequence[Answer]) -> Any:
        found = [(answer.text, len(answer.token_ids), answer.finish_reason) for answer in answers]
        return openai_response(chat, self.config.model_name, len(prompt_ids), found)

    def _prompt(self, call: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Return text and ids, from whichever the call has; if it has both, the ids are those of the text.

        atroposlib's managed server gives both from the second turn on, and its ids repeat each end-of-turn token.
        """
        prompt, ids = call.get("prompt"), call.get("input_ids")
        if prompt is None:
            return self.tokenizer.decode(ids), list(ids)
        return prompt, self.tokenizer.encode(prompt, add_special_tokens=ids is None)

    def _stop(self, stop: Any) -> tuple[str, ...]:
        """Return stop strings, also for token ids; the end-of-turn token, which is implied, and "" are left out."""
        given = [stop] if isinstance(stop, str | int) else stop or ()
        words = [self.tokenizer.decode([word]) if isinstance(word, int) else word for word in given]
        return tuple(word for word in words if word and word != self.tokenizer.eos_token)

    async def _ask(
        self, call: Mapping[str, Any], messages: Messages | None, prompt: str, prompt_ids: list[int]
    ) -> list[Answer]:
        episode = _EPISODE.get()
        if episode is None:
            raise RuntimeError("the environment called its server outside a rollout, where no policy can answer")
        max_tokens = next((call[key] for key in _LIMITS if call.get(key) is not None), None)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"the environment asks for an answer of {max_tokens} tokens: its prompt leaves no room")
        return await episode.ask(
            call.get("n") or 1,
            messages=None if messages is None else [dict(message) for message in messages],
            prompt=prompt,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            stop=self._stop(call.get("stop")),
            sampling={key: value for key, value in call.items() if key not in _NOT_SAMPLING},
        )
