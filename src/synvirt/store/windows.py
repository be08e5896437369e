"""Queries about the service's windows, in the store's transactions. All hosts share them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from synvirt.errors import Conflict, NotFound, not_listed
from synvirt.model.job import Migration
from synvirt.model.windows import Window
from synvirt.nearest import did_you_mean
from synvirt.sizes import counted
from synvirt.store.documents import VERSION, is_known, parsed, readable, rewritten, version_after, written
from synvirt.store.migration_rows import is_unended
from synvirt.store.tables import migrations, windows

Transaction = Callable[[], AbstractContextManager[Connection]]


class WindowRows:
    """The windows, by their ids."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def add(self, window: Window) -> None:
        """Adds a window. Conflict, where there is one of that id."""
        with self._writing() as db:
            try:
                db.execute(insert(windows).values(id=window.id, document=written(window), version=VERSION))
            except IntegrityError:  # not looked for before: another host may add one of that id in between
                raise Conflict(
                    f"there is a window {window.id} already", hint="give it another id, or change that one"
                ) from None

    def get(self, window_id: str) -> Window:
        """The window. NotFound."""
        with self._reading() as db:
            row = _row(db, window_id)
        return parsed(Window, row.document, row.version)

    def all(self) -> list[Window]:
        """All windows, by id."""
        with self._reading() as db:
            found = readable(Window, db.execute(select(windows.c.document).where(is_known(windows.c.version))).scalars())
        return sorted(found, key=lambda one: one.id)  # each database sorts texts in its own way

    def change(self, window_id: str, change: Callable[[Window], Window]) -> Window:
        """Changes a window; the jobs that name it go by the new one. NotFound."""
        with self._writing() as db:
            row = _row(db, window_id, lock=True)
            before = parsed(Window, row.document, row.version)
            after = change(before)
            values = {"document": rewritten(row.document, before, after), "version": version_after(row.version)}
            db.execute(update(windows).where(windows.c.id == window_id).values(**values))
        return after

    def remove(self, window_id: str, check: Callable[[Window], None] = lambda window: None) -> None:
        """Removes a window. `check`: raises, where the window as it is stays. NotFound; Conflict, while an unended job names
        it."""
        with self._writing() as db:
            row = _row(db, window_id, lock=True)
            check(parsed(Window, row.document, row.version))
            named = migrations.c.document.contains(f'"window_id":"{window_id}"', autoescape=True)
            query = select(migrations.c.document).where(is_unended(), is_known(migrations.c.version), named)
            jobs = readable(Migration, db.execute(query).scalars())
            waiting = [one for one in jobs if one.plan.warm.window_id == window_id]
            if waiting:
                raise Conflict(
                    f"window {window_id} is needed by {counted(len(waiting), 'job')}: {waiting[0].name} ({waiting[0].id})",
                    hint="let the jobs end or cancel them, or change the window",
                )
            db.execute(delete(windows).where(windows.c.id == window_id))


def _row(db: Connection, window_id: str, *, lock: bool = False) -> Row[Any]:
    query = select(windows).where(windows.c.id == window_id)
    row = db.execute(query.with_for_update() if lock else query).first()
    if row is None:
        error = not_listed("window", window_id)
        raise NotFound(error.detail, hint=did_you_mean(window_id, db.execute(select(windows.c.id)).scalars()) or error.hint)
    return row
