"""Solve the word problem in $ATROPOS_ITEM with a calculator, by OpenAI's responses, and print how well."""

import json
import os

from calculator import PARAMETERS, calculate
from openai import OpenAI

client, item = OpenAI(), json.loads(os.environ["ATROPOS_ITEM"])
tools = [{"type": "function", "name": "calculate", "parameters": PARAMETERS}]
given, previous = [{"role": "user", "content": item["question"]}], None
for _ in range(4):
    reply = client.responses.create(
        model="policy", input=given, previous_response_id=previous, tools=tools, max_output_tokens=64
    )
    calls, previous = [one for one in reply.output if one.type == "function_call"], reply.id
    if not calls:
        break
    given = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": calculate(json.loads(call.arguments).get("expression", "")),
        }
        for call in calls
    ]
print(json.dumps({"reward": float(rf"\boxed{{{item['answer']}}}" in reply.output_text)}))
