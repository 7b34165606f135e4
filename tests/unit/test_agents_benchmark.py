"""The policy that benchmarks/agents.py makes."""

import importlib.util
import json
import random

from helpers import ROOT

_spec = importlib.util.spec_from_file_location("agents_benchmark", ROOT / "benchmarks" / "agents.py")
agents = importlib.util.module_from_spec(_spec)  # by its path: the folder has names that other packages have
_spec.loader.exec_module(agents)


def test_tool_policy_reads_calls_as_it_was_taught_them():
    [row] = agents.generate("train", 1)
    taught = agents.demonstration(row, random.Random(0), 0.0)
    tokenizer = agents.ToolRecipe().tokenizer([message["content"] for message in taught])
    text = taught[1]["content"]
    assert len(tokenizer.encode(agents.OPEN)) == len(tokenizer.encode(agents.CLOSE)) == 1
    call = json.loads(text.removeprefix(agents.OPEN).removesuffix(agents.CLOSE))
    parsed = [taught[0], {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}, *taught[2:]]
    one, other = (tokenizer.apply_chat_template(chat, tokenize=False) for chat in (parsed, taught))
    assert one == other
