"""What a job remembers besides its document: typed rows. A kind of job defines them (`migrations/memory.py`)."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import ClassVar, TypeVar
from uuid import UUID

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from synvirt.model.values import Model
from synvirt.store.documents import VERSION, parsed, rewritten, version_after
from synvirt.store.tables import memory


class Remembered(Model):
    """A row's model. `kind`: the row's kind, which never changes. Each field has a default, for a job that has noted
    nothing. `renamed`: present names of fields by the names that rows of earlier versions have."""

    kind: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {}


R = TypeVar("R", bound=Remembered)


class MemoryRows:
    """The memory of jobs, by job and kind."""

    def __init__(
        self,
        *,
        reading: Callable[[], AbstractContextManager[Connection]],
        writing_of: Callable[[UUID], AbstractContextManager[Connection]],
    ) -> None:
        self._reading, self._writing_of = reading, writing_of

    def get(self, job_id: UUID, remembered: type[R], number: int = 0) -> R:
        """What a job remembers of this kind. `number`: the pass, for a kind with a row for each pass. Unreadable."""
        with self._reading() as db:
            row = db.execute(_ROW, _names(job_id, remembered, number)).first()
        return remembered() if row is None else parsed(remembered, _renamed(remembered, row.document), row.version)

    def change(self, job_id: UUID, remembered: type[R], change: Callable[[R], R], number: int = 0) -> R:
        """Changes a row, and gives it as it is then. Unreadable."""
        names = _names(job_id, remembered, number)
        with self._writing_of(job_id) as db:
            row = db.execute(_LOCKED_ROW, names).first()
            text = "" if row is None else _renamed(remembered, row.document)
            before = remembered() if row is None else parsed(remembered, text, row.version)
            after = change(before)
            if row is None:
                key = {"migration_id": str(job_id), "kind": remembered.kind, "number": number}
                db.execute(_INSERT, {**key, "document": after.model_dump_json(), "version": VERSION})
            else:
                document, version = rewritten(text, before, after), version_after(row.version)
                db.execute(_REWRITE, {**names, "new_document": document, "new_version": version})
        return after


def forget_passes(db: Connection, job_id: UUID, but: tuple[int, ...]) -> None:
    """Deletes the rows of all passes except `but`. Rows with number 0 belong to no pass, and stay."""
    db.execute(_FORGET, {"job": str(job_id), "kept": [0, *but]})


def _renamed(remembered: type[Remembered], document: str) -> str:
    """The document with the present names of its fields."""
    if not any(f'"{old}"' in document for old in remembered.renamed):
        return document
    try:
        fields = json.loads(document)
    except ValueError:  # `parsed` refuses it
        return document
    if isinstance(fields, dict):
        for old, new in remembered.renamed.items():
            if old in fields:
                fields.setdefault(new, fields.pop(old))
    return json.dumps(fields, ensure_ascii=False)


def _names(job_id: UUID, remembered: type[Remembered], number: int) -> dict[str, object]:
    return {"job": str(job_id), "of_kind": remembered.kind, "of_number": number}


# Made once: a job asks at each step, and to make a statement costs more than SQLite takes to answer it.
_THIS = (
    memory.c.migration_id == bindparam("job"),
    memory.c.kind == bindparam("of_kind"),
    memory.c.number == bindparam("of_number"),
)
_ROW = select(memory.c.document, memory.c.version).where(*_THIS)
_INSERT = insert(memory)
_FORGET = delete(memory).where(
    memory.c.migration_id == bindparam("job"), memory.c.number.not_in(bindparam("kept", expanding=True))
)
_LOCKED_ROW = _ROW.with_for_update()
_REWRITE = update(memory).where(*_THIS).values(document=bindparam("new_document"), version=bindparam("new_version"))
