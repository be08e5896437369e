"""Queries about hosts and their leases. Times are of the database's clock, in seconds since 1970: hosts' clocks differ.

    begin ─▶ epoch n, lease until now + ttl ─▶ renew, renew, … ─✗ fenced: epoch n + 1
                                                                   └─ every write of epoch n is refused (LeaseLost)

The epoch counts the starts and the fencings of a host. A process writes under a `Fence`: each of its transactions locks the
host's row and compares the epoch. So a fenced process commits nothing any more, and a fencing waits for transactions that are
under way.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, Connection, Double, bindparam, delete, insert, literal_column, or_, select, update

from synvirt.errors import PersistFailed
from synvirt.store.tables import hosts, slots

# Not fenced; fenced by another host after the lease was over; fenced by an operator, who says that the host is off.
FencedBy = Literal["", "expired", "operator"]
Transaction = Callable[[], AbstractContextManager[Connection]]

# Made once: each transaction that writes asks it. SQLite has one writer anyway, and no lock of a row.
_LOCKED_EPOCH = select(hosts.c.epoch).where(hosts.c.id == bindparam("host")).with_for_update(read=True)


class LeaseLost(PersistFailed):
    """This host was fenced: another host may run its jobs now."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The host and the epoch that a process writes under."""

    host: str
    epoch: int

    def check(self, db: Connection) -> None:
        """LeaseLost, unless the host's row still has this epoch. The row stays locked until the transaction ends."""
        epoch = db.execute(_LOCKED_EPOCH, {"host": self.host}).scalar()
        if epoch != self.epoch:
            raise LeaseLost(
                f"host {self.host} writes under epoch {self.epoch}, and it is {epoch} by now: it was fenced, or started again",
                hint="see the list of hosts; the service takes up what is still its own by itself",
            )

    def check_host(self, host: str) -> None:
        """LeaseLost, where a job belongs to another host."""
        if host != self.host:
            raise LeaseLost(f"the job is host {host}'s, not {self.host}'s", hint="see the list of hosts")


@dataclass(frozen=True, slots=True)
class HostRow:
    """A host. `left_s`: seconds left of its lease; negative, if the lease ended that many seconds ago. `document`: how the host
    describes itself, as JSON."""

    id: str
    epoch: int
    left_s: float
    seen_at: float
    fenced: FencedBy
    document: str


class HostRows:
    """The hosts, their leases and epochs."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def begin(self, host: str, *, ttl_s: float, document: str) -> Fence:
        """Begins a new epoch. An earlier process of this host cannot write any more, and its slots become free. The caller must
        have ended what was under way."""
        with self._writing() as db:
            moment = now(db)
            values = {"until": moment + ttl_s, "seen_at": moment, "fenced": "", "document": document}
            begun = update(hosts).where(hosts.c.id == host).values(epoch=hosts.c.epoch + 1, **values)
            if db.execute(begun).rowcount == 0:
                db.execute(insert(hosts).values(id=host, epoch=1, **values))
            db.execute(delete(slots).where(slots.c.host == host))
            return Fence(host, db.execute(select(hosts.c.epoch).where(hosts.c.id == host)).scalar_one())

    def renew(self, fence: Fence, *, ttl_s: float, document: str) -> bool:
        """Renews the lease. False, when the host was fenced."""
        with self._writing() as db:
            moment = now(db)
            mine = (hosts.c.id == fence.host, hosts.c.epoch == fence.epoch)
            renewed = update(hosts).where(*mine).values(until=moment + ttl_s, seen_at=moment, document=document)
            return db.execute(renewed).rowcount == 1

    def fence(self, host: str) -> bool:
        """Fences a host at once, for an operator. If the host is alive, its jobs end within seconds. False, when there is no
        such host."""
        with self._writing() as db:
            fenced = update(hosts).where(hosts.c.id == host).values(epoch=hosts.c.epoch + 1, fenced="operator")
            return db.execute(fenced).rowcount == 1

    def fence_expired(self, *, grace_s: float, silent: Mapping[str, float]) -> list[str]:
        """Fences those of the `silent` hosts whose lease has been over for longer than `grace_s`, and that were not seen since
        then. The hosts that this call has fenced."""
        if not silent:
            return []
        with self._writing() as db:
            expired = (hosts.c.until < now(db) - grace_s) & (hosts.c.fenced == "")
            unseen = or_(*((hosts.c.id == host) & (hosts.c.seen_at == seen_at) for host, seen_at in silent.items()))
            fenced = (
                update(hosts).where(expired, unseen).values(epoch=hosts.c.epoch + 1, fenced="expired").returning(hosts.c.id)
            )
            return sorted(db.execute(fenced).scalars())

    def all(self) -> list[HostRow]:
        """All hosts, by id."""
        with self._reading() as db:
            found = db.execute(select(hosts, (hosts.c.until - now(db)).label("left_s")).order_by(hosts.c.id)).all()
            return [HostRow(row.id, row.epoch, row.left_s, row.seen_at, row.fenced, row.document) for row in found]


def now(db: Connection) -> ColumnElement[float]:
    """The database's clock."""
    return clock(db.dialect.name)


def clock(dialect: str) -> ColumnElement[float]:
    """The clock of a database of this dialect."""
    if dialect == "postgresql":
        return literal_column("extract(epoch FROM clock_timestamp())::double precision", type_=Double())
    return literal_column("((julianday('now') - 2440587.5) * 86400.0)", type_=Double())
