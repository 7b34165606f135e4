"""What is trained on is what the policy sampled, whatever happens to the text: environments on a real server."""

import asyncio
import itertools

import psutil
import pytest
from atroposlib.envs.base import ScoredDataItem
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from transformers import AutoTokenizer

from helpers.sampled import END, I, Scripted, assert_as_sampled, make, make_drifting_model, round_of
from helpers.sglang import running_sglang
from recipe.atropos.data.reading import read_groups
from recipe.atropos.data.rows import RowLimits, trained_spans
from recipe.atropos.data.sampling import SamplingCheck, SamplingMismatch
from recipe.atropos.inference.client import InferenceError, SGLangClient

KEY = "x"  # which every environment here is made with


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_drifting_model(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="module")
def url(model_path):
    with running_sglang(model_path, max_total_tokens=8192, api_key=KEY) as (service, url):
        members = service.members()
        assert len(members) >= 3  # server, scheduler, detokenizer
        yield url
    assert service.poll() is not None
    assert all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in members)


@pytest.fixture
def replies(monkeypatch):
    """The token lists of all replies of /generate."""
    seen, generate = set(), SGLangClient.generate

    async def spy(self, **kwargs):
        answer = await generate(self, **kwargs)
        for reply in answer if isinstance(answer, list) else [answer]:
            seen.add(tuple(token for _, token, *_ in reply["meta_info"].get("output_token_logprobs") or ()))
        return answer

    monkeypatch.setattr(SGLangClient, "generate", spy)
    return seen


class ManagedTurns(Scripted):
    """Three turns on a managed server; the last one of two samples."""

    how = "chat"

    async def collect_trajectory(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages = [{"role": "user", "content": "go"}]
            for turn in range(3):
                if self.how == "chat":
                    answer = await managed.chat_completion(messages=messages, max_tokens=60, n=1 + turn // 2)
                    text = answer.choices[0].message.content
                else:
                    prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                    answer = await managed.completion(prompt=prompt, max_tokens=60, n=1 + turn // 2)
                    text = answer.choices[0].text
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]
            return managed.get_state()["nodes"]

    async def collect_trajectories(self, item):
        nodes = await asyncio.gather(*(self.collect_trajectory(item) for _ in range(2)))
        self.nodes = sum(nodes, [])
        rows = [{"tokens": node.tokens, "masks": node.masked_tokens} for node in self.nodes]
        return self.group(rows, inference_logprobs=[node.logprobs for node in self.nodes]), []


class ManagedTextTurns(ManagedTurns):
    how = "text"


@pytest.mark.parametrize("script", [ManagedTurns, ManagedTextTurns])
def test_managed_server_turns_are_the_sampled_tokens(script, model_path, url, replies):
    env = make(script, model_path, url)
    group = round_of(env)
    assert_as_sampled(group, model_path, replies)
    assert group["tokens"] == [node.tokens for node in env.nodes]  # already so in the nodes
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        assert len(list(trained_spans(masks))) == 3
        assert (END, END) not in set(itertools.pairwise(tokens))
    assert group["group_overrides"]["policy_version_min"] == [-1] * 4  # no trainer pushed


class TextTurns(Scripted):
    """Upstream's games: chat_completion on a dedicated server, stripped texts, tokenize_for_trainer at the end."""

    async def collect_trajectory(self, item):
        messages = [{"role": "user", "content": "go"}]
        async with self.server.dedicated_server() as server:
            for turn in range(3):
                answer = await server.chat_completion(messages=messages, n=1, max_tokens=60, temperature=1.0)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content.strip()})
                messages.append({"role": "user", "content": f"turn {turn}"})
        row = tokenize_for_trainer(self.tokenizer, messages[:-1], train_on_all_assistant_turns=True)
        self.numbers = getattr(self, "numbers", itertools.count())
        return ScoredDataItem(**row, scores=float(next(self.numbers))), []


class ManySamples(Scripted):
    """More samples than the manager asks for at once, as text, each encoded with the prompt by hand."""

    temperature = 1.0

    async def collect_trajectories(self, item):
        messages = [{"role": "user", "content": "go"}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        wanted = {"n": self.config.group_size, "temperature": self.temperature}
        answer = await self.server.completion(prompt=prompt, max_tokens=60, **wanted)
        first = self.tokenizer.encode(prompt)
        texts = [self.tokenizer.encode(choice.text + "<|im_end|>") for choice in answer.choices]
        return self.group([{"tokens": first + text, "masks": [I] * len(first) + text} for text in texts]), []


class RawTurns(Scripted):
    """One text that grows, without a chat template, with replies that end before a stop string."""

    async def collect_trajectory(self, item):
        text = "Q: go\nA:"
        tokens, masks, replies = self.tokenizer.encode(text), [I] * 8, 0
        for _ in range(3):
            answer = await self.server.completion(prompt=text, max_tokens=40, stop=["dc"])
            reply, after = answer.choices[0].text, self.tokenizer.encode(" more\n")
            ids = self.tokenizer.encode(reply)
            text += reply + " more\n"
            tokens, masks, replies = [*tokens, *ids, *after], [*masks, *ids, *[I] * 6], replies + bool(reply.strip())
        self.replies = [*getattr(self, "replies", ()), replies]
        return ScoredDataItem(tokens=tokens, masks=masks, scores=float(len(self.replies))), []


@pytest.mark.parametrize(("named", "trainer"), [(0.5, 1.0), (None, 0.7), (None, None)])
def test_sampling_parameters_are_posted_with_the_tokens(named, trainer, model_path, url, replies, monkeypatch):
    """An environment that names no temperature samples at the trainer's; other requests do not matter."""
    if trainer is not None:
        monkeypatch.setenv("ATROPOS_TEMPERATURE", str(trainer))
    env = make(ManySamples, model_path, url)
    env.temperature = named

    async def evaluate():
        await env.server.completion(prompt="go", max_tokens=5, temperature=0.0, top_p=0.5, split="eval")
        await env.server.completion(prompt="not posted", max_tokens=5, temperature=3.0)

    asyncio.run(evaluate())
    group = round_of(env)
    expected = named or trainer or 1.0
    assert group["group_overrides"]["sampling_params"] == [[{"temperature": expected}]] * 4
    assert_as_sampled(group, model_path, replies, temperature=expected)
    rows, _ = read_groups([group], RowLimits(200, 0))
    check = SamplingCheck(temperature=1.0)
    if expected == 1.0:
        assert check.metrics([row.sampling for row in rows], ["e"] * 4) == {}
    else:
        with pytest.raises(SamplingMismatch, match=f"environment e sampled at temperature {expected}"):
            check.metrics([row.sampling for row in rows], ["e"] * 4)


@pytest.mark.parametrize(("script", "size", "spans"), [(TextTurns, 4, 3), (ManySamples, 10, 1), (RawTurns, 4, None)])
def test_text_encoded_again_is_posted_as_it_was_sampled(script, size, spans, model_path, url, replies):
    env = make(script, model_path, url, group_size=size)
    group = round_of(env)
    assert_as_sampled(group, model_path, replies)
    lengths = [len(list(trained_spans(masks))) for masks in group["masks"]]
    assert sorted(lengths) == ([spans] * size if spans else sorted(env.replies))
    assert env.report.counts["retokenized"] > 0 and env.report.counts["not_sampled"] == 0
    assert env.report.counts["other_context"] == 0


async def test_openai_route_answers_as_before_and_is_counted(model_path, url):
    """Evaluation has its own cache."""
    env = make(Scripted, model_path, url)
    messages = [{"role": "user", "content": "go"}]
    books = env._calls.caches
    chat = await env.server.chat_completion(messages=messages, n=2, max_tokens=9, extra_body={"ignore_eos": True})
    longer = await env.server.chat_completion(messages=messages, extra_body={"min_tokens": 130}, split="eval")
    assert longer.usage.completion_tokens > 130  # as OpenAI's default
    plain = await env.server.chat_completion(messages=messages, n=2, max_tokens=9, logprobs=True)
    assert len(books["train"]) == 2
    text = await env.server.completion(prompt="go", max_tokens=5, temperature=0.0, split="eval")
    with_plain = await env.server.completion(prompt="go", max_tokens=5, temperature=0.0, logprobs=1, split="eval")
    async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
        answer = await managed.chat_completion(messages=messages, max_tokens=5, split="eval")
        turns = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}, *messages]
        await managed.chat_completion(messages=turns, max_tokens=5, split="eval")
        assert len(managed.get_state()["nodes"]) == 1  # the second turn went on from the first
    assert (len(books["train"]), len(books["eval"])) == (2, 4)
    assert type(chat) is type(plain) and type(text) is type(with_plain)
    found = [(choice.index, choice.finish_reason, choice.message.role) for choice in chat.choices]
    assert found == [(0, "length", "assistant"), (1, "length", "assistant")]
    assert chat.usage.completion_tokens == 18 and chat.usage.prompt_tokens == plain.usage.prompt_tokens
    assert text.choices[0].text == with_plain.choices[0].text
    assert text.usage.total_tokens == with_plain.usage.total_tokens == text.usage.prompt_tokens + 5
    assert plain.choices[0].logprobs is not None and env.report.counts["plain_route/logprobs"] == 3


@pytest.mark.parametrize("route", ["exact", "plain"])
async def test_aborted_samples_are_asked_for_again(route, model_path, url):
    env = make(Scripted, model_path, url)
    asked = {"n": 4, "max_tokens": 400, "extra_body": {"ignore_eos": True}, "logprobs": route == "plain"}
    messages = [{"role": "user", "content": "go"}]
    task = asyncio.create_task(env.server.chat_completion(messages=messages, **asked))
    client = SGLangClient(url, KEY)
    while not task.done() and not env.report.counts["aborted_samples"]:
        await asyncio.sleep(0.3)
        await client.pause("abort")
        await client.resume()
    answer = await task
    assert env.report.counts["aborted_samples"] > 0
    assert [(c.index, c.finish_reason) for c in answer.choices] == [(i, "length") for i in range(4)]
    assert answer.usage.completion_tokens >= 400
    if route == "exact":
        assert len(env._calls.caches["train"]) == 4


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_wrong_key_is_named(url, key):
    client = SGLangClient(url, key)
    for call in (client.model_info, client.flush_cache, client.capabilities):
        with pytest.raises(InferenceError, match="HTTP 401.*API key") as error:
            await call()
        assert error.value.status == 401
