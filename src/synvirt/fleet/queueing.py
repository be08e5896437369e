"""Running and waiting members, by pair of source host and destination, for limits that count each."""

import heapq
from collections import defaultdict
from collections.abc import Callable

from synvirt.fleet.facts import Facts


class Running:
    """The running members, by place."""

    def __init__(self) -> None:
        self.all: set[str] = set()
        self.by_host: defaultdict[str, set[str]] = defaultdict(set)
        self.by_destination: defaultdict[str, set[str]] = defaultdict(set)

    def put(self, member: str, facts: Facts, runs: bool) -> None:
        """Counts a member at its source host and destination as running, or as running no more."""
        for place in (self.all, self.by_host[facts.source_host], self.by_destination[facts.destination]):
            (place.add if runs else place.discard)(member)


Key = tuple[str, str]
Rank = tuple[object, ...]


class Queues:
    """Members by pair of source host and destination, best rank first."""

    def __init__(self) -> None:
        self._by_key: dict[Key, list[tuple[Rank, str]]] = {}

    def push(self, key: Key, rank: Rank, member: str) -> None:
        """Adds a member to the queue of its source host and destination, by its rank."""
        heapq.heappush(self._by_key.setdefault(key, []), (rank, member))

    def __bool__(self) -> bool:
        return any(self._by_key.values())

    def taken(self, is_free: Callable[[Key], bool], takes: Callable[[str], bool | None]) -> list[str]:
        """The best members, as long as there is room. `takes`: True, it begins; False, it leaves the queue; None, it stays."""
        heads = [(queue[0][0], key) for key, queue in self._by_key.items() if queue and is_free(key)]
        heapq.heapify(heads)
        found: list[str] = []
        kept: list[tuple[Key, Rank, str]] = []
        while heads:
            _, key = heapq.heappop(heads)
            if not is_free(key):
                continue
            queue = self._by_key[key]
            rank, member = heapq.heappop(queue)
            match takes(member):
                case True:
                    found.append(member)
                case None:
                    kept.append((key, rank, member))
            if queue:
                heapq.heappush(heads, (queue[0][0], key))
        for key, rank, member in kept:
            self.push(key, rank, member)
        return found
