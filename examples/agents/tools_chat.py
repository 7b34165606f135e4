"""Solve the word problem in $ATROPOS_ITEM with a calculator, by OpenAI's chat completions, and print how well."""

import json
import os

from calculator import PARAMETERS, calculate
from openai import OpenAI

client, item = OpenAI(), json.loads(os.environ["ATROPOS_ITEM"])
tools = [{"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS}}]
messages = [{"role": "user", "content": item["question"]}]
for _ in range(4):
    reply = client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=64)
    message = reply.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        result = calculate(json.loads(call.function.arguments).get("expression", ""))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        break
print(json.dumps({"reward": float(rf"\boxed{{{item['answer']}}}" in (message.content or ""))}))
