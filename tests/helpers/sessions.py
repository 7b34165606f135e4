"""Chat templates as models ship them, a tokenizer for them, and a policy whose every token is known."""

import asyncio
import contextlib
import http.client
import json
import random
import re
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import anthropic
import msgspec
import openai
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipe.atropos.inference.client import SGLangClient
from recipe.atropos.inference.sampled import SampledReply
from recipe.atropos.run.folder import ELSEWHERE, RunDir
from recipe.atropos.run.record import ItemCounts
from recipe.atropos.sessions import server as session_server
from recipe.atropos.sessions.counts import Reports
from recipe.atropos.sessions.rendering import Rendering
from recipe.atropos.sessions.server import SessionServer
from recipe.atropos.sessions.store import SessionStore
from recipe.atropos.trajectory_api.client import TrajectoryApiClient
from recipe.atropos.utils.files import read_lines
from recipe.atropos.utils.process import free_port

CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|im_end|>\n"
_LAST = (
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}" + PROMPT,
    "thinking_stripped": TOOLS + _LAST + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > last.at %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}" + PROMPT,
    "thinking_kept": TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT,
    "thinking_begun": TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}" + PROMPT.replace(
        "assistant\n", "assistant\n<think>\n"
    ),
    "no_generation_prompt": "{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "\n{% endfor %}",
    "bos": "{{ bos_token }}" + TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}" + PROMPT,
    "trimmed": TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT,
    "tools_in_last_user_message": _LAST + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if tools and loop.index0 == last.at %}Tools: {{ tools | tojson }}\n{% endif %}{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT,
    "alternating": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}" + CALLS
    + "{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    "tool_results_as_user": TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + PROMPT,
    "calls_before_results": TOOLS + "{% for m in messages %}{% if m.role == 'tool' and not loop.first and "
    "messages[loop.index0 - 1].role == 'assistant' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}" + _TURN + "{% endfor %}" + PROMPT,
    "model_role": "{{ bos_token }}{% for m in messages %}<|im_start|>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}" + CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
    "by_name": {
        "default": "{% for m in messages %}" + _TURN + "{% endfor %}" + PROMPT,
        "tool_use": TOOLS + "{% for m in messages %}" + _TURN + "{% endfor %}" + PROMPT,
    },
}  # fmt: skip
ADDED = ["<|im_start|>", "<|im_end|>", "<s>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = ["the ", "sum ", "of ", " 12", "and", " 7 ", "is", "\n", "19", ". ", "é", "result: ", "no", '{"a": 1}']


def chat_tokenizer(template="chatml"):
    """A byte-level BPE tokenizer with merges across words and white space. Where its template writes a BOS, ``encode``
    begins with one too, as of most models that have it.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    chance = random.Random(0)
    made.train_from_iterator(["".join(chance.choices(WORDS, k=12)) for _ in range(300)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>", additional_special_tokens=ADDED
    )
    tokenizer.add_tokens(MARKERS)
    tokenizer.chat_template = TEMPLATES[template]
    if "bos_token" in TEMPLATES[template]:
        bos = (tokenizer.bos_token, tokenizer.bos_token_id)
        added = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
        tokenizer.backend_tokenizer.post_processor = added
    return tokenizer


def sentencepiece_tokenizer(template="chatml"):
    """Bytes, and a space that is put before a text, which decoding strips: as of Llama 2, without its words."""
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    ids = {token: number for number, token in enumerate(vocab)}
    made = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>", additional_special_tokens=ADDED
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


@dataclass
class ScriptedPolicy:
    """Answers as it is told, or at random; remembers every prompt and what it sampled, each with logprobs of its own.

    ``sampled`` holds (prompt, tokens, logprobs).
    """

    tokenizer: PreTrainedTokenizerFast
    seed: int = 0
    script: list[str] = field(default_factory=list)
    sampled: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    delay: float = 0.0

    def __post_init__(self):
        self.chance = random.Random(self.seed)

    async def __call__(self, ids, params):
        await asyncio.sleep(self.delay)
        text, ended = (self.script.pop(0), True) if self.script else (self.reply(), self.chance.random() < 0.85)
        tokens = self.split(text) + [self.tokenizer.eos_token_id] * ended
        most = params.get("max_new_tokens")
        if not tokens or (most is not None and len(tokens) > most):
            tokens, ended = (tokens or self.split("the"))[:most], False
        count = sum(len(one) for _, one, _ in self.sampled)
        logprobs = [-1e-6 * (count + i + 1) for i in range(len(tokens))]
        self.sampled.append((list(ids), tokens, logprobs))
        finish = {"type": "stop", "matched": tokens[-1]} if ended else {"type": "length"}
        return SampledReply(self.text(ids, tokens), tokens, logprobs, finish, (3, 4)), [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": len(tokens)},
        ]

    def text(self, ids, tokens):
        """A reply's text as SGLang has it: without special tokens, decoded after its prompt."""
        before, whole = (self.tokenizer.decode(each, skip_special_tokens=True) for each in (ids, [*ids, *tokens]))
        return whole[len(before) :]

    def reply(self):
        text = "".join(self.chance.choices(WORDS, k=self.chance.randrange(6)))
        kind = self.chance.random()
        if kind < 0.3:
            text = f"<think>{text}</think>{self.chance.choice(WORDS)}"
        if 0.2 < kind < 0.5:
            text += '<tool_call>\n{"name":  "add", "arguments": {"b": 2,"a": 1}}\n</tool_call>'
        if kind > 0.95:
            text += '<tool_call>\n{"name": "add", "argu'
        return text

    def split(self, text):
        """Encode a text in pieces, so that its tokens are not those of the whole; markers stay tokens of their own."""
        pieces = []
        for part in re.split("(</?(?:think|tool_call)>)", text):
            while part and part not in MARKERS:
                size = self.chance.randrange(1, 9)
                pieces += self.tokenizer.encode(part[:size], add_special_tokens=False)
                part = part[size:]
            pieces += self.tokenizer.encode(part, add_special_tokens=False)
        whole = self.tokenizer.encode(text, add_special_tokens=False)
        return pieces if self.tokenizer.decode(pieces) == text else whole


def check_trained_once(policy, tree):
    """Every sampled token is trained once, after exactly the ids that it was sampled after; nothing else is trained."""
    found = {}
    for leaf in tree.leaves():
        assert len(leaf.tokens) == len(leaf.masks) == len(leaf.logprobs)
        trained = leaf.masks != -100
        assert (leaf.masks[trained] == leaf.tokens[trained]).all()
        assert (leaf.logprobs[~trained] == 1.0).all()
        for at in trained.nonzero()[0].tolist():
            assert leaf.logprobs[at] not in found, "trained twice"
            found[leaf.logprobs[at]] = leaf.tokens[: at + 1].tolist()
    expected = {
        logprob: prompt + tokens[: i + 1]
        for prompt, tokens, logprobs in policy.sampled
        for i, logprob in enumerate(logprobs)
    }
    assert found == expected


SUM = {"messages": [{"role": "user", "content": "sum"}]}


class Sessions:
    """A session server in this process, over a scripted policy; used as a context manager. It polls often."""

    KEY = "environments"

    def __init__(self, folder, policy, api=None, credit=None, **rendering):
        self.folder, self.policy, self.api, self.credit, self.rendering = folder, policy, api, credit, rendering
        self.files = RunDir(folder / "run")  # of its reports
        self.loop = asyncio.new_event_loop()

    def __enter__(self):
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(session_server, "_POLL", 0.05))
            self.start()
            self.polls = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stop()
        self.polls.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def start(self):
        rendering = Rendering(self.policy.tokenizer, **{"tool_parser": "qwen3"} | self.rendering)

        async def serve():
            client, store = SGLangClient("http://127.0.0.1:1"), SessionStore(self.folder / "sessions.sqlite")
            api = TrajectoryApiClient(self.api or "http://127.0.0.1:1")
            self.server = SessionServer(
                store, rendering, client, self.KEY, "policy", api, self.credit, Reports(self.files)
            )
            self.server._generate = self.policy
            self.runner = web.AppRunner(self.server.app(), handler_cancellation=True, shutdown_timeout=0.1)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

        asyncio.run_coroutine_threadsafe(serve(), self.loop).result(30)

    def stop(self):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(30)

    def call(self, method, path, body=None, key=KEY, **headers):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", **headers}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def open(self, **fields):
        status, opened = self.call("POST", "/sessions", fields)
        assert status == 200, opened
        return opened

    def ask(self, opened, path="/v1/chat/completions", retry=0, **fields):
        """A program's request, and its answer."""
        return self.call("POST", path, SUM | fields, opened["api_key"], **{"x-stainless-retry-count": str(retry)})

    def begin(self, opened, path="/v1/chat/completions", **fields):
        """A program's request, whose answer is to be read; its client may leave before."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("POST", path, json.dumps(SUM | fields), {"Authorization": f"Bearer {opened['api_key']}"})
        return connection

    @contextmanager
    def generating(self, generate):
        """Replies come from ``generate`` instead of the policy."""
        self.server._generate = generate
        try:
            yield
        finally:
            self.server._generate = self.policy

    def openai(self, opened, **options):
        return openai.OpenAI(base_url=f"{opened['base_url']}/v1", api_key=opened["api_key"], **options)

    def anthropic(self, opened):
        return anthropic.Anthropic(base_url=opened["base_url"], api_key=opened["api_key"])

    def session(self, opened):
        async def loaded():
            return self.server._loaded(opened["id"])

        return asyncio.run_coroutine_threadsafe(loaded(), self.loop).result(30)

    def state(self, opened):
        session = self.session(opened)
        return msgspec.to_builtins(session.state) | session.summary()

    def counts(self, env):
        """What the reports say of the sessions of an environment from elsewhere; ends the server, so that it writes."""
        self.stop()
        found = ItemCounts()
        for line in read_lines(self.files.environment_report(env, ELSEWHERE)):
            found.add(line)
        self.start()
        return {name.removeprefix("sessions/"): n for name, n in found.totals.items()}

    def reward(self, opened, **result):
        """(status, answer) of an environment's ``POST /sessions/ID/reward``."""
        return self.call("POST", f"/sessions/{opened['id']}/reward", result)

    def rows(self, opened):
        """(status, answer) of an environment's ``GET /sessions/ID/rows``."""
        return self.call("GET", f"/sessions/{opened['id']}/rows")

    def check(self, opened):
        check_trained_once(self.policy, self.session(opened).tree)
