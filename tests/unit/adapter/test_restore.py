"""Groups as they are sent: collected from single trajectories, restored to what was sampled, refused by name."""

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ScoredDataItem
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers.sampled import END, I, Scripted, chat, make, sampled
from recipe.atropos.adapter.adapted_env import adapt
from recipe.atropos.adapter.restore import group_of, restore_group
from recipe.atropos.adapter.settings import AdapterSettings
from recipe.atropos.credit.group import Credit, CreditError, give_credit
from recipe.atropos.inference.client import InferenceError


@pytest.mark.parametrize(("wandb_name", "name"), [("mine", "mine"), (None, "scripted")])
def test_reports_have_the_name_of_the_environment(wandb_name, name, drifting_model):
    config = BaseEnvConfig(tokenizer_name=str(drifting_model), wandb_name=wandb_name, use_wandb=False)
    server = APIServerConfig(model_name=str(drifting_model), base_url="http://127.0.0.1:1/v1", api_key="x")
    assert adapt(Scripted)(config, [server]).report.name == name


def posted(env, group):
    """What is sent of it."""
    env.sent = None
    asyncio.run(env.handle_send_to_api(group))
    return env.sent


def test_restore_refuses_a_group_that_nobody_sampled(drifting_model, caplog):
    env = make(Scripted, drifting_model)
    prompt, gold = chat(env.tokenizer, "go"), chat(env.tokenizer, "go", "dec", add_generation_prompt=False)
    reply = sampled(env._calls.caches["train"], prompt, "a", "b", END)
    text = chat(env.tokenizer, "go", "ab", add_generation_prompt=False)
    rows = [{"tokens": ids, "masks": [I] * len(prompt) + ids[len(prompt) :]} for ids in (text, gold, gold, gold)]
    first, *others = posted(env, env.group(rows))["masks"]
    assert first == [I] * len(prompt) + reply.tokens.tolist() + [I]
    assert all(set(masks) == {I} and len(masks) == len(gold) for masks in others)
    assert env.report.counts["not_sampled"] == 3
    assert posted(env, unsampled := env.group(rows[1:] + rows[1:2])) is None
    assert env.report.counts["not_sent/not_sampled"] == 1
    assert "none of its 4 sequences has a whole reply of an SGLang server" in caplog.text
    assert len(posted(env, [env.group(rows), unsampled, None])) == 1
    assert env.report.counts["not_sent/not_sampled"] == 2
    for number, masks in enumerate((gold[1:], [*gold, I]), 1):
        rows[2] = {"tokens": gold, "masks": masks}
        assert posted(env, env.group(rows)) is None and env.report.counts["not_sent/unequal_lengths"] == number
    assert posted(env, ScoredDataGroup(tokens=[], masks=[], scores=[])) is None
    assert env.report.counts["not_sent/empty_group"] == 1


def test_restored_turns_are_those_that_group_overrides_counts(drifting_model):
    """Where a whole turn is not trained on, what the environment says of its second turn would go to the third."""
    env = make(Scripted, drifting_model)
    env.adapter_settings = AdapterSettings(credit="{}")
    prompt = chat(env.tokenizer, "go")
    reply = sampled(env._calls.caches["train"], prompt, "a", "b", END).tokens.tolist()
    ids = prompt + reply + prompt[:2] + env.tokenizer.encode("dec")
    masks = [I] * len(prompt) + reply + [I] * 2 + ids[len(prompt) + len(reply) + 2 :]
    group = env.group([{"tokens": ids, "masks": masks}] * 4)
    assert posted(env, group) and env.report.counts["not_sampled"] == 4
    group["group_overrides"] = {"turn_values": [[0.5, 0.25]] * 4}
    assert posted(env, group) is None and env.report.counts["not_sent/partial_reply"] == 1
    env.adapter_settings = AdapterSettings()
    assert posted(env, group), "nobody reads them"


def test_branches_need_credit_or_advantages_of_their_own(drifting_model):
    env = make(Scripted, drifting_model)
    prompt = chat(env.tokenizer, "go")
    ids = prompt + sampled(env._calls.caches["train"], prompt, "a", "b", END).tokens.tolist()
    group = env.group([{"tokens": ids, "masks": [I] * len(prompt) + ids[len(prompt) :]}] * 4)
    group["group_overrides"] = {"branches": [None] * 4}
    assert posted(env, group), "none of them branches"
    group["group_overrides"] = {"branches": [None, [0, 1], None, None]}
    assert posted(env, group | {"advantages": [[1.0] * len(ids)] * 4}), "the environment has compared them"
    with pytest.raises(CreditError, match="give environment.credit, which compares them"):
        posted(env, group)


RELEASED = threading.Event()


def hangs(item, text):
    if item != "good":
        RELEASED.wait(60)
    return 0.0


def test_values_that_hang_keep_no_others_waiting(monkeypatch, tokenizer):
    """Neither the values of other groups, nor what else takes a thread."""
    monkeypatch.setattr("recipe.atropos.credit.group._SECONDS", 5.0)
    credit = Credit(method="mt_grpo", values=f"{__name__}:hangs")

    def given(item):
        rows = [[1, 2, 3, 4]] * 2
        group = {"tokens": rows, "masks": [[I, 2, I, 4]] * 2, "scores": [0.0, 1.0]}
        return give_credit(group, credit, tokenizer, item)

    async def credited():
        RELEASED.clear()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        hanging = [asyncio.create_task(given("bad")) for _ in range(3)]
        await asyncio.sleep(0.1)
        await given("good")
        assert await asyncio.wait_for(asyncio.to_thread(int, 7), 3) == 7 and not any(each.done() for each in hanging)
        RELEASED.set()
        await asyncio.gather(*hanging)

    asyncio.run(credited())


def test_values_that_hang_cost_their_group_and_are_named(drifting_model, monkeypatch, caplog):
    RELEASED.clear()
    monkeypatch.setattr("recipe.atropos.credit.group._SECONDS", 0.1)
    env = make(Scripted, drifting_model)
    env.adapter_settings = AdapterSettings(credit=json.dumps({"method": "mt_grpo", "values": f"{__name__}:hangs"}))
    prompt = chat(env.tokenizer, "go")
    ids = prompt + sampled(env._calls.caches["train"], prompt, "a", "b", END).tokens.tolist()
    assert posted(env, env.group([{"tokens": ids, "masks": [I] * len(prompt) + ids[len(prompt) :]}] * 4)) is None
    assert env.report.counts["not_sent/no_group"] == 1
    assert "environment.credit.values: no values within 0.1 s" in caplog.text
    RELEASED.set()


def test_restored_groups_have_a_value_for_each_token(cache, tokenizer, prompt):
    """Also where a reply has more tokens as it was sampled; fields that the group lacks are not added."""
    reply = sampled(cache, prompt, "a", "b", "c", END)
    posted = chat(tokenizer, "go", "abc", add_generation_prompt=False)
    masks = [I] * len(prompt) + posted[len(prompt) :]
    group = {"tokens": [posted] * 2, "masks": [masks] * 2, "scores": [0.0, 1.0]}
    group["advantages"] = [[value] * len(posted) for value in (2.0, 3.0)]
    group["inference_logprobs"] = [None, [-0.1] * len(posted)]
    restore_group(cache, group, Counter(), None)
    assert group["tokens"] == [prompt + reply.tokens.tolist() + posted[-1:]] * 2
    assert group["advantages"] == [[value] * len(group["tokens"][0]) for value in (2.0, 3.0)]
    assert [row[len(prompt) : -1] for row in group["inference_logprobs"]] == [reply.logprobs.tolist()] * 2
    assert group.keys() == {"tokens", "masks", "scores", "advantages", "inference_logprobs", "group_overrides"}


class Single(Scripted):
    """collect_trajectory alone; every third is None."""

    async def collect_trajectory(self, item):
        self.calls = getattr(self, "calls", 0) + 1
        if item == "never" or self.calls % 3 == 0:
            return None, [f"again {self.calls}"]
        tokens = chat(self.tokenizer, "go", "ab", add_generation_prompt=False)
        size = len(tokens)
        return ScoredDataItem(
            tokens=tokens,
            masks=tokens,
            scores=float(self.calls),
            inference_logprobs=[-0.1] * size if self.calls != 2 else None,
            distill_token_ids=[[1]] * size,
            distill_logprobs=[[-0.1]] * size,
            generation_params={"temperature": 1.0},
            overrides={"set_advantage_to_zero": True} if self.calls == 1 else None,
        ), []


def test_collect_each_keeps_fields_and_asks_for_none_again(drifting_model):
    env = make(Single, drifting_model)
    group, backlog = asyncio.run(env.collect_trajectories("item"))
    assert group["scores"] == [1.0, 2.0, 4.0, 5.0] and backlog == ["again 3"]
    size = len(group["tokens"][0])
    assert [values and values[0] for values in group["inference_logprobs"]] == [-0.1, None, -0.1, -0.1]
    assert group["distill_token_ids"] == [[[1]] * size] * 4 and group["distill_logprobs"] == [[[-0.1]] * size] * 4
    assert group["generation_params"] == {"temperature": 1.0} and group["ref_logprobs"] == []
    assert group["overrides"] == [{"set_advantage_to_zero": True}, {}, {}, {}]
    group, backlog = asyncio.run(env.collect_trajectories("never"))
    assert group is None and len(backlog) == 12
    assert env.report.counts["not_sent/missing_trajectories"] == 1
    assert env.report.counts["trajectories_missing"] == 1 + 3 * 4


def test_fields_that_only_some_trajectories_have_are_an_error():
    rows = [
        {"tokens": [1], "masks": [1], "scores": 1.0, "advantages": [1.0]},
        {"tokens": [1], "masks": [1], "scores": 1.0},
    ]
    with pytest.raises(ValueError, match="1 of 2 trajectories have no advantages"):
        group_of(rows)


def test_atroposlib_alone_loses_fields_of_single_trajectories(drifting_model):
    """The reason for an own collect_trajectories: this fails when upstream fixes it."""
    env = make(Single, drifting_model, group_size=2)
    group, _ = asyncio.run(BaseEnv.collect_trajectories(env, "item"))
    assert "inference_logprobs" not in group and "distill_logprobs" not in group


def test_chat_templates_give_lists_again(drifting_model, tokenizer, prompt):
    """Also for tokenizers that an environment makes itself. The last line fails when transformers fixes it."""
    make(Scripted, drifting_model)
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ab"}]
    row = tokenize_for_trainer(AutoTokenizer.from_pretrained(drifting_model), messages)
    assert row["masks"] == [I] * len(prompt) + row["tokens"][len(prompt) :]
    assert set(tokenizer.apply_chat_template(messages, return_dict=True)) >= {"input_ids"}
    assert not isinstance(vars(PreTrainedTokenizerBase)["apply_chat_template"].func(tokenizer, messages), list)


def test_a_server_that_cannot_be_reached_is_named(drifting_model):
    """tenacity's RetryError has no text; completion is tried thrice."""
    env = make(Scripted, drifting_model)
    with pytest.raises(InferenceError, match="http://127.0.0.1:1/generate: cannot connect"):
        asyncio.run(env.server.completion(prompt="go", max_tokens=5))


def test_only_the_missing_samples_are_asked_for_again(drifting_model):
    """The server's aborts end all samples at once, so what it answers is scripted here."""
    env, asked = make(Scripted, drifting_model), []
    answers = iter([["stop", "abort", "length", "abort"], ["stop", "abort"], ["stop"]])

    async def plain(n, **kwargs):
        asked.append(n)
        return SimpleNamespace(choices=[SimpleNamespace(index=0, finish_reason=reason) for reason in next(answers)])

    answer = asyncio.run(env._calls.text(env.server.servers[0], plain, prompt="go", n=4, logprobs=1))
    assert asked == [4, 2, 1] and env.report.counts["aborted_samples"] == 3
    found = [(choice.index, choice.finish_reason) for choice in answer.choices]
    assert found == [(0, "stop"), (1, "length"), (2, "stop"), (3, "stop")]
