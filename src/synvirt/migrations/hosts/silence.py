"""For how long other hosts have not renewed their leases, as this host has seen it itself.

The end of a lease is a time of the database's clock. Where that clock is set forward, all leases are over at once, also of
hosts that live and write. A host that lives renews its lease, which is seen here whatever any clock says.
"""

from collections.abc import Callable, Iterable, Mapping

from synvirt.store.hosts import HostRow


class Silence:
    """`step_most_s`: counts at most from one look to the next, as this host may have stood still in between, and the others
    with it."""

    def __init__(self, clock: Callable[[], float], *, step_most_s: float) -> None:
        self._clock, self._step_most_s = clock, step_most_s
        self._looked_at = clock()
        self._silent: dict[str, tuple[tuple[int, float], float]] = {}

    def look(self, rows: Iterable[HostRow]) -> None:
        """Call it regularly, with all hosts as they are now."""
        moment = self._clock()
        step_s, self._looked_at = min(moment - self._looked_at, self._step_most_s), moment
        before, self._silent = self._silent, {}
        for row in rows:
            sign = (row.epoch, row.seen_at)
            known, silent_s = before.get(row.id, (None, 0.0))
            self._silent[row.id] = (sign, silent_s + step_s if known == sign else 0.0)

    def over(self, limit_s: float) -> Mapping[str, float]:
        """The hosts that have been silent for so long, each with the time when it was seen last."""
        return {host: seen_at for host, ((_, seen_at), silent_s) in self._silent.items() if silent_s >= limit_s}
