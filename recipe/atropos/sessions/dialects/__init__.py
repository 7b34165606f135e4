"""The dialects that sessions speak, one file each. Every module has

- ``PATH``, of its requests;
- ``read(body) -> Asked``, which raises RequestError, naming the field, for what it cannot do;
- ``answer(asked, reply) -> dict``, the whole answer, and ``events(asked, reply)``, the same as server-sent events.

Anthropic's also has ``COUNT_PATH``, and ``count(body) -> Asked`` for its requests, which only want a prompt's length;
and ``KEEP_ALIVE``, its event while a stream waits.

A parameter that is not known has no effect, unless it could change what is sampled.
"""

from recipe.atropos.sessions.dialects import anthropic, chat, completions, generate, responses, tokens

DIALECTS = (chat, responses, anthropic, completions, generate, tokens)
