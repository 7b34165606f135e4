"""Two turns on a word problem with the standard library alone; an outage of the model is waited for."""

import http.client
import json
import os
import time
import urllib.request

url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
item = json.loads(os.environ["ATROPOS_ITEM"])
messages, ids, content = [{"role": "user", "content": item["question"]}], set(), ""
for _ in range(2):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 24}).encode()
    while True:
        request = urllib.request.Request(f"{url}/chat/completions", body, {"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                reply = json.loads(answer.read())
            break
        except (OSError, http.client.HTTPException, ValueError) as error:
            if getattr(error, "code", 500) < 500:
                raise
            time.sleep(0.2)
    ids.add(reply["id"])
    content = reply["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Are you sure?"}]
print(json.dumps({"reward": float(item["answer"] in content), "metrics": {"turns": len(ids)}}))
