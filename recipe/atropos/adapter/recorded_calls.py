"""Route an environment's calls to its SGLang servers through /generate, with token ids and logprobs.

- Each of atroposlib's calls (``tokens_and_logprobs_completion``; ``chat_completion`` and ``completion``, on a server,
  on the server manager, on a managed server) becomes a request here, and its replies are cached.
- A prompt is the text that the environment gives, encoded, with the earlier replies in it as they were sampled.
- No partial reply reaches an environment: samples that a server aborted, or returned without tokens, are requested
  again, only as many as are missing, ``ATTEMPTS`` times in all; then an InferenceError names the server.
- Calls with arguments that /generate does not support take the server's OpenAI route unchanged: such replies cannot be
  trained on. They are counted as ``plain_route/ARGUMENT``.
- Evaluation (``split`` other than "train") has a small cache of its own, so that it evicts no training replies.

Logprobs are SGLang's: of the distribution after temperature, penalties and grammar, before truncation by top-p, top-k
and min-p. With each reply, the cache keeps its request's parameters, which the trainer checks (``data.sampling``). The
request names them all, so that no default of the model or the server applies; if an environment names no temperature,
training samples use the trainer's.
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import orjson
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion as TextCompletion
from tenacity import RetryError

from recipe.atropos.adapter.completion_cache import EVALUATION, CompletionCache
from recipe.atropos.data.rows import one_bos, trained_spans
from recipe.atropos.data.sampling import SamplingParams, default_temperature
from recipe.atropos.data.token_keys import key_of, keys_of
from recipe.atropos.inference.client import InferenceError, SGLangClient
from recipe.atropos.inference.sampled import SampledReply, read_reply
from recipe.atropos.utils.secret import API_KEY_VARIABLE
from recipe.atropos.utils.tasks import Escaped

ATTEMPTS = 5

_SPLIT: ContextVar[str] = ContextVar("split", default="train")
MESSAGES: ContextVar[list[dict[str, Any]] | None] = ContextVar("messages", default=None)  # of the current call, if any
_SAME = (
    "n temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty stop stop_token_ids"
    " stop_regex max_new_tokens min_new_tokens json_schema regex ebnf structural_tag ignore_eos skip_special_tokens"
    " no_stop_trim logit_bias custom_params sampling_seed"
)
_PARAMS = {  # SGLang's names by OpenAI's
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
} | {name: name for name in _SAME.split()}
_WITHOUT_EFFECT = {"extra_body", "model", "user", "tool_choice", "parallel_tool_calls", "timeout", "metadata"}


def sampling_params(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of an OpenAI call into SGLang's sampling parameters and unsupported ones."""
    arguments = {**arguments, **(arguments.get("extra_body") or {})}
    params, unknown = {}, {}
    for name, value in arguments.items():
        if value is None or name in _WITHOUT_EFFECT or (name == "response_format" and value.get("type") == "text"):
            continue
        if name in _PARAMS:
            params[_PARAMS[name]] = value
        elif name == "response_format" and value.get("type") in ("json_object", "json_schema"):
            schema = value.get("json_schema", {}).get("schema", {"type": "object"})
            params["json_schema"] = orjson.dumps(schema).decode()
        elif value is not False and value != []:  # stream, echo, logprobs or tools not requested
            unknown[name] = value
    stop = params.get("stop")
    if isinstance(stop, list) and any(isinstance(one, int) for one in stop):  # some environments pass token ids
        params["stop"] = [one for one in stop if isinstance(one, str)]
        params["stop_token_ids"] = [one for one in stop if isinstance(one, int)] + params.get("stop_token_ids", [])
    return params, unknown


class Calls:
    """The calls of one environment. ``count`` takes the name of an event and a number."""

    def __init__(self, tokenizer: Any, count: Callable[[str, int], None]):
        self.count = count
        self.caches = {"train": CompletionCache(tokenizer), "eval": CompletionCache(tokenizer, EVALUATION)}

    @property
    def cache(self) -> CompletionCache:
        """The cache for the current call."""
        return self.caches["train" if _SPLIT.get() == "train" else "eval"]

    def restore_sampled(self, tokenizer: Any, text: str, special: bool, prefer: Collection[int] = ()) -> list[int]:
        """Return a prompt's tokens, replies as they were sampled; ``special``: with the tokenizer's special tokens."""
        return self.cache.restore_sampled(
            one_bos(tokenizer, tokenizer.encode(text, add_special_tokens=special)), prefer
        )

    # ------------------------------------------------------------------ requests

    def with_temperature(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return a call's parameters, in training with the trainer's temperature if they have none."""
        return {"temperature": default_temperature(), **params} if self.cache is self.caches["train"] else params

    async def sample(
        self, server: SGLangServer, ids: list[int], params: dict[str, Any], timeout: float | None
    ) -> list[SampledReply]:
        """Return and cache ``n`` whole replies to a prompt; ``timeout`` in s, None for the server's.

        Raises:
            InferenceError: the request failed; names the server. atroposlib retries such a call.
        """
        client = client_of(server.config, timeout)
        cache, prompt = self.cache, np.array(ids, np.int32)
        sampling = SamplingParams.from_request(params := self.with_temperature(params))
        params = {**params, **sampling.request()}

        async def request(n: int) -> list[SampledReply]:
            answers = await client.generate(input_ids=ids, sampling_params={**params, "n": n})
            found = map(read_reply, answers if isinstance(answers, list) else [answers])
            return [reply for reply in found if reply is not None]

        replies = await self._whole(request, params.get("n", 1), client.url, "/generate")
        for reply in replies:
            cache.add(prompt, reply.tokens, reply.logprobs, reply.text, reply.versions, sampling)
        return replies

    async def _whole(self, request: Callable[[int], Awaitable[list]], n: int, url: str, endpoint: str) -> list:
        """Return ``n`` whole replies; ``request`` returns those of so many samples that were not aborted."""
        whole: list = []
        for _ in range(ATTEMPTS):
            whole += await request(n - len(whole))
            if len(whole) >= n:
                return whole
            self.count("aborted_samples", n - len(whole))
        raise InferenceError(
            url, endpoint, f"{n - len(whole)} of {n} samples were aborted or empty, {ATTEMPTS} times; see its log"
        )

    # ------------------------------------------------------------------ replacements for a server's methods

    async def tokens(self, server: SGLangServer, **kwargs: Any) -> tuple[list[int], list, list, list]:
        """Replace ``SGLangServer``'s call for tokens and logprobs. SGLang rejects unknown arguments."""
        prompt, ids = kwargs.pop("prompt", None), kwargs.pop("input_ids", None)
        ids = self.restore_sampled(server.tokenizer, prompt, True) if ids is None else one_bos(server.tokenizer, ids)
        params, unknown = sampling_params(kwargs)
        replies = await self.sample(server, ids, params | unknown, kwargs.get("timeout"))
        _, tokens, logprobs, reasons, _ = map(list, zip(*replies, strict=True))
        return ids, tokens, logprobs, reasons

    async def chat(self, server: SGLangServer, plain: Callable, **kwargs: Any) -> ChatCompletion:
        """Answer as the server would; like SGLang, treat a final message of the assistant as the user's."""
        template, arguments = _template_arguments(kwargs)
        messages = [dict(message) for message in arguments.pop("messages")]
        params, unknown = sampling_params(arguments)
        if not all(isinstance(message.get("content"), str) and not message.get("tool_calls") for message in messages):
            unknown["content"] = messages
        if unknown:
            return await self._plain(server, plain, next(iter(unknown)), kwargs)
        if messages[-1].get("role") == "assistant":
            messages[-1]["role"] = "user"
        text = server.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
        return await self._respond(True, server, text, {"max_new_tokens": None, **params}, arguments.get("timeout"))

    async def text(self, server: SGLangServer, plain: Callable, **kwargs: Any) -> TextCompletion:
        arguments = dict(kwargs)
        prompt = arguments.pop("prompt")
        params, unknown = sampling_params(arguments)
        if unknown or not isinstance(prompt, str):
            return await self._plain(server, plain, [*unknown, "prompt"][0], kwargs)
        return await self._respond(False, server, prompt, {"max_new_tokens": 16, **params}, arguments.get("timeout"))

    async def _respond(
        self, chat: bool, server: SGLangServer, text: str, params: dict[str, Any], timeout: float | None
    ) -> Any:
        ids = self.restore_sampled(server.tokenizer, text, special=not chat)
        replies = await self.sample(server, ids, params, timeout)
        brief = [(reply.text, len(reply.tokens), reply.finish.get("type", "")) for reply in replies]
        return openai_response(chat, server.config.model_name, len(ids), brief)

    async def _plain(self, server: SGLangServer, plain: Callable, why: str, kwargs: dict[str, Any]) -> Any:
        answer, n = None, kwargs.get("n") or 1
        self.count(f"plain_route/{why}", n)

        async def request(missing: int) -> list:
            nonlocal answer
            answer = await plain(**{**kwargs, "n": missing})
            return [choice for choice in answer.choices if choice.finish_reason != "abort"]

        answer.choices = await self._whole(request, n, client_of(server.config).url, f"/v1 with {why}")
        for index, choice in enumerate(answer.choices):
            choice.index = index
        return answer


def record_all_calls(manager: Any, tokenizer: Any, count: Callable[[str, int], None]) -> Calls:
    """Route all calls to the manager's servers through ``Calls``, by setting attributes on these instances."""
    calls = Calls(tokenizer, count)
    servers = sglang_servers(manager)
    for server in servers:
        server._tokens_and_logprobs_completion_wrapper = partial(calls.tokens, server)
        server._chat_completion_wrapper = partial(calls.chat, server, server._chat_completion_wrapper)
        server._completion_wrapper = partial(calls.text, server, server._completion_wrapper)
    for target in (manager, *servers):
        _unwrap_errors(target, "chat_completion", "completion", "tokens_and_logprobs_completion")
    manager.managed_server = partial(_managed_server, manager.managed_server, calls)
    return calls


def sglang_servers(manager: Any) -> list[SGLangServer]:
    """Return the SGLang servers, which report sampled tokens and weight versions."""
    return [server for server in manager.servers if isinstance(server, SGLangServer)]


def client_of(server: APIServerConfig, timeout: float | None = None) -> SGLangClient:
    """Return a client of the server; ``timeout`` of a call in s, None for the server's."""
    url = server.base_url.removesuffix("/").removesuffix("/v1")
    own = server.api_key == os.environ.get(API_KEY_VARIABLE)
    return SGLangClient(url, server.api_key or None, timeout or server.timeout, own=own)


def cause_of(error: BaseException) -> BaseException:
    """Return the error inside the wrappers of tenacity, asyncio and ``guarded``."""
    while True:
        if isinstance(error, RetryError) and error.last_attempt.exception() is not None:
            error = error.last_attempt.exception()
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, Escaped):
            error = error.__cause__
        else:
            return error


def _unwrap_errors(target: Any, *names: str) -> None:
    for name in names:
        setattr(target, name, partial(_called, getattr(target, name)))


async def _called(call: Callable[..., Awaitable[Any]], **kwargs: Any) -> Any:
    """Call; raise the cause of a RetryError. The split is stored, since atroposlib's manager removes it, and
    so are the messages, since a managed server passes on only the prompt that it renders of them.
    """
    split = _SPLIT.set(kwargs.get("split", _SPLIT.get()))
    messages = MESSAGES.set(kwargs.get("messages", MESSAGES.get()))
    try:
        return await call(**kwargs)
    except RetryError as error:
        raise cause_of(error) from None
    finally:
        _SPLIT.reset(split)
        MESSAGES.reset(messages)


@contextlib.asynccontextmanager
async def _managed_server(original: Callable, calls: Calls, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    async with original(*args, **kwargs) as managed:
        if type(managed) is ManagedServer and isinstance(managed.server, SGLangServer):
            managed.__class__ = RecordingManagedServer
            managed._calls, managed._ever, managed._extends = calls, {}, {}
        _unwrap_errors(managed, "chat_completion", "completion")
        yield managed


class RecordingManagedServer(ManagedServer):
    """Managed server whose nodes hold the sampled tokens of all turns; its answers and their number are unchanged.

    - A prompt extends the node with the longest text, else the longest tokens, that it begins with; of equal ones, one
      that no call has extended, nor is about to.
    - A node keeps the masks and logprobs of the one that it extends, after ``completion`` as after ``chat_completion``.

    Tree mode is not fixed: no environment's manager provides it.
    """

    _calls: Calls
    _ever: dict[int, list[tuple[SequenceNode, int]]]  # nodes and prefix lengths, by the prefix's hash
    _extends: dict[asyncio.Task, tuple[SequenceNode | None, int]]  # what each task's call extends: one of these
    _prompt: list[int]  # of the call that last looked for the node that it extends

    def reset(self) -> None:
        super().reset()
        self._ever.clear()

    def _find_extending_node(self, input_text: str) -> SequenceNode | None:
        self._prompt = self._restored(input_text)
        current = {id(node) for node in self.current_nodes}
        found = [one for one in self._begins(self._prompt) if id(one[0]) in current]
        node, size = max(found, key=lambda one: (one[1], self._is_free(one[0])), default=(None, 0))
        self._extends[asyncio.current_task()] = node, size
        return node

    def _is_free(self, node: SequenceNode) -> bool:
        """Return whether no call of another task waits for its reply, by which it extends the node."""
        waiting = {task for task, (one, _) in self._extends.items() if one is node and not task.done()}
        return waiting <= {asyncio.current_task()}

    def _compute_input_ids(self, input_text: str, extending_node: SequenceNode | None) -> list[int]:
        return self._prompt

    def _restored(self, input_text: str) -> list[int]:
        """Return a prompt's tokens, replies as they were sampled, preferably those of the node that it extends."""
        same_text = [node for node in self.current_nodes if input_text.startswith(node.full_text)]
        if same_text:
            node = max(same_text, key=lambda node: (len(node.full_text), self._is_free(node)))
            keys, spans = keys_of(node.tokens).tolist(), trained_spans(node.masked_tokens)
            prefer = {keys[at] for _, end in spans for at in (end - 1, end)}  # the turn may have no end, or go on
        else:
            current = {id(node) for node in self.current_nodes}
            prefer = {key for key, nodes in self._ever.items() if any(id(node) in current for node, _ in nodes)}
        return self._calls.restore_sampled(self.tokenizer, input_text, True, prefer)

    def _begins(self, ids: list[int]) -> Iterator[tuple[SequenceNode, int]]:
        """Yield the nodes that a prompt extends, and how many of its tokens each has, the longest first."""
        for key in reversed(keys_of(ids).tolist()):
            yield from self._ever.get(key, ())

    def _create_sequence_node(self, *args: Any, **kwargs: Any) -> SequenceNode:
        node = super()._create_sequence_node(*args, **{**kwargs, "extending_node": None})
        before, kept = self._extends[asyncio.current_task()]
        if before is None:  # of the current nodes
            before, kept = next(self._begins(kwargs["prompt_tokens"]), (None, 0))
        if before is not None:
            node.masked_tokens[:kept] = before.masked_tokens[:kept]
            node.logprobs[:kept] = before.logprobs[:kept]
        for size in {len(node.tokens), self._calls.cache.unended(node.tokens)}:  # an environment may continue the turn
            if size > len(kwargs["prompt_tokens"]):
                self._ever.setdefault(key_of(node.tokens[:size]), []).append((node, size))
        return node


# ---------------------------------------------------------------------- helpers


def _template_arguments(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments into those for the chat template, as SGLang does, and the others."""
    others = {**kwargs, **(kwargs.get("extra_body") or {})}
    reasoning, effort = others.pop("reasoning", None) or {}, others.pop("reasoning_effort", None)
    effort = effort or reasoning.get("effort")
    template = {}
    if effort or reasoning.get("enabled"):
        template = dict.fromkeys(("thinking", "enable_thinking"), effort != "none")
    if effort:
        template["reasoning_effort"] = effort
    others.pop("extra_body", None)
    return template | (others.pop("chat_template_kwargs", None) or {}), others


def openai_response(chat: bool, model: str, prompt_tokens: int, replies: Sequence[tuple[str, int, str]]) -> Any:
    """Return a ChatCompletion, or a Completion, of replies: their text, number of tokens, and finish reason."""
    tokens = sum(size for _, size, _ in replies)
    said = [{"message": {"role": "assistant", "content": text}} if chat else {"text": text} for text, _, _ in replies]
    answer = {
        "id": uuid.uuid4().hex,
        "created": int(time.time()),
        "model": model,
        "object": "chat.completion" if chat else "text_completion",
        "choices": [
            {"index": index, "finish_reason": reason, "logprobs": None, **said[index]}
            for index, (_, _, reason) in enumerate(replies)
        ],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens},
    }
    return (ChatCompletion if chat else TextCompletion).model_validate(answer)
