"""``inspect --sessions`` and ``--session ID``: an agent's turns, read beside the server that writes them."""

import pytest

from helpers.runs import make_run
from helpers.sessions import ScriptedPolicy, Sessions, chat_tokenizer
from recipe.atropos.__main__ import main

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    return make_run(tmp_path / "run", started=1.0)


def served(files):
    return Sessions(files.path, ScriptedPolicy(chat_tokenizer("thinking_kept")))


def talk(sessions, opened):
    """Two turns, and one after a history whose first message was changed."""
    sessions.policy.script = [f"<think>so</think>sum {CALL}", "19", "7"]
    client = sessions.openai(opened)
    messages = [{"role": "user", "content": "the sum \x1b[2Jof\n" + "12\n" * 20}]
    for then in ({"role": "tool", "content": "3"}, {"role": "user", "content": "and"}, {}):
        said = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0].message
        calls = said.tool_calls or ()
        messages += [said.model_dump(exclude_none=True), then | ({"tool_call_id": calls[0].id} if calls else {})]
        if not calls:
            messages[0] = {"role": "user", "content": "another sum"}


def shown(files, capsys, *words):
    assert main(["inspect", str(files.path), *words]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_inspect_shows_a_session_turn_by_turn(files, capsys):
    with served(files) as sessions:
        opened = sessions.open(env="sums", item={"question": "12 and 7"})
        talk(sessions, opened)
        lines = shown(files, capsys, "--session", opened["id"])
    first, second, third = (len(tokens) for _, tokens, _ in sessions.policy.sampled)
    said = ["  thinking: so", "  assistant: sum", '  call: add({"a":1,"b":2})']
    assert lines == [
        f'session {opened["id"]}, environment sums, item {{"question":"12 and 7"}}, turns 3, '
        f"tokens {first + second + third}, rows 2, end running, forks message_edited 1",
        "",
        f"turn 0 ({first} tokens, weights 3 to 4, row 0)",
        "  user: the sum of",
        *["      12"] * 4,
        "      12 [... 45 more characters]",
        *said,
        "",
        f"turn 1 after 0 ({second} tokens, weights 3 to 4, row 0)",
        "  result of add: 3",
        "  assistant: 19",
        "",
        f"turn 2, begins anew: message_edited ({third} tokens, weights 3 to 4, row 1)",
        "  user: another sum",
        *said,
        "  result of add: 3",
        "  assistant: 19",
        "  user: and",
        "  assistant: 7",
    ]


def test_inspect_indents_what_several_turns_continue(files, capsys):
    """Two answers to the same history; of a text or of token ids, what they add."""
    with served(files) as sessions:
        opened, tokenizer = sessions.open(), sessions.policy.tokenizer
        client, sessions.policy.script = sessions.openai(opened), ["the", " and", " no", "is"]
        client.completions.create(model="policy", prompt="12")
        for _ in range(2):
            client.completions.create(model="policy", prompt="12the<|im_end|> 7")
        body = {"input_ids": tokenizer.encode("12 and"), "sampling_params": {}}
        sessions.call("POST", "/generate", body, opened["api_key"])
        lines = shown(files, capsys, "--session", opened["id"])
    told = [line for line in lines[1:] if "assistant" not in line and line]
    assert [line.partition(" (")[0] for line in told] == [
        *("turn 0", "  prompt: 12"),
        *("    turn 1 after 0", "      prompt: <|im_end|> 7"),
        *("    turn 2 after 0", "      prompt: <|im_end|> 7"),
        *("turn 3, begins anew: other", f"  prompt: {len(body['input_ids'])} token ids"),
    ]


def test_inspect_lists_the_newest_sessions(files, capsys):
    """Also of a server that was killed, and of one that has ended, where nothing can be written."""
    with served(files) as sessions:
        opened = [sessions.open(env="sums", item={"question": n}) for n in range(22)]
        talk(sessions, opened[20])
        sessions.call("POST", f"/sessions/{opened[20]['id']}/reward", {"reward": 0.5})
        sessions.call("POST", f"/sessions/{opened[21]['id']}/reward", {"end": "seconds"})
        listed = shown(files, capsys, "--sessions")
        killed = make_run(files.path.parent / "killed", started=1.0)
        for end in ("", "-wal"):
            name = files.sessions.name + end
            (killed.path / name).write_bytes((files.path / name).read_bytes())
        assert shown(killed, capsys, "--sessions") == listed
    before = sorted(path.name for path in files.path.iterdir())
    assert shown(files, capsys, "--sessions") == listed
    assert sorted(path.name for path in files.path.iterdir()) == before, "no file of SQLite's"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in listed if "│" in line]
    sampled = str(sum(len(tokens) for _, tokens, _ in sessions.policy.sampled))
    assert rows[:3] == [
        [opened[21]["id"], "sums", '{"question":21}', "0", "0", "0", "seconds", "none"],
        [opened[20]["id"], "sums", '{"question":20}', "3", sampled, "2", "reward 0.5", "message_edited 1"],
        [opened[19]["id"], "sums", '{"question":19}', "0", "0", "0", "running", "none"],
    ]
    assert len(rows) == 20


def test_inspect_names_a_session_that_is_not_there(files, capsys):
    with pytest.raises(SystemExit, match="has no sessions"):
        main(["inspect", str(files.path), "--sessions"])
    with served(files), pytest.raises(SystemExit, match="no session 7; --sessions"):
        main(["inspect", str(files.path), "--session", "7"])
