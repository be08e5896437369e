"""What a job remembers beyond what it shows: a document a row. A kind of job says what they are (`migrations/memory.py`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from synvirt.model.values import Model
from synvirt.store.documents import VERSION, parsed, rewritten, version_after
from synvirt.store.tables import memory


class Remembered(Model):
    """`kind`: of the row, for good. Each field has a default, which is what a job remembers that has noted nothing."""

    kind: ClassVar[str]


R = TypeVar("R", bound=Remembered)


class MemoryRows:
    """The memory of jobs, by job and name."""

    def __init__(
        self,
        *,
        reading: Callable[[], AbstractContextManager[Connection]],
        writing_of: Callable[[UUID], AbstractContextManager[Connection]],
    ) -> None:
        self._reading, self._writing_of = reading, writing_of

    def get(self, job_id: UUID, remembered: type[R], number: int = 0) -> R:
        """`number`: of the pass, for what there is of each. Unreadable."""
        query = select(memory.c.document, memory.c.version).where(*_same(job_id, remembered, number))
        with self._reading() as db:
            row = db.execute(query).first()
        return remembered() if row is None else parsed(remembered, row.document, row.version)

    def change(self, job_id: UUID, remembered: type[R], change: Callable[[R], R], number: int = 0) -> R:
        """Unreadable."""
        same = _same(job_id, remembered, number)
        with self._writing_of(job_id) as db:
            row = db.execute(select(memory.c.document, memory.c.version).where(*same).with_for_update()).first()
            before = remembered() if row is None else parsed(remembered, row.document, row.version)
            after = change(before)
            if row is None:
                key = {"migration_id": str(job_id), "kind": remembered.kind, "number": number}
                db.execute(insert(memory).values(**key, document=after.model_dump_json(), version=VERSION))
            else:
                document, version = rewritten(row.document, before, after), version_after(row.version)
                db.execute(update(memory).where(*same).values(document=document, version=version))
        return after


def forget_passes(db: Connection, job_id: UUID, but: tuple[int, ...]) -> None:
    """Of the rows that are numbered, those of the passes `but` stay. 0 is no pass."""
    db.execute(delete(memory).where(memory.c.migration_id == str(job_id), memory.c.number.not_in((0, *but))))


def _same(job_id: UUID, remembered: type[Remembered], number: int) -> tuple[ColumnElement[bool], ...]:
    return memory.c.migration_id == str(job_id), memory.c.kind == remembered.kind, memory.c.number == number
