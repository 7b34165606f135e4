"""Messages to token ids, and sampled ids back to messages, by the package ``renderers``.

A model that it knows by name has its own renderer there; any other, and any that the configuration names, goes through
its chat template. Guarantees:

- ``bridged`` never writes a sampled token anew: what it returns stands after the ids of the path that it continues.
- Where a template cannot be bridged exactly, it returns None, and the caller renders everything anew.
- With ``thinking="kept"`` the reasoning of earlier replies stays in the context as it was sampled, also where the
  template removes it; with "as_template" it is removed where the template does, which begins a history anew.
"""

import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from inspect import signature
from typing import Any, Literal

import msgspec
import numpy as np
import orjson
from pydantic import TypeAdapter
from renderers import create_renderer
from renderers.base import ToolCallParseStatus
from renderers.configs import RendererConfig
from renderers.default import DefaultRenderer

from recipe.atropos.errors import ConfigurationError
from recipe.atropos.inference.sampled import SampledReply
from recipe.atropos.sessions.messages import Asked, Message, RequestError, read_object, tool_call
from recipe.atropos.sessions.tree import Turn

_READ = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
_ID = "call00000"  # of a call; nine letters and digits, as Mistral's templates want
_MARK = "\ue000the reply\ue001"  # stands for a sampled reply in a rendered text; private characters of Unicode


class Rendering:
    """The policy's chat format. ``renderer`` is one of the package's names, "auto" or "default"; ``tool_parser`` names
    the format of tool calls where the chat template is used (qwen3, qwen3.5, glm, deepseek-v3).

    Raises:
        ConfigurationError: a name is unknown.
    """

    def __init__(
        self,
        tokenizer: Any,
        renderer: str = "auto",
        tool_parser: str | None = None,
        thinking: Literal["kept", "as_template"] = "kept",
    ):
        self.tokenizer, self.thinking = tokenizer, thinking
        self._name, self._tool_parser = renderer, tool_parser
        self._renderers = lru_cache(maxsize=16)(self._create)
        try:
            self._renderers("{}")
        except (ValueError, AssertionError) as error:  # the tokenizer lacks a token of this renderer
            raise ConfigurationError(
                f"sessions.renderer={renderer}, sessions.tool_parser={tool_parser}: {error}"
            ) from error

    def _create(self, template: str) -> Any:
        """Return the renderer for the arguments of a chat template, given as JSON; what it does not know has no effect,
        as in a template.
        """
        given, read = orjson.loads(template), TypeAdapter(RendererConfig).validate_python
        if ours := given.keys() & signature(self.tokenizer.apply_chat_template).parameters:
            raise ValueError(f"{', '.join(sorted(ours))} says how templates are used; give what this one reads")
        name = create_renderer(self.tokenizer).config.name if self._name == "auto" else self._name
        if name == "default":
            given |= {"tool_parser": self._tool_parser, "reasoning_parser": "think"}
        else:
            known = read({"name": name}).template_field_names()
            given = {key: value for key, value in given.items() if key in known}
            given |= {"thinking_retention": "all"} if self.thinking == "kept" else {}
        return create_renderer(self.tokenizer, read({**given, "name": name}))

    def _renderer(self, template: dict[str, Any]) -> Any:
        try:
            return self._renderers(orjson.dumps(template, option=orjson.OPT_SORT_KEYS).decode())
        except (ValueError, TypeError) as error:
            raise RequestError(f"chat_template_kwargs={template}: {error}") from error

    @cached_property
    def config(self) -> dict[str, Any]:
        """The package's configuration of this chat format."""
        return self._renderer({}).config.model_dump(mode="json", exclude_none=True)

    @cached_property
    def special(self) -> frozenset[int]:
        """The ids that are no text, among them those that end a reply."""
        return frozenset(
            [*self.tokenizer.all_special_ids, *(i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special)]
        )

    @cached_property
    def ends(self) -> list[int]:
        """The ids that end a reply."""
        return list(self._renderer({}).get_stop_token_ids())

    def prompt(
        self, messages: list[Message], tools: list | None, template: dict[str, Any], reply: bool = True
    ) -> list[int]:
        """Return the ids of messages and, with ``reply``, the beginning of a reply.

        Raises:
            RequestError: the template refuses the messages.
        """
        try:
            return self._renderer(template).render_ids(messages, tools=tools, add_generation_prompt=reply)
        except Exception as error:  # a template raises what it likes
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def opening(self, asked: Asked) -> list[int]:
        """Return the ids that begin the call which a reply must make, as the template writes it; none if it need not.

        A reply that is sampled after them is the policy's own, which constrained sampling would not be.

        Raises:
            RequestError: the template does not begin a reply with a call, or not with its name.
        """
        if asked.call is None:
            return []
        user, given = {"role": "user", "content": "call"}, (asked.tools, asked.template)
        calls = [(asked.call or "a", "{}"), (asked.call or "Z", '{"a": 1}')]
        replies = [{"role": "assistant", "content": "", "tool_calls": [tool_call(_ID, *one, "calls")]} for one in calls]
        written = [self.prompt([user, each], *given, reply=False) for each in replies]
        start, common = self.prompt([user], *given), list(os.path.commonprefix(written))
        text = self.tokenizer.decode(common[len(start) :])
        if common[: len(start)] != start or not text or asked.call not in text or _ID in text:
            choice = asked.body["tool_choice"]
            raise RequestError(f"tool_choice={choice!r:.80}: this chat format begins no reply with a call; give auto")
        return common[len(start) :]

    def bridged(
        self, turn: Turn, history: list[Message], new: list[Message], tools: list | None, template: dict[str, Any]
    ) -> list[int] | None:
        """Return the ids of ``new`` messages and the beginning of a reply, to stand after those of a path; None if
        that is not exact.

        ``history`` are the path's messages, the last the turn's reply.
        """
        renderer = self._renderer(template)
        default = isinstance(renderer, DefaultRenderer)
        if default and not (self.thinking == "as_template" and turn.thinking):
            return self._after_reply(renderer, turn, history, new, tools) or None
        path = turn.ids().tolist()
        if default:
            ids = self.prompt([*history, *new], tools, template)
        else:
            found = renderer.bridge_to_next_turn(path[: -len(turn.tokens)], turn.tokens.tolist(), new, tools=tools)
            ids = list(found.token_ids) if found else []
        return ids[len(path) :] or None if ids[: len(path)] == path else None

    def _after_reply(
        self, renderer: DefaultRenderer, turn: Turn, history: list[Message], new: list[Message], tools: list | None
    ) -> list[int] | None:
        """Return the ids that the template puts after the last reply, in whose place it is given a mark."""
        marked = {"role": "assistant", "content": _MARK}
        arguments = {**(renderer.config.model_extra or {}), **({"tools": tools} if tools else {})}
        ended = turn.tokens[-1] in self.special  # the reply ended its turn
        for reply in (marked, {**history[-1], **marked}):  # some want the call that a tool's result answers
            try:
                text = self.tokenizer.apply_chat_template(
                    [*map(_with_arguments, [*history[:-1], reply, *new])],
                    tokenize=False,
                    add_generation_prompt=True,
                    **arguments,
                )
            except Exception:  # as in ``prompt``; rendered anew, its error reaches the client
                continue
            _, found, tail = text.partition(_MARK)
            if calls := reply.get("tool_calls"):  # the reply has them, up to the token that ended it
                end = self.tokenizer.decode(turn.tokens[-1:])
                _, found, rest = tail.partition(end)
                tail, found = end + rest, found and ended and end not in str(calls)
            if found and _MARK not in tail:
                ids = self._tail(tail)
                return ids[1:] if ended and ids[:1] == [turn.tokens[-1]] else ids
        return None

    def parsed(
        self, prompt: list[int], tokens: list[int], tools: list | None, template: dict[str, Any]
    ) -> tuple[str, str | None, list[tuple[str, str]]]:
        """Return content, reasoning, and calls as (name, JSON of the arguments) of ``tokens``, a reply with its
        opening. A call that cannot be read, or of a request without tools, stays in the content.
        """
        try:
            found = self._renderer(template).parse_response(tokens, tools=tools, prompt_ids=prompt)
        except (RecursionError, ValueError):  # JSON that a policy nests without end, a number of thousands of digits
            return self.text(tokens), None, []
        calls, content = [], found.content or ""
        for call in found.tool_calls:
            arguments = read_object(call.arguments)
            known = tools and call.status in _READ and arguments is not None
            if known and isinstance(call.name, str) and call.name:
                calls.append((call.name, msgspec.json.encode(arguments).decode()))
            else:
                content += call.raw
        return content, found.reasoning_content, calls

    def text(self, tokens: list[int]) -> str:
        """Return a reply's text, without what ended its turn."""
        return self.tokenizer.decode(tokens[:-1] if tokens[-1] in self.special else tokens, skip_special_tokens=False)

    def after_prompt(self, prompt: list[int], reply: SampledReply) -> str:
        """Return a reply's text as its client reads it, and what the server cut off its end: a stop string and what its
        last token has after that, or a token.
        """
        before, whole = (self.tokenizer.decode(i, skip_special_tokens=True) for i in (prompt, prompt + reply.tokens))
        return reply.text + whole[len(before) + len(reply.text) :]

    def _tail(self, text: str) -> list[int]:
        """Return the ids of a text that stands after a reply, without the space that SentencePiece puts before a text:
        it is encoded after the end of a line. Tokenizers that merge the two put no space.
        """
        texts = ("\n", "\n" + text, text)
        line, after, alone = (self.tokenizer.encode(each, add_special_tokens=False) for each in texts)
        return after[len(line) :] if after[: len(line)] == line else alone

    def after_text(self, turn: Turn, prompt: str) -> list[int] | None:
        """Return the ids of what a text has after that of a turn; None if it does not go on where the reply ended."""
        rest = self._tail(prompt[len(turn.text or "") :])
        if turn.tokens[-1] in self.special:
            return rest[1:] if rest[:1] == [turn.tokens[-1]] else None
        return rest if rest or self.text(turn.tokens.tolist()) else None  # an equal prompt may ask it again


def _with_arguments(message: Message) -> Message:
    """Return a message with the arguments of its calls as mappings, which most templates expect."""
    calls = [
        call | {"function": call["function"] | {"arguments": read_object(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def as_ids(ids: Sequence[int]) -> np.ndarray:
    """Return ids as (length,) int32."""
    return np.array(ids, np.int32)
