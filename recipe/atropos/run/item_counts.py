"""What became of an environment's items over all its processes, from the lines of its reports (``environments/``)."""

from collections import Counter
from collections.abc import Mapping
from typing import Any


class ItemCounts:
    """Counts of an environment. ``totals``: of what ended, by name; ``in_flight``: items that are begun, by replica;
    ``lost``: items that were begun when their process ended.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.in_flight: Counter[int] = Counter()
        self.lost = 0
        self._of_process: dict[int, Counter[str]] = {}  # by replica

    def add(self, line: Mapping[str, Any]) -> Counter[str]:
        """Add a line of a report, and return what it adds to the totals; each process counts from 0."""
        replica = line.get("replica", 0)
        if "started" in line:
            self.lost += self.in_flight.pop(replica, 0)
            self._of_process.pop(replica, None)
        if "counts" not in line:
            return Counter()
        counts = Counter(line["counts"])
        added = counts - self._of_process.get(replica, Counter())
        self._of_process[replica], self.in_flight[replica] = counts, line["in_flight"]
        self.totals += added
        return added
