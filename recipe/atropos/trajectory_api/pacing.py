"""Which tickets may begin, so that all their groups are in time for the staleness bound.

Guarantees:

- A ticket begins only if all groups queued or begun with tickets, and this one, fit into the batches up to its bound.
  If nothing is begun, there is no batch, and only sizes that do not fit are left, one ticket may exceed the bound.
- Groups without tickets take no more than their environments' part of these batches, and no more than are queued; the
  rest is for tickets. So neither kind starves the other.
- Tickets are shared among the environments that ask for them, and those with an allocation while they live: each is
  within a group of its share, counting what it was served before.
"""

from recipe.atropos.trajectory_api.batching import EPSILON, Envs, Queue
from recipe.atropos.trajectory_api.lanes import sequences


def refuses(
    queue: Queue,
    env: int | None,
    size: int,
    batches: range,
    alive: Envs,
    asking: Envs,
) -> str:
    """Return why a ticket for ``size`` sequences may not begin now, or "".

    ``batches``: the numbers of those that may have its group; ``asking``: the environments that want to begin groups
    too.
    """
    places = len(batches) * (queue.batch_size or 0)
    queue.lane(env)
    lanes = queue.lanes
    ticketed = {other: sequences(queue.fitting(lane.ticketed)) for other, lane in lanes.items()}
    begun = {other: lane.begun + ticketed[other] for other, lane in lanes.items()}
    stock = {other: n for other in lanes if (n := queue.queued(other) - ticketed[other])}
    allocated = {other for other in alive if other in lanes and lanes[other].paced and lanes[other].minimum > 0}
    sharing = {env, *allocated, *(other for other in asking if other in lanes)}
    shares = queue.shares(sharing | stock.keys(), alive)
    arrears = queue.arrears(shares)
    part, late = sum(shares[other] for other in sharing), sum(arrears[other] for other in sharing)
    # What each has begun or was served, relative to its part of what these share; in sum, what they have begun.
    had = {other: begun[other] - arrears[other] + late * shares[other] / part for other in sharing}
    room = places - sum(min(n, max(0.0, shares[other] * places + arrears[other])) for other, n in stock.items())
    room -= sum(n for other, n in begun.items() if other not in sharing)
    total, why = sum(begun.values()), ""
    if total + size > places:
        why = f"{total} of {places} sequences that may begin have"
    elif sum(had.values()) > room - EPSILON:
        why = f"groups without tickets have their part of the {places} sequences that may begin"
    if why:
        stuck = places > 0 and not queue.tickets and not queue.plan(alive, batches.start, asking).complete
        return "" if stuck else why
    positions = {other: n * part / shares[other] for other, n in had.items()}
    if positions[env] + size / 2 * part / shares[env] < room or positions[env] <= min(positions.values()) + EPSILON:
        return ""
    return f"its share of the {places} sequences that may begin is {shares[env]:.0%}"
