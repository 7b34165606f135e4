"""Conversations with the calculator, from a real SGLang through a real API to the trainer, against what was sent."""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import ClassVar

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web
from anyio.from_thread import start_blocking_portal
from transformers import AutoTokenizer

from helpers.launchers import environment_process
from helpers.sglang import running_sglang
from helpers.trainer import running, trainer_config
from helpers.trajectory_api import running_trajectory_api
from recipe.atropos.data.rows import trained_spans
from recipe.atropos.demo.policies import CalculatorRecipe, demonstration
from recipe.atropos.demo.small_policy import make_small_policy
from recipe.atropos.environments.calculator_tool import answer
from recipe.atropos.environments.word_problems import SYNTHETIC_STEPS, generate
from recipe.atropos.inference.sampled import versions_of
from recipe.atropos.run.record import read_metrics
from recipe.atropos.trajectory_api import records
from recipe.atropos.utils.process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

GROUPS, SIZE, STEPS, TURNS, LENGTH = 4, 8, 2, 8, 300
PROBLEMS = [row for row in generate("train", 60, 0, SYNTHETIC_STEPS) if row["answer"].count("<<") == 3][:12]


@dataclass(frozen=True)
class ByHeart(CalculatorRecipe):
    """In seconds: the test's problems by heart, every other time with the last call forgotten, or one malformed."""

    name: ClassVar[str] = "by-heart"

    hidden_size: int = 64
    steps: int = 160
    batch_size: int = 8
    learning_rate: float = 5e-3
    forgotten_call: float = 0.5
    miscopied: float = 0.0
    malformed: float = 0.1

    def chats(self, seed, rng):
        return [demonstration(row, random.Random(f"{row}, {i}"), self) for row in PROBLEMS for i in range(20)]


@contextlib.contextmanager
def on_the_wire(target, hold):
    """(url, replies): a server before ``target`` that keeps each /generate reply; ``hold`` may delay a request."""
    replies = []

    async def forward(request):
        body = await request.read()
        if request.path == "/generate":
            await hold(orjson.loads(body), replies)
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, target + request.path, data=body, headers=request.headers) as reply,
        ):
            answered = await reply.read()
            if request.path == "/generate":
                replies.append(orjson.loads(answered))
            return web.Response(body=answered, status=reply.status, content_type=reply.content_type)

    async def serve():
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    port = free_port()
    with start_blocking_portal() as portal:
        runner = portal.call(serve)
        try:
            yield f"http://127.0.0.1:{port}", replies
        finally:
            portal.call(runner.cleanup)


def until_the_next_version(server, seconds=60):
    """A hold: the seventh and eighth problems' second turns wait for version 1: a push falls between their turns."""
    prompts = []

    async def version():
        async with aiohttp.ClientSession() as session, session.get(f"{server}/model_info") as reply:
            return (await reply.json())["weight_version"]

    async def hold(body, replies):
        ids = body["input_ids"]
        beginning = next((prompt for prompt in prompts if ids[: len(prompt)] == prompt), None)
        if beginning is None:
            prompts.append(ids)
        elif len(ids) > len(beginning) and beginning in prompts[2 * GROUPS - 2 : 2 * GROUPS]:
            deadline = asyncio.get_running_loop().time() + seconds
            while await version() == "0" and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.1)

    return hold


@pytest.fixture(scope="module")
def trained(cluster, tmp_path_factory):
    """(policy, batches of each step, replies, metrics): a run of two steps, with all that happened."""
    folder = tmp_path_factory.mktemp("calculator")
    policy = folder / "policy"
    make_small_policy(policy, recipe=ByHeart())
    (folder / "problems").mkdir()
    for split in ("train", "test"):
        (folder / "problems" / f"{split}.jsonl").write_bytes(b"\n".join(orjson.dumps(row) for row in PROBLEMS))
    with (
        running_sglang(policy) as (_, server),
        running_trajectory_api(folder) as api,
        on_the_wire(server, until_the_next_version(server)) as (wire, replies),
    ):
        options = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024", "trainer.save_freq=-1"]
        options += ["trainer.atropos.max_wait_time=120", "trainer.atropos.max_staleness=1"]
        values = {"groups": GROUPS, "size": SIZE, "steps": STEPS, "api": api.url}
        config = trainer_config(policy, folder / "run", [server], *options, **values)
        flags = {
            "env.rollout_server_url": api.url,
            "env.tokenizer_name": policy,
            "env.dataset_name": folder / "problems",
        }
        flags |= {"env.system_prompt": "", "env.group_size": SIZE, "env.max_num_workers": 2 * GROUPS}
        flags |= {"env.total_steps": 10**6, "env.max_token_length": LENGTH, "env.max_turns": TURNS}
        # What is begun in place of a group of equal scores would wait for those held up.
        flags |= {"env.ensure_scores_are_not_same": "false", "slurm": "false"}
        flags |= {"openai.base_url": f"{wire}/v1", "openai.model_name": policy}
        program = ["-m", "recipe.atropos.environments.calculator"]
        with environment_process(folder, *program, flags=flags), running(config) as trainer:
            trainer.fit()
        stored = [records.read(folder / "data", step) for step in range(1, STEPS + 1)]
        batches = [[orjson.loads(group.to_json()) for group in groups] for groups in stored]
        replies = [one for reply in replies for one in (reply if isinstance(reply, list) else [reply])]
        yield policy, batches, replies, read_metrics(folder / "run")


def rows_of(groups):
    for group in groups:
        overrides = group["group_overrides"]
        for i, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
            versions = overrides["policy_version_min"][i], overrides["policy_version_max"][i]
            yield tokens, masks, group["inference_logprobs"][i], versions


def test_calculator_trains_on_sampled_tokens_alone(trained):
    """Each token has the logprob and the version that the server gave it."""
    _, batches, replies, metrics = trained
    sampled = {}
    for reply in replies:
        values, tokens = zip(*((v, t) for v, t, *_ in reply["meta_info"]["output_token_logprobs"]), strict=True)
        sampled.setdefault((tokens, as_stored(values)), []).append(versions_of(reply["meta_info"]))
    across, of_several = 0, 0
    for step, groups in enumerate(batches, 1):
        rows = list(rows_of(groups))
        assert len(rows) == GROUPS * SIZE == metrics[step - 1]["atropos/rows"]
        for tokens, masks, logprobs, stamped in rows:
            spans = list(trained_spans(masks))
            of_several += len(spans) >= 3
            assert all(masks[a:b] == tokens[a:b] for a, b in spans)
            found = [sampled[tuple(tokens[a:b]), as_stored(logprobs[a:b])] for a, b in spans]
            assert stamped in {(min(v[0] for v in chosen), max(v[1] for v in chosen)) for chosen in _each(found)}
            across += stamped == (0, 1)
            assert {value for value, mask in zip(logprobs, masks, strict=True) if mask == -100} == {1.0}
    assert of_several > STEPS * GROUPS * SIZE / 2, "a call, another one, and the answer; it may forget some"
    assert across, "a push fell between two turns"
    assert metrics[1]["atropos/staleness/max"] == 1
    assert {versions for *_, versions in rows_of(batches[0])} == {(0, 0)}
    assert metrics[0]["atropos/logprob_diff/max"] < 1e-4, "the trainer's own workers"
    assert not any("dropped" in key or "unknown_version" in key or "no_logprobs" in key for key in metrics[-1])


def as_stored(logprobs):
    """As float32: JSON has more digits of a server's, and fewer of a stored batch's."""
    return tuple(np.array(logprobs, np.float32).tolist())


def _each(found):
    """All choices of one version for each turn, where several replies were the same to the last bit."""
    chosen = [[]]
    for versions in found:
        chosen = [[*one, version] for one in chosen for version in set(versions)]
    return chosen


def test_calculator_answers_stand_masked_between_the_turns(trained):
    """Each answer of the tool stands there once."""
    policy, batches, *_ = trained
    tokenizer = AutoTokenizer.from_pretrained(policy)
    chats = {f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n" for row in PROBLEMS}
    errors = whole = 0
    for tokens, masks, _, _ in rows_of(group for groups in batches for group in groups):
        (start, end), *later = trained_spans(masks)
        prompt = tokenizer.decode(tokens[:start])
        [asked] = [text for text in chats if prompt.startswith(text)]
        assert prompt.endswith("<|im_start|>assistant\n")
        whole += prompt == asked  # where a turn is not encoded as it was sampled, those after it stand alone
        for a, b in later:
            said, between = tokenizer.decode(tokens[start:end]), tokenizer.decode(tokens[end:a])
            assert said.endswith("<|im_end|>") and said.count("<|im_end|>") == 1
            reply = answer(said.removesuffix("<|im_end|>"))
            assert between == f"\n<|im_start|>tool\n{reply}<|im_end|>\n<|im_start|>assistant\n"
            errors += reply.startswith("error")
            start, end = a, b
        assert end == len(tokens)
        reply = answer(tokenizer.decode(tokens[start:end]).removesuffix("<|im_end|>"))
        text = tokenizer.decode(tokens)
        turns = text.count("<|im_start|>assistant\n")
        if reply is not None and turns < TURNS:  # a call that had no room for its answer and another turn
            more = tokenizer.encode(f"\n<|im_start|>tool\n{reply}<|im_end|>\n<|im_start|>assistant\n")
            assert len(tokens) + len(more) >= LENGTH - 1, text
    assert errors, "a malformed call was answered too"
    assert whole > 0.9 * STEPS * GROUPS * SIZE
