"""The calculator and its environment's own rules; conversations with a real server are in test_calculator_rollouts."""

import asyncio
import random
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.atropos.demo.policies import CalculatorRecipe, demonstration
from recipe.atropos.environments.calculator import CalculatorEnv, tool_answers
from recipe.atropos.environments.calculator_tool import LARGEST, CalculatorError, answer, calculate
from recipe.atropos.environments.word_problems import SYNTHETIC_STEPS, generate, gold_answer


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("\t (1+2)*-3\n", "-9"),
        ("1,234,567.5 * 2", "2469135"),
        ("1 / 3", "0.3333333333"),
        ("0.1 + 0.2", "0.3"),
        ("9" * 30 + " - " + "9" * 30, "0"),
    ],
)
def test_an_expression_has_its_exact_value(expression, value):
    assert calculate(expression) == value


ERRORS = {
    "division by zero": ["1 / (2 - 2)", "1 / (0.3 - 0.1 - 0.2)"],  # the second not so in floats
    "too large": ["9" * 49 + "*" + "9" * 49, f"{LARGEST} + 1"],
    "too long": ["+".join("1" * 60)],
    "not an expression": ["", "412 +", "007", "(" * 99, "1\n+2"],
    "only numbers": ["9 ** 9 ** 9 ** 9", "7 // 2", "3(4)", "1,23", "__import__('os')", "\u0661 + \u0662", "1 + 1\0"],
}


@pytest.mark.parametrize(("message", "expression"), [(message, one) for message in ERRORS for one in ERRORS[message]])
def test_calculator_errors_repeat_no_words_of_the_policy(message, expression):
    with pytest.raises(CalculatorError, match=f"^{message}"):
        calculate(expression)
    assert answer(f"<call>{expression}</call>").startswith(f"error: {message}")


_NUMBERS = st.integers(0, 9999).map(str)
_EXPRESSIONS = st.recursive(
    _NUMBERS, lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({' '.join(parts)})")
)


@given(_EXPRESSIONS)
def test_any_expression_has_the_value_of_exact_fractions(expression):
    exact = re.sub(r"(\d+)", r"Fraction(\1)", expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
        value = calculate(expression)
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="zero|too long"):
            calculate(expression)
        return
    except CalculatorError as error:
        assert str(error) in ("too long", "too large") and (len(expression) > 100 or abs(expected) > LARGEST)
        return
    assert value == str(expected) if expected.denominator == 1 else float(value) == pytest.approx(float(expected))


@given(st.text("<call>/1+ ()\\boxed{}\n\0x9*", max_size=80) | st.text(max_size=80))
def test_no_text_is_an_exception_and_only_calls_are_answered(text):
    reply = answer(text)
    assert (reply is None) == ("<call>" not in text and "</call>" not in text)
    assert answer(f"<call>{text}</call>") is not None


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("So <call>1+1</call>", "2"),
        (r"<call>1+1</call> and <call>2*3</call> \boxed{8}", "2\n6"),
        ("<call>1+</call><call>1+1</call>", "error: not an expression\n2"),
        ("<call>1+1", "error: write <call>expression</call>"),
        ("1+1</call>", "error: write <call>expression</call>"),
        ("<call><call>1+1</call>", "2\nerror: write <call>expression</call>"),
        (r"\boxed{2}", None),
        ("", None),
    ],
)
def test_calculator_answers_each_call_of_a_turn_in_order(text, reply):
    assert answer(text) == reply


def demonstrations(**flaws):
    recipe = CalculatorRecipe(**{"forgotten_call": 0.0, "miscopied": 0.0, "malformed": 0.0, **flaws})
    rows = generate("train", 200, 0, SYNTHETIC_STEPS)
    return [(row, demonstration(row, random.Random(0), recipe)) for row in rows]


@pytest.mark.parametrize("flaw", ["forgotten_call", "miscopied", "malformed"])
def test_each_flaw_is_what_it_is_called(flaw):
    """Without flaws, every demonstration calls once a step, and boxes the gold answer."""
    for row, chat in demonstrations():
        assert [m["role"] for m in chat] == ["user", *["assistant", "tool"] * row["answer"].count("<<"), "assistant"]
        assert chat[-1]["content"] == rf"\boxed{{{gold_answer(row)}}}"
    for row, chat in demonstrations(**{flaw: 1.0}):
        steps, calls = row["answer"].count("<<"), [m["content"] for m in chat if m["role"] == "tool"]
        assert len(calls) == {"forgotten_call": 2, "miscopied": steps, "malformed": 2 * steps}[flaw]
        assert sum(text.startswith("error") for text in calls) == (steps if flaw == "malformed" else 0)
    wrong = sum(chat[-1]["content"] != rf"\boxed{{{gold_answer(row)}}}" for row, chat in demonstrations(**{flaw: 1.0}))
    assert wrong == 0 if flaw == "malformed" else wrong > 100


@pytest.fixture
def env(make_env):
    sizes = {"group_size": 2, "max_token_length": 200, "train_size": 20, "eval_size": 20}
    return make_env(CalculatorEnv, dataset_name=SYNTHETIC_STEPS, **sizes)


def test_calculator_scores_have_no_length_penalty(env, node):
    """Right is 1 in the units of the turns' values, however long."""
    problem = env.train[0]
    right = rf"\boxed{{{gold_answer(problem)}}}"
    nodes = [node(env, right, prompt=150), node(env, "<call>1 + 1</call>", right, prompt=180)]
    assert min(len(each.tokens) for each in nodes) > 100
    assert asyncio.run(env.scores(problem, [right, right], nodes)) == [1.0, 1.0]
    assert asyncio.run(env.scores(problem, [right, ""], nodes)) == [1.0, -1.0]


def test_calculator_environment_tells_the_policy_of_its_tool(env):
    assert env.train == generate("train", 20, 0, SYNTHETIC_STEPS) and env.test == generate(
        "test", 20, 0, SYNTHETIC_STEPS
    )
    system, user = env.messages(env.train[0])
    assert system["role"] == "system" and answer(re.search("<call>.*</call>", system["content"])[0]) == "509"
    assert user == {"role": "user", "content": env.train[0]["question"]}


def test_only_what_the_last_turn_boxes_counts(env, node):
    nodes = [node(env, r"\boxed{7} <call>1+1</call>", "two"), node(env, "<call>1+1</call>", r"\boxed{7}")]
    group = asyncio.run(env.score({"question": "?", "answer": "#### 7"}, nodes))
    assert group["scores"] == [-1.0, 1.0]


def test_calculator_turns_share_the_room_for_tokens(env, node):
    """Tokens that a policy spends beyond the usual shorten its later turns."""
    said = "<call>1+1</call>"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    usual = node(env, said)
    assert env._tokens_beyond(messages, usual) == 0
    usual.masked_tokens += [7] * 4
    assert env._tokens_beyond(messages, usual) == 4
    assert env.answer_tokens(messages, 4) == env.answer_tokens(messages) - 4
    inherited = [*messages[:1], {"role": "assistant", "content": said * 3}, {"role": "tool", "content": "7"}]
    assert env._tokens_beyond([*inherited, messages[1]], usual) == 4, "the source's turns are not of the branch's node"


def test_calculator_answers_are_told_from_the_prompt():
    """What the user's role says after the first answer is the tool's."""
    chat = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "error: b"), ("assistant", "c")]
    messages = [{"role": role, "content": content} for role, content in chat]
    assert tool_answers(messages) == ["error: b"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('user and assistant only') }}", "refuses the role 'tool': user and assistant only"),
        (
            "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
            "leaves out what the role 'tool' says; give --env.tool_role=user",
        ),
    ],
)
def test_calculator_names_a_chat_template_without_tools(env, template, words):
    """Nothing has been sampled by then."""
    env.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=words):
        asyncio.run(env.setup())
    if "raise" not in template:
        env.config.tool_role = "user"
        asyncio.run(env.setup())
