"""Rules about the SGLang servers, the gateway, and the Trajectory API's queue, each threshold beside its reason."""

from collections.abc import Iterator

from recipe.atropos.watchdog.history import History, ServerHistory
from recipe.atropos.watchdog.registry import RESPONSE, STALENESS, Finding, InStep, alarm

EMPTY_BATCHES = 3  # in a row; one or two may be chance

_QUEUE_POLLS, _QUEUE_SECONDS = 3, 15.0  # a queue that is full between two batches empties with the next one
_SLOW_POLLS = 3  # of the gateway, at least
_SLOW = 0.25  # of the other servers' requests per second: the gateway gives each as many as it finishes
_SLOW_REQUESTS = 40  # by the others, so that chance does not decide
_WATCHED = 0.9  # of the minute, for which it must have been busy
_OTHER_WEIGHTS = "weight version"  # in the gateway's reason for removing a server


@alarm(
    "queue_full",
    means="the Trajectory API holds more tokens than its queue is for: training is the bottleneck",
    advice=(
        "set trainer.atropos.max_staleness, which paces the environments, or allow fewer groups in flight "
        "(environment.args.max_num_workers)"
    ),
    settings=(STALENESS,),
    chart="queue",
)
def _queue_full(history: History, now: float) -> Iterator[Finding]:
    since, polls = history.queue_full or (now, 0)
    if polls >= _QUEUE_POLLS and now - since >= _QUEUE_SECONDS:
        queue = history.api["queue"]
        text = f"{queue['tokens']:,} tokens in {queue['groups']:,} groups are queued, of {queue['tokens_limit']:,}"
        yield Finding("queue_full", text, since, history.step_at(since))


@alarm(
    "empty_batches",
    means="three batches in a row, or more, had no row to train on: the policy did not change",
    advice=(
        "the trainer's log has the reasons, docs/data-format.md explains them; often another tokenizer, or an "
        "environment without the adapter where trainer.atropos.max_staleness is set"
    ),
    settings=(STALENESS, "trainer.atropos.max_empty_batches", "trainer.atropos.overlong"),
    in_step=InStep(
        "atropos/empty_batches", "{value:.0f} batches before this step's", lambda tolerance, mode: EMPTY_BATCHES - 1
    ),
)
def _empty_batches(history: History, now: float) -> Iterator[Finding]:
    """The trainer reports batches with nothing to train on as it finds them, when there is no step yet to tell."""
    empty = (history.api.get("trainer") or {}).get("empty_batches_in_a_row", 0)
    if empty >= EMPTY_BATCHES:
        text = f"{empty} batches in a row had nothing to train on; see logs/trainer.log"
        yield Finding("empty_batches", text, now, history.step)


@alarm(
    "server_out_of_sync",
    means=(
        "an SGLang server or the gateway does not have the newest weights: it gets no requests, or samples with "
        "older ones"
    ),
    advice=(
        "look for a failed push in the trainer's log, for a restart in the server's; try another "
        "trainer.atropos.weight_sync.transport, or weight_sync.verify=probe"
    ),
    settings=tuple(
        f"trainer.atropos.{key}" for key in ("weight_sync.transport", "weight_sync.verify", "max_staleness")
    ),
    chart="staleness",
    cause=80,
)
@alarm(
    "server_unhealthy",
    means=(
        "an SGLang server or the gateway does not answer, gets or finishes no request, or is far slower than the others"
    ),
    advice=(
        "see the log of the server that is named: often out of memory, or still paused by a push; if answers only "
        "take long, raise watchdog.silent_after"
    ),
    settings=("watchdog.silent_after", RESPONSE),
    chart="servers",
    cause=90,
)
def _servers_and_gateway(history: History, now: float) -> Iterator[Finding]:
    """Yield the first finding of each alarm, with the number of others."""
    found: dict[str, list[tuple[float, str]]] = {}
    for name, since, text in _servers(history, now):
        found.setdefault(name, []).append((since, text))
    for name, [(since, text), *others] in found.items():
        text += f"; so for {len(others)} others" if others else ""
        yield Finding(name, text, since, history.step_at(since))


def _servers(history: History, now: float) -> Iterator[tuple[str, float, str]]:
    """Yield an alarm, since when, and what was seen."""
    limits, silent = history.limits, history.gateway_silent
    if silent is not None:
        if now - silent > limits.silent_after:
            text = f"the gateway has not answered for {now - silent:.0f} s; see logs/gateway.log"
            yield "server_unhealthy", silent, text
        return
    serving = any(server.state == "admitted" for server in history.servers.values())
    for server in history.servers.values():
        out = now - server.since
        if limits.push_every > 1 and serving and server.state == "waiting":  # which ends with the next push
            out = now - history.pushed if history.pushed > server.since else 0.0
        reason = f" ({server.error})" if server.error else ""
        if server.state == "admitted":
            quiet = now - server.pulse.last
            if server.inflight and quiet > server.pulse.limit(limits):
                text = f"{server.url} has {server.inflight} requests in flight and has finished none for {quiet:.0f} s"
                yield "server_unhealthy", server.pulse.last, text
        elif history.version is not None and out > limits.silent_after:
            if server.state == "waiting" or _OTHER_WEIGHTS in server.error:
                text = f"{server.url} is without version {history.version} for {out:.0f} s{reason}"
                yield "server_out_of_sync", server.since, text
            else:
                text = f"{server.url} is {server.state} for {out:.0f} s{reason}; {history.held} requests wait"
                yield "server_unhealthy", server.since, text
    yield from _slow(history)
    if history.behind is not None and now - history.behind > limits.silent_after:
        trained = history.steps[-1]["atropos/policy_version"]
        text = f"the gateway has version {history.version} for {now - history.behind:.0f} s, the trainer {trained:.0f}"
        yield "server_out_of_sync", history.behind, text


def _slow(history: History) -> Iterator[tuple[str, float, str]]:
    admitted = [server for server in history.servers.values() if server.state == "admitted" and server.finished]
    for server in admitted:
        others = [_finished_requests(other) for other in admitted if other is not server]
        busy = sum(busy for _, _, busy in server.finished)
        if not others or busy < _WATCHED * len(server.finished) or len(server.finished) < _SLOW_POLLS:
            continue
        mean = sum(others) / len(others)
        if mean >= _SLOW_REQUESTS and _finished_requests(server) < _SLOW * mean:
            text = (
                f"{server.url} finished {_finished_requests(server)} requests in a minute, the others {mean:.0f} each"
            )
            yield "server_unhealthy", server.finished[0][0], text


def _finished_requests(server: ServerHistory) -> int:
    return server.finished[-1][1] - server.finished[0][1]
