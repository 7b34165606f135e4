"""Cost of the session server: ``python benchmarks/sessions.py [--quick]``.

256 sessions at once hold a history of 4,000 tokens each, said in few turns or in many. Measured is the CPU time of the
session server for one more turn, beside that of the gateway behind it, which proxies the same turn; both stand before a
server that answers at once. ``memory``: what the session server grows by, for each token of the histories; as many
sessions as there are requests at once have spoken before.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
from aiohttp import web

from recipe.atropos.demo.small_policy import ensure_small_policy
from recipe.atropos.inference.gateway_client import GatewayClient, gateway_command
from recipe.atropos.sessions.client import SessionClient
from recipe.atropos.utils.process import Service, free_port, start_service
from recipe.atropos.utils.secret import API_KEY_VARIABLE, environments_key

KEY = "trainer"
TURN_TARGET, FLAT_TARGET, MEMORY_TARGET = 8.0, 1.25, 64.0  # ms; most turns over fewest; bytes a token
HISTORY = 4_000  # tokens
REPLY = 8  # tokens of a reply
MEASURED = 4  # turns
AT_ONCE = 64  # requests


def stub(port: int) -> None:
    """Serve /generate: ids that follow one another, each with a logprob."""

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        info = {"finish_reason": {"type": "length"}, "weight_version": "1"}
        info["output_token_logprobs"] = [[-0.5, 100 + i, None] for i in range(REPLY)]
        return web.Response(body=orjson.dumps({"text": "", "meta_info": info}), content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "1"})

    app = web.Application(client_max_size=0)
    app.router.add_post("/generate", generate)
    app.router.add_get("/model_info", info)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


@contextmanager
def services(folder: Path) -> Iterator[tuple[Service, Service]]:
    """The session server and the gateway, in processes of their own."""
    ports = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    model = ensure_small_policy(0)
    session = [sys.executable, "-m", "recipe.atropos.sessions.server", f"--port={ports[2]}", f"--gateway={urls[1]}"]
    session += [
        f"--api={urls[1]}",
        f"--tokenizer={model}",
        f"--data={folder / 'sessions.sqlite'}",
    ]
    commands = {
        "stub": ([sys.executable, __file__, "--stub", str(ports[0])], ""),
        "gateway": (gateway_command(urls[1], "127.0.0.1", [urls[0]], 60.0), KEY),
        "sessions": (session, environments_key(KEY)),
    }
    started = []
    try:
        for (name, (command, key)), url in zip(commands.items(), urls, strict=True):
            variables = {API_KEY_VARIABLE: key}
            started.append(start_service(name, command, log_path=folder / f"{name}.log", env=variables, url=url))
        GatewayClient(urls[1], KEY).announce(1, [urls[0]])
        yield started[2], started[1]
    finally:
        for service in started:
            service.stop(grace=1.0)


def cpu(service: Service) -> float:
    """Return the seconds of CPU that a service has taken."""
    times = psutil.Process(service.pid).cpu_times()
    return times.user + times.system


async def conversations(service: Service, gateway: Service, sessions: int, turns: int) -> dict[str, float]:
    """Let sessions say ``HISTORY`` tokens in so many turns; return what further turns cost."""
    words = "12 + 7 = 19 " * 4_000
    timeout = aiohttp.ClientTimeout(total=600)
    client = SessionClient(service.url, environments_key(KEY))
    async with aiohttp.ClientSession(timeout=timeout) as http:
        slots = asyncio.Semaphore(AT_ONCE)

        async def say(history: list[dict[str, str]], key: str, text: str) -> int:
            history.append({"role": "user", "content": text})
            async with (
                slots,
                http.post(
                    f"{service.url}/v1/chat/completions",
                    json={"model": "policy", "messages": history, "max_tokens": REPLY},
                    headers={"Authorization": f"Bearer {key}"},
                ) as answer,
            ):
                found = await answer.json()
            assert answer.status == 200, found
            history.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
            return found["usage"]["total_tokens"]

        async def converse(talks: list[tuple[list[dict[str, str]], str]]) -> int:
            """Let each session say ``HISTORY`` tokens; return the tokens of one."""
            size, length = 0, 0
            for turn in range(turns):  # the first sessions' text is as long as the last's
                target = HISTORY * (turn + 1) // turns
                characters = max(1, target - size) if not length else max(1, round((target - size) * length / size))
                length += characters
                totals = await asyncio.gather(*(say(history, key, words[:characters]) for history, key in talks))
                size = totals[0]
            return size

        opened = [await client.open(sampling={"temperature": 1.0}) for _ in range(AT_ONCE + sessions)]
        talks: list[tuple[list[dict[str, str]], str]] = [([], each.api_key) for each in opened]
        await converse(talks[:AT_ONCE])  # what requests take for a while is there before memory is measured
        memory = psutil.Process(service.pid).memory_info().rss
        talks = talks[AT_ONCE:]
        size = await converse(talks)
        grown = psutil.Process(service.pid).memory_info().rss - memory
        before = cpu(service), cpu(gateway)
        for _ in range(MEASURED):
            await asyncio.gather(*(say(history, key, "and 7") for history, key in talks))
        more = cpu(service) - before[0], cpu(gateway) - before[1]
        for each in opened:
            state = await client.end(each.id, reward=1.0)
            assert state["rows"] == 1, state
    per_turn = [1e3 * seconds / sessions / MEASURED for seconds in more]
    return {"tokens": size, "session_ms": per_turn[0], "gateway_ms": per_turn[1], "bytes": grown / sessions / size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="32 sessions")
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        stub(options.stub)
        return 0
    sessions, counts = (32, (2, 8)) if options.quick else (256, (2, 8, 32))
    figures: dict[str, Any] = {}
    print(f"{sessions} sessions, {HISTORY} tokens each; CPU time of one more turn")
    print(
        f"{'turns before':>12} {'tokens':>7} {'sessions':>9} {'gateway':>8} {'ratio':>6} {'memory':>13} {'seconds':>8}"
    )
    for turns in counts:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, services(Path(folder)) as (service, gateway):
            found = asyncio.run(conversations(service, gateway, sessions, turns))
        ratio, seconds = found["session_ms"] / found["gateway_ms"], time.monotonic() - begun
        line = f"{turns:>12} {found['tokens']:>7.0f} {found['session_ms']:>6.2f} ms {found['gateway_ms']:>5.2f} ms"
        print(f"{line} {ratio:>6.1f} {found['bytes']:>5.0f} B/token {seconds:>6.0f} s", flush=True)
        figures |= {f"{name}_{turns}": round(value, 2) for name, value in found.items()}
    few, many = counts[0], counts[-1]
    figures["flat"] = round(figures[f"session_ms_{many}"] / figures[f"session_ms_{few}"], 2)
    targets = {"session_ms": TURN_TARGET, "flat": FLAT_TARGET, "bytes": MEMORY_TARGET}
    worst = {name: max(figures[f"{name}_{turns}"] for turns in counts) for name in ("session_ms", "bytes")}
    ok = worst["session_ms"] <= TURN_TARGET and figures["flat"] <= FLAT_TARGET and worst["bytes"] <= MEMORY_TARGET
    print(
        f"cores {os.cpu_count()}; targets: {TURN_TARGET:g} ms a turn, {MEMORY_TARGET:g} B a token, flat {FLAT_TARGET}"
    )
    print(json.dumps({"name": "sessions", "figures": figures, "targets": targets, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
