"""Solve the word problem in $ATROPOS_ITEM with a calculator, by Anthropic's messages, and print how well."""

import json
import os

from anthropic import Anthropic
from calculator import PARAMETERS, calculate

client, item = Anthropic(), json.loads(os.environ["ATROPOS_ITEM"])
tools = [{"name": "calculate", "input_schema": PARAMETERS}]
messages = [{"role": "user", "content": item["question"]}]
for _ in range(4):
    reply = client.messages.create(model="policy", messages=messages, tools=tools, max_tokens=64)
    messages.append({"role": "assistant", "content": reply.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": calculate(block.input.get("expression", ""))}
        for block in reply.content
        if block.type == "tool_use"
    ]
    if not results:
        break
    messages.append({"role": "user", "content": results})
text = "".join(block.text for block in reply.content if block.type == "text")
print(json.dumps({"reward": float(rf"\boxed{{{item['answer']}}}" in text)}))
