"""Where the gateway sends a request: to the server that has its beginning, within bounds; else to the least busy."""

import random

import orjson
import pytest

from recipe.atropos.inference import affinity
from recipe.atropos.inference.affinity import PrefixAffinity
from recipe.atropos.inference.pool import Server


class Busy(Server):
    """With a number of requests in flight."""

    running = 0

    @property
    def inflight(self):
        return self.running


@pytest.fixture
def servers():
    return [Busy(f"http://{name}") for name in "abcd"]


def tokens(*parts):
    return orjson.dumps({"input_ids": [token for part in parts for token in part], "sampling_params": {}})


def some(seed, size=200):
    return random.Random(seed).choices(range(1000), k=size)


def sent(chosen, server):
    """As the pool counts it."""
    server.requests += 1
    chosen.append(server.url)
    return server


@pytest.mark.parametrize("kind", ["input_ids", "text", "prompt", "messages"])
def test_gateway_keeps_a_conversation_with_its_server(servers, kind):
    def body(*turns):
        if kind == "input_ids":
            return tokens(*(some(turn) for turn in turns))
        if kind == "messages":
            return orjson.dumps({"messages": [{"role": "user", "content": f"{turn}" * 300} for turn in turns]})
        return orjson.dumps({kind: "".join(f"{turn}" * 300 for turn in turns)})

    known, first = PrefixAffinity(), {}
    for number in range(20):
        first[number] = sent([], known.choose(body(number), servers)).url
    assert {[*first.values()].count(server.url) for server in servers} == {5}, "they begin where least was sent"
    for number in sorted(first, key=str):
        for turns in ((number, 50), (number, 50, 51), (number, 50, 51, 52)):
            assert sent([], known.choose(body(*turns), servers)).url == first[number]


def test_gateway_leaves_a_server_that_is_much_busier(servers):
    known, a, b = PrefixAffinity(), *servers[:2]
    for server in servers:
        server.running = 10
    a.running = 9
    assert known.choose(tokens(some(1)), servers) is a
    for running, chosen in ((13, a), (15, a), (17, b), (9, b)):
        a.running, b.running = running, 9
        assert known.choose(tokens(some(1), some(2, 80)), servers) is chosen, running
    assert known.choose(tokens(some(1), some(3, 80)), [a]) is a


def test_gateway_binds_nobody_by_what_all_prompts_share(servers):
    known, system, chosen = PrefixAffinity(), some(0, 640), []
    for number in range(8):
        sent(chosen, known.choose(tokens(system, some(number + 1, 30)), servers))
    assert {chosen.count(server.url) for server in servers} == {2}
    for number in range(8):
        again = tokens(system, some(number + 1, 30), some(99, 3000))
        assert known.choose(again, servers).url == chosen[number], "however long the answer was"


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[]", b"{}", b'{"input_ids": [[1, 2], [3]]}', b'{"input_ids": [99999999999999]}', b'{"text": 5}']
    + [b'{"prompt": [null]}', b'{"text": "short"}'],
    ids=range(9),
)
def test_gateway_sends_what_has_no_beginning_to_the_least_busy(servers, body):
    known = PrefixAffinity()
    servers[0].running, servers[1].running = 2, 1
    servers[2].requests = 5
    assert known.choose(body, servers) is servers[3] and not known._servers


def test_gateway_forgets_what_was_not_asked_for_longest(servers, monkeypatch):
    monkeypatch.setattr(affinity, "_KNOWN", 2)
    known, prompts = PrefixAffinity(), [tokens(some(number)) for number in range(3)]
    first, second = (sent([], known.choose(prompt, servers)) for prompt in prompts[:2])
    assert known.choose(prompts[0], servers) is first
    sent([], known.choose(prompts[2], servers))
    servers[3].requests += 9
    second.requests += 1
    assert len(known._servers) == 2 and known.choose(prompts[0], servers) is first
    assert known.choose(prompts[1], servers) is not second
