"""Sessions on a real SGLang server: what is trained is what it sampled, whatever is killed."""

import asyncio
import os
import shlex
import signal
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path

import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.agents import program_env
from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from helpers.sglang import call
from recipe.atropos.sessions.client import SessionClient
from recipe.atropos.utils.process import free_port, start_service
from recipe.atropos.utils.secret import API_KEY_VARIABLE

pytestmark = pytest.mark.timeout(300)
KEY = "environments"
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12+7"}}\n</tool_call>'


def up(url):
    for _ in range(600):
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
        except OSError:
            time.sleep(0.1)
    return False


class Served:
    """A session server in a process of its own, which can be killed and started again."""

    def __init__(self, model_path, server, folder):
        self.port = free_port()
        self.url, self.folder = f"http://127.0.0.1:{self.port}", folder
        self.command = [sys.executable, "-m", "recipe.atropos.sessions.server", f"--port={self.port}"]
        self.command += [f"--gateway={server}", "--api=http://127.0.0.1:9", f"--tokenizer={model_path}"]
        self.command += [f"--data={folder / 'sessions.sqlite'}"]  # no group is opened, so no API is asked
        self.start()

    def start(self):
        log, key = self.folder / "sessions.log", {API_KEY_VARIABLE: KEY}
        self.service = start_service("sessions", self.command, log_path=log, env=key)
        assert up(self.url), log.read_text()

    def restart(self):
        os.kill(self.service.pid, signal.SIGKILL)
        self.service.stop()
        self.start()

    def call(self, method, *args, **fields):
        return asyncio.run(getattr(SessionClient(self.url, KEY), method)(*args, **fields))


@pytest.fixture(scope="module")
def sessions(model_path, server, tmp_path_factory):
    served = Served(model_path, server, tmp_path_factory.mktemp("sessions"))
    yield served
    served.service.stop()


def check_logprobs(model_path, rows):
    """Each trained token has the logprob that the model gives it there."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for tokens, masks, logprobs in zip(rows["tokens"], rows["masks"], rows["inference_logprobs"], strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        for place in (place for place, mask in enumerate(masks) if mask != -100):
            assert masks[place] == tokens[place]
            assert expected[place - 1, tokens[place]].item() == pytest.approx(logprobs[place], abs=1e-3)


def test_session_survives_kills_of_its_server(model_path, sessions):
    """While a turn is sampled, and at the end; the client's library only sees an outage."""
    opened = sessions.call("open", sampling={"temperature": 1.0})
    client = openai.OpenAI(base_url=f"{opened.base_url}/v1", api_key=opened.api_key, max_retries=8)
    messages = [{"role": "user", "content": "12 and 7?"}]
    for turn in range(4):
        if turn == 2:
            killer = threading.Timer(0.02, sessions.restart)
            killer.start()
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
    killer.join()
    state = sessions.call("end", opened.id, reward=1.0)
    assert (state["turns"], state["rows"], state["forks"], state["reward"]) == (4, 1, {}, 1.0)
    sessions.restart()
    rows = sessions.call("rows", opened.id)
    assert len(rows["tokens"]) == 1 and sum(mask != -100 for mask in rows["masks"][0]) == state["sampled"]
    check_logprobs(model_path, rows)


@pytest.fixture
def collected(monkeypatch):
    """(group, counts) of an item of the environment of programs, without the adapter; a plain BaseEnv."""

    def collected(model_path, sessions, item, **fields):
        monkeypatch.setenv(API_KEY_VARIABLE, KEY)
        fields = {"group_size": 3, "parallel": None, "max_tokens": 40, "max_token_length": 250} | fields
        env = program_env(sessions.folder, model_path, sessions, [item] * 2, **fields)

        async def collect():
            await env.setup()
            return await env.collect_trajectories(await env.get_next_item())

        return asyncio.run(collect())[0], env.report.counts

    return collected


PROGRAM = """
import json, os
from openai import OpenAI
item = json.loads(os.environ["ATROPOS_ITEM"])
assert not os.environ["ATROPOS_API_KEY"] and not os.listdir(".")
client = OpenAI()
reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": item["question"]}])
print(json.dumps({"reward": item["reward"]}))
"""


def test_session_programs_give_a_group_of_what_was_sampled(model_path, sessions, collected):
    command = f"{sys.executable} -c {shlex.quote(PROGRAM)}"
    group, counts = collected(model_path, sessions, {"question": "12 and 7?", "reward": 0.5}, command=command)
    assert group["scores"] == [0.5] * 3
    trained = sum(mask != -100 for masks in group["masks"] for mask in masks)
    assert (counts["sessions/sampled"], counts["sessions/retries"]) == (trained, 0)
    overrides = group["group_overrides"]
    assert (overrides["trajectory"], overrides["group_size"]) == ([0, 1, 2], 3)
    assert overrides["sampling_params"] == [[{"temperature": 1.0}]] * 3
    check_logprobs(model_path, group)


@pytest.mark.parametrize("name", ["solver.py", "tools_chat.py", "tools_messages.py", "tools_responses.py", "function"])
def test_session_examples_are_rewarded_as_they_are(tmp_path, monkeypatch, collected, name):
    """Their clients and their calculator are real; the policy says what solves the problem."""
    command = {"command": f"{sys.executable} {EXAMPLES / name}"}
    way = {"agent": "openai_function:solve"} if name == "function" else command
    monkeypatch.syspath_prepend(EXAMPLES)
    tokenizer, uses_tool = chat_tokenizer(), name.startswith("tools")
    tokenizer.save_pretrained(tmp_path / "model")
    policy = ScriptedPolicy(tokenizer, script=[CALL] * uses_tool + [r"\boxed{19}"])
    policy.split = lambda text: tokenizer.encode(text)
    with Sessions(tmp_path, policy) as sessions:
        fields = {"group_size": 1, "max_tokens": None, "max_token_length": 1000} | way
        group, counts = collected(tmp_path / "model", sessions, {"question": "12 and 7?", "answer": "19"}, **fields)
    assert group["scores"] == [1.0]
    trained = [mask for mask in group["masks"][0] if mask != -100]
    assert trained == [token for _, tokens, _ in policy.sampled for token in tokens]
    assert (counts["sessions/turns"], counts["sessions/with_calls"]) == (1 + uses_tool, uses_tool)


def test_session_requests_wait_while_weights_are_pushed(model_path, server, sessions):
    """The reply has the version of the new weights alone, and their logprobs."""
    opened = sessions.call("open", sampling={"temperature": 1.0})
    client = openai.OpenAI(base_url=f"{opened.base_url}/v1", api_key=opened.api_key, max_retries=0)
    messages = [{"role": "user", "content": "12 and 7?"}]
    ask = partial(client.chat.completions.create, model="policy", messages=messages, max_tokens=8)

    async def push(served):
        await served.pause("auto")
        waiting = asyncio.create_task(asyncio.to_thread(ask))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await served.update_weights_from_disk(model_path, "7", flush_cache=False)
        await served.resume()
        return await waiting

    reply = call(server, push)
    assert {span["version"] for span in reply.weight_versions} == {"7"}
    state = sessions.call("end", opened.id, reward=1.0)
    rows = sessions.call("rows", opened.id)
    assert (state["turns"], state["retries"]) == (1, 0)
    assert (rows["policy_version_min"], rows["policy_version_max"]) == ([7], [7])
    check_logprobs(model_path, rows)
    call(server, lambda served: served.update_weights_from_disk(model_path, "default"))


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"command": "echo done"}, "no_reward"),
        ({"command": "echo 1.5"}, "no_turn"),
        ({"command": "sh -c 'sleep 321 & sleep 322'", "time_limit": 1.0}, "seconds"),
    ],
)
def test_session_that_fails_is_repeated_once_and_left_out(model_path, sessions, collected, fields, cause):
    group, counts = collected(model_path, sessions, {}, **fields)
    told = ("sessions/failed", "sessions/left_out", "sessions/ended")
    counts = {name: n for name, n in counts.items() if group is None and name.startswith(told)}
    assert counts == {f"sessions/failed/{cause}": 6, "sessions/left_out": 3, "sessions/ended": 6}
    assert not [p for p in psutil.process_iter(["cmdline"]) if set(p.info["cmdline"] or ()) & {"321", "322"}]
