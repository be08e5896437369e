"""What a run makes on the side of the guest, in the store before it is made: snapshots, bookmarks, checkpoints, scratch files.

A row is struck out after what it names is gone. What a killed service left is found by its rows at the next start.

    working ─▶ all of it is to go           the restore point is not there
    keeping ─▶ all but the marks            it may be: the next run may count changes from them
    lasting ─▶ nothing is left but marks    bookmarks, or a checkpoint
"""

from typing import Literal
from uuid import UUID

from synvirt.model.values import Model
from synvirt.store.backups import BackupRows
from synvirt.store.documents import readable


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


class Ledger:
    def __init__(self, rows: BackupRows, *, host: str) -> None:
        self._rows, self._host = rows, host

    def put(self, made: Made) -> None:
        self._rows.put("made", made.id, made, host=self._host)

    def strike(self, made: Made) -> None:
        """Idempotent."""
        self._rows.remove("made", made.id, host=self._host)

    def all(self) -> list[Made]:
        """Oldest first."""
        return readable(Made, self._rows.all("made", host=self._host))
