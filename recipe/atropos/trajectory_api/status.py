"""What a Trajectory API says about itself: ``/diagnose``, ``/metrics`` and the page at ``/``."""

import time
from collections import Counter
from typing import Any

from aiohttp import web

from recipe.atropos.data.rows import ENV_IDS_PER_RUN
from recipe.atropos.data.scored_group import KEYS, unpack
from recipe.atropos.trajectory_api import database
from recipe.atropos.trajectory_api.batching import EnvironmentQueue
from recipe.atropos.trajectory_api.endpoints import Caller, Int, endpoint
from recipe.atropos.trajectory_api.service import TrajectoryService

_NAMED = 8  # environments in a sentence
_NO_EXAMPLE = dict.fromkeys([key for key in KEYS if key not in ("overrides", "group_overrides", "env_id")], [])
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


@endpoint("GET", "/")
@endpoint("GET", "")
def root(service: TrajectoryService, caller: Caller) -> Any:
    """Return the page, for a browser."""
    if "text/html" not in caller.request.headers.get("Accept", ""):
        return {"message": "AtroposLib API"}
    return web.Response(text=PAGE, content_type="text/html", headers={"Content-Security-Policy": _CONTENT_POLICY})


@endpoint("GET", "/info")
async def info(service: TrajectoryService) -> dict[str, Any]:
    """Return the size of a batch in sequences, and of a sequence in tokens; -1 without a trainer."""
    async with service.registering:  # environments ask once, and start nothing without an answer
        found = service.trainer.registration if service.trainer else None
    return {"batch_size": found.batch_size if found else -1, "max_token_len": found.max_token_len if found else -1}


@endpoint("GET", "/wandb_info")
def wandb_info(service: TrajectoryService) -> dict[str, Any]:
    """Return group and project of the trainer's wandb run."""
    found = service.trainer.registration if service.trainer else None
    return {"group": found.wandb_group if found else None, "project": found.wandb_project if found else None}


@endpoint("GET", "/status")
def status(service: TrajectoryService) -> dict[str, Any]:
    """Return the trainer's step, and the number of queued groups."""
    return {"current_step": service.step(), "queue_size": service.queue.sizes.total()}


@endpoint("GET", "/status-env")
def status_env(service: TrajectoryService, env_id: Int) -> dict[str, Any]:
    """Return the trainer's step, and the queue as an environment sees it."""
    return {"current_step": service.step(), **service.environments.status(env_id, service.queue)}


@endpoint("GET", "/latest_example")
async def latest_example(service: TrajectoryService) -> Any:
    """Return the group that came last."""
    record = await service.store.read(database.read_record, service.latest) if service.latest is not None else None
    return _NO_EXAMPLE if record is None else unpack(record).to_json()


@endpoint("GET", "/diagnose")
def diagnose(service: TrajectoryService) -> dict[str, Any]:
    """Return the state, with ``why`` in one sentence: why there is no batch, or that there is one."""
    queue, trainer, now = service.queue, service.trainer, time.monotonic()
    return {
        "why": why(service),
        "warnings": {"store": service.store.trouble} if service.store.trouble else {},
        "batch_size": queue.batch_size,
        "received": service.next_id - 1,
        "batches": {
            "last": service.last,
            "served": service.served,
            "committed": service.committed,
            "deleted": service.deleted,
        },
        "queue": {
            "groups": queue.sizes.total(),
            "sequences": queue.sequences,
            "tokens": queue.tokens,
            "tokens_limit": service.settings.queue_tokens,
            "sizes": _by_size(queue.sizes),
            "open_tickets": len(queue.tickets),
        },
        "trainer": None
        if trainer is None
        else {
            "epoch": service.epoch,
            "numbers_batches": trainer.numbers,
            "live": trainer.live,
            "seen_seconds_ago": round(now - trainer.seen, 1),
            "waiting_seconds": None if trainer.waiting_since is None else round(now - trainer.waiting_since, 1),
            "weights_through": trainer.weights,
            "max_staleness": trainer.registration.max_staleness,
            "batches_ahead_of_weights": service.last - trainer.weights,
            "empty_batches_in_a_row": trainer.empty_in_a_row,
        },
        "environments": environments(service),
        "counts": dict(sorted(service.counts.items())),
    }


def why(service: TrajectoryService) -> str:
    """Return why there is no batch, and what would make one."""
    if service.store.trouble:
        return f"nothing can be stored: {service.store.trouble}"
    if service.queue.plan().entries:
        return f"batch {service.last + 1} is complete and waits for the trainer to ask"
    found = f"no batch {service.last + 1}: {service.why_no_batch()}"
    if not service.environments.by_id and service.trainer is not None:
        found = f"no environment has registered; {found}"
    failing = [one for one in service.environments if one.alive and one.failed]
    told = [f"; {one.name}: {one.failed} items without a group, the last: {one.failure}" for one in failing[:_NAMED]]
    if gone := [one for one in service.environments if not one.alive]:
        names = [f"{one.name} ({one.left_because})" if one.left_because else one.name for one in gone[:_NAMED]]
        told.append(f"; gone: {', '.join(names)}")
    return found + "".join(told)


def _by_size(groups: dict[int, int]) -> dict[str, int]:
    return {str(size): n for size, n in sorted(groups.items())}


def environments(service: TrajectoryService) -> list[dict[str, Any]]:
    """Return a line for each environment, and one for groups of none that is known, if there are any.

    ``env_id`` is that of its newest replica, if it has several; ``replica_unseen_seconds`` says how long the one that
    was seen longest ago has been silent, of those that have not left.
    """
    queue, now, found = service.queue, time.monotonic(), []
    open_tickets = Counter(entry.env for entry in queue.tickets.values())
    numbers: dict[EnvironmentQueue, list[int | None]] = {}
    for env, own in queue.environments.items():
        numbers.setdefault(own, []).append(env)
    for own, envs in numbers.items():
        known = [service.environments.by_id[env] for env in envs if env in service.environments.by_id]
        line: dict[str, Any] = {
            "env_id": envs[-1],
            "name": known[-1].name if known else "unknown",
            "queued_sequences": own.sequences,
            "queued_groups": own.groups.total(),
            "sizes": _by_size(own.groups),
            "open_tickets": sum(open_tickets[env] for env in envs),
            "weight": own.weight,
            "min_batch_allocation": own.minimum,
        }
        if known:
            newest, unseen = known[-1], {one.registration.replica: now - one.seen for one in known if one.connected}
            line |= {
                "number": newest.id % ENV_IDS_PER_RUN,
                "alive": any(one.alive for one in known),
                "replicas": sum(one.alive for one in known),
                "seen_seconds_ago": round(now - max(one.seen for one in known), 1),
                "replica_unseen_seconds": round(max(unseen.values(), default=now - newest.seen), 1),
                "group_size": newest.registration.group_size,
                "counts": dict(sorted(sum((one.counts for one in known), Counter()).items())),
            }
        found.append(line)
    return found


@endpoint("GET", "/metrics")
def metrics(service: TrajectoryService) -> str:
    """Return the state in the text format of Prometheus."""
    queue, trainer, now = service.queue, service.trainer, time.monotonic()
    gauges: dict[str, float] = {
        "queue_groups": queue.sizes.total(),
        "queue_sequences": queue.sequences,
        "queue_tokens": queue.tokens,
        "open_tickets": len(queue.tickets),
        "last_batch": service.last,
        "served_batch": service.served,
        "committed_batch": service.committed,
        "weights_through_batch": trainer.weights if trainer else 0,
        "trainer_waiting_seconds": now - trainer.waiting_since if trainer and trainer.waiting_since else 0,
        "store_bytes": service.store.size(),
        "store_trouble": int(bool(service.store.trouble)),
        "uptime_seconds": time.time() - service.begun_at,
    }
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE atropos_api_{name} gauge", f"atropos_api_{name} {value:.17g}"]
    lines.append("# TYPE atropos_api_events_total counter")
    lines += [f'atropos_api_events_total{{event="{_label(event)}"}} {n}' for event, n in sorted(service.counts.items())]
    found = environments(service)
    for name, key in (("queued_sequences", "queued_sequences"), ("seen_seconds", "seen_seconds_ago")):
        family = f"atropos_api_environment_{name}"
        lines.append(f"# TYPE {family} gauge")
        lines += [f'{family}{{environment="{_label(line["name"])}"}} {line[key]}' for line in found if key in line]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Trajectory API</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222 }
h1 { font-size: 1.3rem } #why { padding: .6rem 1rem; background: #eef3fa; border-left: 4px solid #4a7ebb }
table { border-collapse: collapse; margin: 1rem 0; width: 100% } th, td { text-align: right; padding: .2rem .6rem }
th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid #ddd } .gone { color: #b00 }
</style></head><body>
<h1>Trajectory API</h1><p id="why">loading</p><table id="totals"></table><table id="environments"></table>
<script>
let before = null;
const rate = (now, name) => before === null ? "" :
  ((now.counts[name] || 0) - (before.state.counts[name] || 0)) / ((Date.now() - before.at) / 1000);
function row(table, cells, tag) {
  const line = table.insertRow();
  for (const cell of cells) {
    const place = document.createElement(tag || "td");
    place.textContent = typeof cell === "number" ? cell.toLocaleString("en", {maximumFractionDigits: 1}) : cell;
    line.append(place);
  }
  return line;
}
async function update() {
  const now = await (await fetch(location.pathname.replace(/\\/?$/, "/diagnose"))).json();
  const problems = Object.values(now.warnings);
  document.getElementById("why").textContent = [now.why, ...problems].join(". ");
  const totals = document.getElementById("totals"), list = document.getElementById("environments");
  totals.textContent = list.textContent = "";
  row(totals, ["queued groups", now.queue.groups]);
  row(totals, ["queued sequences, of a batch of " + now.batch_size, now.queue.sequences]);
  row(totals, ["queued tokens", now.queue.tokens]);
  row(totals, ["open tickets", now.queue.open_tickets]);
  row(totals, ["groups received per second", rate(now, "received")]);
  row(totals, ["groups delivered per second", rate(now, "cut_groups")]);
  row(totals, ["last batch", now.batches.last]);
  row(totals, ["last batch served", now.batches.served]);
  row(totals, ["last batch committed", now.batches.committed]);
  if (now.trainer) row(totals, ["batches ahead of the weights", now.trainer.batches_ahead_of_weights]);
  row(list, ["environment", "queued sequences", "open tickets", "received", "seen, seconds ago"], "th");
  for (const one of now.environments) {
    const line = row(list, [one.name, one.queued_sequences, one.open_tickets, (one.counts || {}).received || 0,
      one.seen_seconds_ago === undefined ? "" : one.seen_seconds_ago]);
    if (one.alive === false) line.className = "gone";
  }
  before = {state: now, at: Date.now()};
}
const again = () => update().catch(error => document.getElementById("why").textContent = String(error));
again(); setInterval(again, 2000);
</script></body></html>
"""
