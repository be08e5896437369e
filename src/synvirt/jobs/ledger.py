"""The ledger: an entry for each thing that a job makes. It is written before the thing is made, and deleted after the thing is
gone or its user keeps it.

    record ─▶ make ─▶ … ─▶ settled     the job succeeded: at its end, its user keeps what it made
                       └─▶ sweep       it failed, was cancelled, or its service was killed: undone, newest first

Undoing is idempotent. What cannot be undone now stays in the ledger, for the next start. `Sweep` has the order, for asyncio
(`migrations/advance.py`) and for threads (`Ledger`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import structlog

from synvirt.errors import HypervisorAway, SynvirtError
from synvirt.store.ledger import LedgerEntry, LedgerRows, Owner, OwnerKind

log = structlog.get_logger(__name__)

# How long the thread of a job waits for a hypervisor that is away: a guest that it does not remove would run until the next
# start of the service. A start does not wait.
SWEEP_AWAY_S, LOOK_AGAIN_S = 60.0, 1.0

# Undoes what an owner made under a name.
Undo = Callable[[UUID, str], None]


@dataclass(frozen=True)
class Order:
    """`late`: kinds that come after all others; a higher number comes later. `only_after`: a kind is undone only if nothing is
    left of these other kinds."""

    late: Mapping[str, int] = field(default_factory=dict)
    only_after: Mapping[str, frozenset[str]] = field(default_factory=dict)


NEWEST_FIRST = Order()


class Sweep:
    """The entries in the order in which they are undone. The caller calls `stays` for each that cannot be undone, before it
    takes the next."""

    def __init__(self, entries: Sequence[LedgerEntry], order: Order = NEWEST_FIRST) -> None:
        self._entries, self._order = entries, order
        self._staying: set[str] = set()

    def __iter__(self) -> Iterator[LedgerEntry]:
        late = self._order.late
        newest_first = self._entries[::-1]
        for entry in sorted(newest_first, key=lambda one: late.get(one.kind, 0)):
            if self._staying.isdisjoint(self._order.only_after.get(entry.kind, ())):
                yield entry
            else:
                self.stays(entry)

    def stays(self, entry: LedgerEntry) -> None:
        self._staying.add(entry.kind)


class Ledger:
    """What the owners of one kind made on this host. `undo`: how each kind of thing is undone; `order`: what waits for others.
    For threads; one at a time for one owner."""

    def __init__(
        self, rows: LedgerRows, of: OwnerKind, *, host: str, undo: Mapping[str, Undo], order: Order = NEWEST_FIRST
    ) -> None:
        self._rows, self._of, self._host, self._undo, self._order = rows, of, host, undo, order

    def record(self, owner_id: UUID, kind: str, name: str) -> None:
        """Adds an entry. Call it before the thing is made. Idempotent."""
        assert kind in self._undo, kind
        self._rows.record(self._owner(owner_id), kind, name, host=self._host)

    def of(self, owner_id: UUID) -> list[LedgerEntry]:
        """The owner's entries, oldest first."""
        return self._rows.of(self._owner(owner_id))

    def replace(self, owner_id: UUID, entries: Sequence[LedgerEntry]) -> None:
        """Replaces all entries of the owner in one step. From then on things are undone in another way."""
        self._rows.replace(self._owner(owner_id), entries, host=self._host)

    def sweep(self, owner_id: UUID, *, then: Sequence[LedgerEntry] = (), away_s: float = 0.0) -> bool:
        """Undoes all entries. Whether nothing is left. Never raises, so that its user sees why the owner failed. The entries of
        all undone things are deleted in one step, as one entry may change what the others mean (restores/in_place.py). `then`:
        entries that are added in that step, if nothing is left. `away_s`: how long it waits for a hypervisor that is away."""
        until = time.monotonic() + away_s
        try:
            entries = self._rows.of(self._owner(owner_id))
            sweep, gone = Sweep(entries, self._order), list[LedgerEntry]()
            for entry in sweep:
                try:
                    self._undone(owner_id, entry, until)
                except Exception as error:
                    log.warning("what was made cannot be undone", owner=str(owner_id), thing=entry.kind, exc_info=error)
                    sweep.stays(entry)
                else:
                    gone.append(entry)
            if len(gone) == len(entries):
                self._rows.replace(self._owner(owner_id), then, host=self._host)
            else:
                self._rows.strike(self._owner(owner_id), gone)
        except SynvirtError as error:
            log.warning("what was made is not known", owner=str(owner_id), detail=error.detail)
            return False
        return len(gone) == len(entries)

    def sweep_all(self, *, but: frozenset[UUID] = frozenset()) -> None:
        """Sweeps what a killed service left, before any owner begins. `but`: owners that go on, and are not swept."""
        for owner in dict.fromkeys(owner for owner, _ in self._rows.owned(self._of, host=self._host)):
            if owner.id not in but:
                self.sweep(owner.id)

    def _undone(self, owner_id: UUID, entry: LedgerEntry, until: float) -> None:
        while True:
            try:
                return self._undo[entry.kind](owner_id, entry.name)
            except HypervisorAway:
                if time.monotonic() >= until:
                    raise
            time.sleep(LOOK_AGAIN_S)

    def _owner(self, owner_id: UUID) -> Owner:
        return Owner(self._of, owner_id)
