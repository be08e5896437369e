"""Queries about uploads, in the store's transactions. An upload's bytes are on one host, and each host asks for its own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from uuid import UUID

from sqlalchemy import Connection, delete, insert, select

from synvirt.errors import not_listed
from synvirt.model.files import Upload
from synvirt.store.documents import VERSION, is_known, parsed, readable
from synvirt.store.migration_rows import is_unended
from synvirt.store.tables import migrations, uploads, wave_members, waves

# The states of members whose job may begin, or runs.
MEMBERS_LEFT = ("waiting", "syncing", "ready", "cutting_over")
Transaction = Callable[[], AbstractContextManager[Connection]]


class UploadRows:
    """The uploads that are complete. `adding`: as in the store, the block in which jobs are added."""

    def __init__(
        self, *, reading: Transaction, writing: Transaction, adding: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._reading, self._writing, self.adding = reading, writing, adding

    def add(self, upload: Upload, *, host: str) -> None:
        """Registers an upload whose bytes are complete on `host`."""
        with self._writing() as db:
            db.execute(insert(uploads).values(id=str(upload.id), host=host, document=upload.model_dump_json(), version=VERSION))

    def get(self, upload_id: UUID, *, host: str) -> Upload:
        """The upload. UploadNotFound."""
        query = select(uploads).where(uploads.c.id == str(upload_id), uploads.c.host == host)
        with self._reading() as db:
            row = db.execute(query).first()
        if row is None:
            raise not_listed("upload", upload_id)
        return parsed(Upload, row.document, row.version)

    def page(self, *, host: str, limit: int, cursor: int | None = None) -> tuple[list[Upload], int | None]:
        """A page of uploads, newest first, and the cursor of the next page (None: this was the last)."""
        chosen = (uploads.c.host == host, is_known(uploads.c.version))
        query = select(uploads.c.number, uploads.c.document).where(*chosen)
        if cursor is not None:
            query = query.where(uploads.c.number < cursor)
        with self._reading() as db:
            rows = db.execute(query.order_by(uploads.c.number.desc()).limit(limit + 1)).all()
        found = readable(Upload, [row.document for row in rows[:limit]])
        return found, rows[limit - 1].number if len(rows) > limit else None

    def all(self, *, host: str) -> list[Upload]:
        """The uploads of a host."""
        with self._reading() as db:
            chosen = (uploads.c.host == host, is_known(uploads.c.version))
            rows = db.execute(select(uploads.c.document).where(*chosen)).all()
        return readable(Upload, [row.document for row in rows])

    def ids(self, *, host: str) -> set[UUID]:
        """The ids of all uploads of a host, also of those whose documents this version cannot read."""
        with self._reading() as db:
            return {UUID(row.id) for row in db.execute(select(uploads.c.id).where(uploads.c.host == host))}

    def remove(self, upload_id: UUID) -> None:
        """Removes an upload. Idempotent."""
        with self._writing() as db:
            db.execute(delete(uploads).where(uploads.c.id == str(upload_id)))

    def readers(self, upload_id: UUID) -> list[UUID]:
        """The unended jobs that name the upload, by its id or by its path, which contains the id."""
        query = (
            select(migrations.c.id)
            .where(is_unended())
            .where(migrations.c.document.contains(str(upload_id)))
            .order_by(migrations.c.number)
        )
        with self._reading() as db:
            return [UUID(row.id) for row in db.execute(query)]

    def waves(self, upload_id: UUID) -> list[str]:
        """The names of the waves that have a member which names the upload, as above, and has not ended."""
        naming = (wave_members.c.state.in_(MEMBERS_LEFT), wave_members.c.document.contains(str(upload_id)))
        query = (
            select(waves.c.name).where(waves.c.id.in_(select(wave_members.c.wave_id).where(*naming))).order_by(waves.c.number)
        )
        with self._reading() as db:
            return [row.name for row in db.execute(query)]
