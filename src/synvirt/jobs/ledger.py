"""The ledger: what a job makes anywhere, written down before it is made, and struck out after it is gone or its user's to keep.

    record ─▶ make ─▶ … ─▶ settled     it went well: what it made is its user's, with its end and not before
                       └─▶ sweep       it failed, was cancelled, or its service was killed: undone, the newest first

Undoing is idempotent, and what cannot be undone now stays written down, for the next start. `Sweep` is the order of it, for
asyncio (`migrations/advance.py`) and for threads (`Ledger`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import structlog

from synvirt.errors import SynvirtError
from synvirt.store.ledger import LedgerEntry, LedgerRows, Owner, OwnerKind

log = structlog.get_logger(__name__)

# Undoes what that owner made under that name.
Undo = Callable[[UUID, str], None]


@dataclass(frozen=True)
class Order:
    """`late`: kinds that come after all others, the higher the later. `only_after`: by kind, the kinds of which nothing may be
    left when it is undone."""

    late: Mapping[str, int] = field(default_factory=dict)
    only_after: Mapping[str, frozenset[str]] = field(default_factory=dict)


NEWEST_FIRST = Order()


class Sweep:
    """The entries in the order in which they are undone. Who goes through them says of each that cannot be undone that it
    `stays`, before the next is asked for."""

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
    """What the owners of one kind made on this host. `undo`: how each kind of thing is undone. For threads; one at a time for
    one owner."""

    def __init__(self, rows: LedgerRows, of: OwnerKind, *, host: str, undo: Mapping[str, Undo]) -> None:
        self._rows, self._of, self._host, self._undo = rows, of, host, undo

    def record(self, owner_id: UUID, kind: str, name: str) -> None:
        """Before it is made. Once for each name."""
        assert kind in self._undo, kind
        self._rows.record(self._owner(owner_id), kind, name, host=self._host)

    def of(self, owner_id: UUID) -> list[LedgerEntry]:
        """In the order in which the things were made."""
        return self._rows.of(self._owner(owner_id))

    def replace(self, owner_id: UUID, entries: Sequence[LedgerEntry]) -> None:
        """All of them in one step: what was to be undone one way is from here on undone in another."""
        self._rows.replace(self._owner(owner_id), entries, host=self._host)

    def sweep(self, owner_id: UUID, *, then: Sequence[LedgerEntry] = ()) -> bool:
        """Whether nothing is left. Never raises: why the owner failed is what its user has to know. All that is gone is struck
        out in one step: one entry may say of the others that they go forward (restores/in_place.py). `then`: what is written
        down in that step, where nothing is left."""
        try:
            entries = self._rows.of(self._owner(owner_id))
            sweep, gone = Sweep(entries), list[LedgerEntry]()
            for entry in sweep:
                try:
                    self._undo[entry.kind](owner_id, entry.name)
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
        """What a service that was killed left behind; before any owner begins. `but`: of those, which go on."""
        for owner in dict.fromkeys(owner for owner, _ in self._rows.owned(self._of, host=self._host)):
            if owner.id not in but:
                self.sweep(owner.id)

    def _owner(self, owner_id: UUID) -> Owner:
        return Owner(self._of, owner_id)
