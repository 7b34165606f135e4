"""Solve the word problem in $ATROPOS_ITEM with one call, by OpenAI's chat completions, and print how well."""

import json
import os

from openai import OpenAI

item = json.loads(os.environ["ATROPOS_ITEM"])
reply = OpenAI().chat.completions.create(
    model="policy", messages=[{"role": "user", "content": item["question"]}], max_tokens=32
)
answer = reply.choices[0].message.content or ""
print(json.dumps({"reward": 1.0 if rf"\boxed{{{item['answer']}}}" in answer else -1.0}))
