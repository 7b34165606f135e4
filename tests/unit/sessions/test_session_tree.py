"""Every sampled token is trained exactly once, in the context in which it was sampled, whatever clients send."""

import asyncio
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.sessions import TEMPLATES, ScriptedPolicy, chat_tokenizer, check_trained_once, sentencepiece_tokenizer
from recipe.atropos.inference.sampled import SampledReply
from recipe.atropos.sessions.messages import Asked, RequestError
from recipe.atropos.sessions.rendering import Rendering
from recipe.atropos.sessions.session import Session, SessionLimits, State
from recipe.atropos.sessions.store import SessionStore

ADD = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
_numbers = itertools.count()


def opened(tmp_path, **fields):
    session = Session(
        State(id=f"s{next(_numbers)}", created=0.0, **fields), SessionStore(tmp_path / f"{next(_numbers)}.sqlite")
    )
    session.save()
    return session


class Program:
    """Asks one session; ``seen`` holds the histories that it has, replies last."""

    def __init__(self, session, policy, rendering, tools=ADD):
        self.session, self.policy, self.rendering, self.tools = session, policy, rendering, tools
        self.seen = []

    async def ask(self, messages, **fields):
        asked = Asked(messages=messages, tools=self.tools, **fields)
        request = f"{next(_numbers)}".encode()
        number = await self.session.sample(asked, request, self.rendering, self.policy, "policy")
        reply = self.session.recorded(number)
        self.seen.append([*messages, reply.message()])
        return reply


def user(text):
    return {"role": "user", "content": text}


def follow(history, text):
    """The messages after a reply: results of its calls, else a user's."""
    calls = history[-1].get("tool_calls") or []
    return [{"role": "tool", "content": text, "tool_call_id": c["id"], "name": "add"} for c in calls] or [user(text)]


async def run(tmp_path, template, script, thinking="kept", tools=ADD):
    """Let a program hold a conversation of as many turns as the script has."""
    tokenizer = chat_tokenizer(template)
    policy = ScriptedPolicy(tokenizer, script=list(script))
    rendering = Rendering(tokenizer, tool_parser="qwen3", thinking=thinking)
    program, history = Program(opened(tmp_path), policy, rendering, tools), []
    while policy.script:
        history += follow(history, "the sum") if history else [user("the sum of 12 and 7")]
        await program.ask(history)
        history = list(program.seen[-1])
    return program


def checked(program):
    """The summary of its session, of which every sampled token is trained once."""
    check_trained_once(program.policy, program.session.tree)
    return program.session.summary()


def is_one_row(program):
    found = checked(program)
    return found["rows"] == 1 and not found["forks"]


@pytest.mark.parametrize("template", TEMPLATES)
async def test_session_turns_are_one_row_in_every_template(tmp_path, template):
    call = '<tool_call>\n{"name":  "add", "arguments": {"b": 2,"a": 1}}\n</tool_call>'
    script = ["the sum is", f"<think>so 12</think>result: {call}", "19. ", "<think>no</think>and"]
    if template == "thinking_begun":
        script = [text if text.startswith("<think>") else f"so</think>{text}" for text in script]
        script = [text.removeprefix("<think>") for text in script]
    program = await run(tmp_path, template, script)
    assert checked(program) | {"sampled": 0} == {
        "turns": 4, "sampled": 0, "rows": 1, "tools": True, "tool_calls": 1, "repeats": 0, "retries": 0, "forks": {},
    }  # fmt: skip
    tokenizer = program.rendering.tokenizer
    begins = "bos_token" in TEMPLATES[template]
    assert (tokenizer.encode("sum")[0] == tokenizer.bos_token_id) == begins  # it could come twice
    assert tokenizer.decode(program.policy.sampled[-1][0]).count("<tool_call>") == 1
    for prompt, *_ in program.policy.sampled:
        assert [at for at, each in enumerate(prompt) if each == tokenizer.bos_token_id] == [0] * begins


@pytest.mark.parametrize("thinking", ["kept", "as_template"])
async def test_session_repeats_are_calls_made_again(tmp_path, thinking):
    """Also where each history begins anew, and where the session is loaded; a text that comes again is none."""
    call = '<think>so</think><tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
    program = await run(tmp_path, "thinking_stripped", [call % 1, call % 1, call % 2, call % 1, "no", "no"], thinking)
    assert [turn.repeats for turn in program.session.tree.turns] == [False, True, False, False, False, False]
    loaded = Session.load(program.session.store, program.session.state.id).summary()
    assert (loaded["tools"], loaded["tool_calls"], loaded["repeats"]) == (True, 4, 1)
    without = await run(tmp_path, "chatml", ["no"], tools=None)
    assert not Session.load(without.session.store, without.session.state.id).summary()["tools"]


async def test_session_bridge_is_what_the_template_writes(tmp_path):
    """Where a text is encoded as it was sampled, the bridged prompt is the template's own. Left out are templates that
    write a history otherwise than what a reply is sampled after.
    """
    changing = {"thinking_begun", "tools_in_last_user_message", "alternating", "no_generation_prompt"}
    for template in set(TEMPLATES) - changing:
        program = await run(tmp_path, template, [])
        rendering, tokenizer = program.rendering, program.rendering.tokenizer
        program.policy.split = lambda text, tokenizer=tokenizer: tokenizer.encode(text, add_special_tokens=False)
        program.policy.script = ["12", "19"]
        history = [user("sum")]
        await program.ask(history)
        history = [*program.seen[-1], user("and")]
        await program.ask(history)
        whole = rendering.prompt(history, ADD, {})
        assert tokenizer.decode(program.policy.sampled[-1][0]) == tokenizer.decode(whole), template


async def test_session_bridge_of_sentencepiece_adds_no_space(tmp_path):
    """Which it puts before a text, not before one that stands after a reply."""
    tokenizer = sentencepiece_tokenizer("no_generation_prompt")
    program = Program(opened(tmp_path), ScriptedPolicy(tokenizer), Rendering(tokenizer), tools=None)
    await program.ask([user("sum")], sampling={"max_new_tokens": 1})  # so that no special token ends it
    await program.ask([*program.seen[-1], user("and")])
    (prompt, tokens, _), (then, *_) = program.policy.sampled
    assert tokenizer.decode(then) == tokenizer.decode(prompt + tokens) + "user: and"


async def test_session_thinking_as_template_forks_where_it_is_stripped(tmp_path):
    script = ["<think>so</think>19", "<think>no</think>7"]
    program = await run(tmp_path, "thinking_stripped", script, thinking="as_template")
    assert checked(program)["forks"] == {"thinking_stripped": 1}
    first, second = program.policy.sampled
    assert "so" not in program.rendering.tokenizer.decode(second[0])
    kept = await run(tmp_path, "thinking_kept", script, thinking="as_template")
    assert len(list(kept.session.tree.leaves())) == 1 + (kept.session.summary()["forks"] == {"thinking_stripped": 1})


def qwen3(**fields):
    """Qwen3's own renderer, and a tokenizer that has its tokens."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<|endoftext|>", "<tool_response>", "</tool_response>"])
    return Rendering(tokenizer, renderer="qwen3", **fields)


async def test_session_edits_are_named_where_a_renderer_cannot_bridge(tmp_path):
    """It takes no assistant's message that was not sampled; the thinking that it keeps is not to blame."""
    policy = ScriptedPolicy((rendering := qwen3()).tokenizer, script=["<think>so</think>19", "7", "12"])
    program = Program(opened(tmp_path), policy, rendering)
    await program.ask([user("sum")])
    await program.ask([*program.seen[-1], user("and?")])
    await program.ask([*program.seen[-1][:-1], {"role": "assistant", "content": "another"}, user("and?")])
    assert checked(program)["forks"] == {"message_edited": 1}


def test_session_fields_that_a_template_lacks_have_no_effect():
    """As OpenAI's ``reasoning_effort``, which clients send to any model."""
    rendering, asked = qwen3(), [user("sum")]
    assert rendering.prompt(asked, None, {"reasoning_effort": "low"}) == rendering.prompt(asked, None, {})
    assert rendering.prompt(asked, None, {"enable_thinking": False}) != rendering.prompt(asked, None, {})


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda h: [user("another sum"), *h[1:]], "message_edited"),
        (lambda h: [h[0], {**h[1], "content": "another"}, *h[2:]], "message_edited"),
        (lambda h: [h[0], h[-1]], "compaction"),
    ],
)
async def test_session_changed_histories_fork_and_say_why(tmp_path, change, cause):
    program = await run(tmp_path, "chatml", ["the sum", "is", "19"])
    await program.ask([*change(program.seen[-1]), user("and?")])
    assert checked(program)["forks"] == {cause: 1}


async def test_session_replies_follow_each_other(tmp_path):
    """As OpenAI's API has it, of agents that take over where another has answered; where a renderer cannot bridge it,
    this is counted.
    """
    for template, forks in (("chatml", {}), ("qwen3", {"other": 1})):
        rendering = qwen3() if template == "qwen3" else Rendering(chat_tokenizer(), tool_parser="qwen3")
        policy = ScriptedPolicy(rendering.tokenizer, script=["the sum", "is"])
        program = Program(opened(tmp_path), policy, rendering)
        await program.ask([user("sum")])
        await program.ask(program.seen[-1])
        assert checked(program)["forks"] == forks
        written = rendering.tokenizer.decode(policy.sampled[-1][0])
        assert written.endswith("the sum<|im_end|>\n<|im_start|>assistant\n")


async def test_session_calls_that_clients_write_anew_are_recognized(tmp_path):
    call = '<tool_call>\n{"name":  "add", "arguments": {"b": 2,"a": 1}}\n</tool_call>'
    program = await run(tmp_path, "chatml", [call])
    history = program.seen[-1]
    [mine] = history[-1]["tool_calls"]
    same = {**mine, "id": "other", "function": {"name": "add", "arguments": '{"a":1.0, "b":2}'}}
    other = {**mine, "function": {"name": "add", "arguments": '{"a": 5}'}}
    for written, content in ((same, ""), (other, ""), (mine, "so")):
        changed = [*history[:-1], {**history[-1], "content": content, "tool_calls": [written]}]
        await program.ask([*changed, {"role": "tool", "content": "3", "tool_call_id": written["id"]}])
    assert checked(program)["forks"] == {"tool_call_changed": 1, "message_edited": 1}
    assert program.session.tree.turns[1].parent is program.session.tree.turns[0]


async def test_session_replies_that_are_empty_are_trained(tmp_path):
    """The policy says nothing but its end; the conversation goes on after it, in one row."""
    program = await run(tmp_path, "chatml", ["", "19", ""])
    assert is_one_row(program)
    assert [history[-1]["content"] for history in program.seen] == ["", "19", ""]
    assert [len(tokens) for _, tokens, _ in program.policy.sampled][::2] == [1, 1]


async def test_session_goes_on_after_a_truncation_within_a_tool_call(tmp_path):
    """What was sampled of the call stays, as content that the client sends back, and is trained."""
    program = await run(tmp_path, "chatml", [])
    program.policy.script = ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "19"]
    history = [user("sum")]
    reply = await program.ask(history, sampling={"max_new_tokens": 5})
    assert (reply.finish, reply.calls, len(reply.tokens)) == ("length", (), 5)
    assert reply.content.startswith('{"')
    await program.ask([*program.seen[-1], user("and?")])
    assert is_one_row(program)


@pytest.mark.parametrize("prompt", ["text", "ids"])
async def test_session_prompts_that_go_on_after_a_reply_are_one_row(tmp_path, prompt):
    program = await run(tmp_path, "chatml", [])
    tokenizer, policy = program.rendering.tokenizer, program.policy
    policy.script = ["the sum is", "19", "no"]

    async def ask(given):
        asked = Asked(prompt=given)
        return program.session.recorded(await program.session.sample(asked, b"", program.rendering, policy, ""))

    first, then = "<|im_start|>user\n12 and 7", "<|im_end|>\n<|im_start|>user\n result: "
    if prompt == "text":
        said = (await ask(first)).content
        await ask(first + said + then)
        await ask(first + said + "no end")  # after a reply that had one: a history of its own
    else:
        encode = tokenizer.encode
        reply = await ask(encode(first))
        await ask(encode(first) + reply.tokens + encode(then))
        await ask(encode(first) + reply.tokens[:-1] + encode("no"))
    assert checked(program)["forks"] == {"other": 1}
    assert [len(leaf.turns) for leaf in program.session.tree.leaves()] == [2, 1]


async def test_session_texts_that_clients_render_have_one_bos(tmp_path):
    """The template writes it, and the tokenizer before any text."""
    program = await run(tmp_path, "bos", ["the sum"], tools=None)
    tokenizer, session = program.rendering.tokenizer, program.session
    text = tokenizer.apply_chat_template([user("the sum of 12 and 7")], tokenize=False, add_generation_prompt=True)
    for prompt in (text, text.removeprefix(tokenizer.bos_token)):
        await session.sample(Asked(prompt=prompt), b"", program.rendering, program.policy, "")
    first, *others = (prompt for prompt, *_ in program.policy.sampled)
    assert others == [first, first] and first.count(tokenizer.bos_token_id) == 1


async def test_session_texts_go_on_where_a_limit_ended_a_reply(tmp_path):
    program = await run(tmp_path, "chatml", [])
    program.policy.script = ["the sum of 12 and 7", " is 19", "no"]
    text = "sum"
    for size in (2, 2, 9):
        asked = Asked(prompt=text, sampling={"max_new_tokens": size})
        number = await program.session.sample(asked, b"", program.rendering, program.policy, "")
        text += program.session.recorded(number).content
    assert checked(program)["rows"] == 1 and program.session.rows()["turn_numbers"] == [[2]]


@pytest.mark.parametrize("made", [chat_tokenizer, sentencepiece_tokenizer])
async def test_session_texts_go_on_as_their_client_reads_them(tmp_path, made):
    """With a reply's first space, without a special token within it, and with what its last token has after the stop
    string, or with the token that ended it; an edit is counted, an equal prompt is none.
    """
    policy, session = ScriptedPolicy(made()), opened(tmp_path)
    tokenizer, rendering = policy.tokenizer, Rendering(policy.tokenizer)
    within = tokenizer.convert_tokens_to_ids("<|im_start|>")
    [line] = tokenizer.encode("a\n", add_special_tokens=False)[-1:]

    async def generate(ids, params):
        tokens = [*tokenizer.encode(" 42", add_special_tokens=False), within]
        tokens += tokenizer.encode("result: 19", add_special_tokens=False) if "stop" in params else [line]
        text = policy.text(ids, tokens)
        matched, text = ("result:", text.partition("result:")[0]) if "stop" in params else (line, text[:-1])
        policy.sampled.append((ids, tokens, [-1e-6 * (99 * len(policy.sampled) + i + 1) for i in range(len(tokens))]))
        return SampledReply(text, tokens, policy.sampled[-1][2], {"type": "stop", "matched": matched}, (3, 4)), []

    async def ask(prompt, **sampling):
        number = await session.sample(Asked(prompt=prompt, sampling=sampling), b"", rendering, generate, "")
        return session.recorded(number).content

    text = "12 and 7"
    text += await ask(text, stop="result:") + "result: 19. "
    text += await ask(text) + "\n and"
    await ask(text)
    assert tokenizer.decode(policy.sampled[-1][0], skip_special_tokens=True) == text, "no space of its own"
    assert session.summary()["rows"] == 1 and session.summary()["forks"] == {}
    for prompt in ("12 and 7", "12 and 7 is", "12"):
        await ask(prompt)
    session = Session.load(session.store, session.state.id)
    await ask("12 and 7 is")
    check_trained_once(policy, session.tree)
    assert session.summary()["rows"] == 5 and session.summary()["forks"] == {"other": 2}


async def test_session_limits_of_time_and_context_say_which(tmp_path):
    late = opened(tmp_path, limits=SessionLimits(seconds=1.0))  # created long ago
    with pytest.raises(RequestError, match="its limit of 1 seconds"):
        late.check()
    assert Session.load(late.store, late.state.id).state.end == "seconds"
    tokenizer = chat_tokenizer()
    policy, session = ScriptedPolicy(tokenizer), opened(tmp_path, limits=SessionLimits(context=20))
    program = Program(session, policy, Rendering(tokenizer), tools=None)
    policy.script = ["the sum of 12 and 7 is 19"] * 2
    reply = await program.ask([user("sum")])
    assert len(reply.prompt) + len(reply.tokens) <= 20
    with pytest.raises(RequestError, match="the prompt has .* may have 20"):
        await program.ask([*program.seen[-1], user("sum " * 20)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), template=st.sampled_from(sorted(TEMPLATES)), thinking=st.sampled_from(["kept", "as_template"]))
def test_session_trees_of_any_client_lose_and_double_nothing(tmp_path, data, template, thinking):
    tokenizer = chat_tokenizer(template)
    policy = ScriptedPolicy(tokenizer, seed=data.draw(st.integers(0, 999)), delay=0.0)
    program = Program(opened(tmp_path), policy, Rendering(tokenizer, tool_parser="qwen3", thinking=thinking))

    async def act():
        for _ in range(data.draw(st.integers(1, 10))):
            kinds = ["on", "on", "on", "new", "edit", "compact", "twice", "load", "more"] if program.seen else ["new"]
            kind = data.draw(st.sampled_from(kinds))
            history = list(data.draw(st.sampled_from(program.seen))) if program.seen else []
            text = data.draw(st.sampled_from(["sum", " 12 ", "and 7\n", "é"]))
            if kind == "new":
                messages = [{"role": "system", "content": text}] * data.draw(st.integers(0, 1)) + [user(text)]
            elif kind == "edit":
                at = data.draw(st.integers(0, len(history) - 1))
                history[at] = {**history[at], "content": text}
                messages = [*history, *follow(history, text)]
            elif kind == "compact":
                messages = [history[0], *history[-1:], *follow(history, text)]
            elif kind == "more":  # after a reply another one
                messages = history
            else:
                history = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in history]
                messages = [*history, *follow(history, text)]
            if kind == "load":
                program.session = Session.load(program.session.store, program.session.state.id)
            try:
                await asyncio.gather(*(program.ask(messages) for _ in range(1 + (kind == "twice"))))
            except RequestError as error:
                assert "the chat template refuses" in str(error)

    asyncio.run(act())
    check_trained_once(policy, program.session.tree)
    check_trained_once(policy, Session.load(program.session.store, program.session.state.id).tree)


async def test_session_conversations_of_one_system_prompt_are_no_forks(tmp_path):
    program = await run(tmp_path, "chatml", [])
    system = {"role": "system", "content": "sum"}
    for text in ("12", "7"):
        await program.ask([system, user(text)])
    assert program.session.summary()["forks"] == {} and len(list(program.session.tree.leaves())) == 2
