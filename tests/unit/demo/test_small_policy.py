"""The policy that is made from scratch."""

import random
import unicodedata
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.atropos.demo import small_policy
from recipe.atropos.demo.policies import STEPS, TerseRecipe
from recipe.atropos.demo.small_policy import Recipe, _tokenize, ensure_small_policy, make_small_policy

QUICK = Recipe(steps=2, problems=100, batch_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    make_small_policy(path, seed=1, recipe=QUICK)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_a_seed_gives_the_same_weights_and_another_seed_others(folder, tmp_path):
    make_small_policy(tmp_path / "same", seed=1, recipe=QUICK)
    make_small_policy(tmp_path / "other", seed=2, recipe=QUICK)
    first, same, other = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "same", tmp_path / "other")
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(first[name].shape == other[name].shape and torch.equal(first[name], other[name]) for name in first)


def test_weights_are_the_same_by_one_thread_and_by_two(tmp_path, monkeypatch):
    """Bit for bit, in batches as large as the policy's own."""
    recipe, made = replace(QUICK, steps=4, batch_size=Recipe.batch_size), []
    for policy in ("ACTIVE", "PASSIVE"):
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        make_small_policy(tmp_path / policy, seed=1, recipe=recipe)
        made.append(load_file(tmp_path / policy / "model.safetensors"))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@given(st.text(max_size=60))
@example("\uf900")  # which has a canonical form
def test_any_text_survives_the_tokenizer(tokenizer, text):
    """Qwen2's tokenizer takes it in canonical form (NFC)."""
    decoded = tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False)
    assert decoded == unicodedata.normalize("NFC", text)


def test_the_model_is_small_and_loads_as_any_other(folder, tokenizer):
    """Its tokenizer adds nothing, has a token for each digit, and ChatML's template."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() < 5_000_000
    assert model.config.vocab_size >= len(tokenizer) and model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer.encode("2024")) == 4
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


def test_the_cached_policy_is_used_again(tmp_path, monkeypatch):
    made = []

    def make(folder, *of):
        made.append(of)
        folder.mkdir(exist_ok=True)

    monkeypatch.setattr(small_policy, "make_small_policy", make)
    path = ensure_small_policy(tmp_path, seed=3, recipe=QUICK)
    assert ensure_small_policy(tmp_path, seed=3, recipe=QUICK) == path and made == [(3, QUICK)]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "nothing half-made stays"
    assert ensure_small_policy(tmp_path, seed=3, recipe=replace(QUICK, steps=3)) != path and len(made) == 2


def test_terse_policy_is_taught_each_step_equally_seldom(tokenizer):
    recipe = TerseRecipe(problems=8000, further=0.05)
    ends = ["", " so", " so the answer is", r" so the answer is \boxed{"]
    taught, further = Counter(), Counter()
    for _, answer in recipe.chats(0, random.Random(0)):
        shown, said = answer["given"], answer["content"]
        step = max(i for i, end in enumerate(ends) if shown.endswith(end)) if shown else 0
        assert said.startswith(shown)
        taught[step] += 1
        if step < 3:
            further[step] += STEPS[step + 1] in said.removeprefix(shown)
        assert (r"\boxed{" in said) == said.endswith("}")
    assert taught[0] == pytest.approx(4000, rel=0.1) and min(taught.values()) > 1200
    for step in range(3):
        assert further[step] / taught[step] == pytest.approx(0.05, abs=0.02)


def test_what_is_given_of_an_answer_is_not_taught(tokenizer):
    answer = {"role": "assistant", "content": "1 + 2 = 3 so 3", "given": "1 + 2 = 3 so"}
    ids, labels = _tokenize(tokenizer, [{"role": "user", "content": "1 + 2?"}, answer])
    start = len(ids) - len(tokenizer.encode(" 3<|im_end|>"))
    assert labels == [-100] * start + ids[start:]
    assert tokenizer.decode(ids[start:]) == " 3<|im_end|>"
    assert tokenizer.decode(ids).endswith("assistant\n1 + 2 = 3 so 3<|im_end|>")
