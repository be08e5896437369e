"""What a run makes on the side of the guest, in the ledger before it is made: snapshots, bookmarks, checkpoints, scratch files.

An entry is deleted after its things are removed. The next start finds what a killed service left by its entries. The owner is
the backup job, as its marks stay longer than the run that made them:

    working ─▶ remove everything            the restore point does not exist
    keeping ─▶ remove all but the marks     it may exist: the next run may count changes from them
    lasting ─▶ only marks are left          bookmarks, or a checkpoint
"""

from typing import Literal
from uuid import UUID

from synvirt.model.values import Model
from synvirt.store.documents import readable
from synvirt.store.ledger import LedgerEntry, LedgerRows, Owner


class Made(Model):
    """`name` is in the name of all of it. `volumes`: of zfs; `folder`: where scratch files and the socket lie."""

    id: UUID
    job_id: UUID
    vm_id: str
    way: Literal["zfs", "bitmap"]
    name: str
    volumes: tuple[str, ...] = ()
    folder: str = ""
    state: Literal["working", "keeping", "lasting"] = "working"


class MadeRows:
    """The entries of this host's backup jobs."""

    def __init__(self, rows: LedgerRows, *, host: str) -> None:
        self._rows, self._host = rows, host

    def put(self, made: Made) -> None:
        self._rows.put(_owner(made), made.way, str(made.id), made, state=made.state, host=self._host)

    def strike(self, made: Made) -> None:
        """Idempotent."""
        self._rows.strike(_owner(made), [LedgerEntry(made.way, str(made.id))])

    def all(self) -> list[Made]:
        """Oldest first."""
        return readable(Made, (entry.document or "" for _, entry in self._rows.owned("backup_job", host=self._host)))


def _owner(made: Made) -> Owner:
    return Owner("backup_job", made.job_id)
