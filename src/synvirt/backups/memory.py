"""What is kept of a run beside its own row, until its end: what it was asked for, and how far it is.

request      written with the run, or not at all
watermarks   written as it goes; the document is that of its kind
"""

from typing import TypeVar
from uuid import UUID, uuid5

from pydantic import BaseModel

from synvirt.errors import BackupNotFound, Interrupted
from synvirt.store.backups import BackupRows, Key, Kind, Row
from synvirt.store.documents import Unreadable, parsed

_PARTS: tuple[Kind, ...] = ("request", "watermarks")

M = TypeVar("M", bound=BaseModel)


class Memory:
    """Of the runs of one host: rows of the store, each by its run's id."""

    def __init__(self, rows: BackupRows, *, host: str) -> None:
        self._rows, self._host = rows, host

    @staticmethod
    def request(run_id: UUID, asked: BaseModel) -> Row:
        """To be written with the run's own row."""
        return Row("request", _row(run_id, "request"), asked)

    def asked(self, run_id: UUID, model: type[M]) -> M:
        """Interrupted, where that is not known: the run began under a version of the service that did not keep it."""
        asked = self._get(run_id, "request", model)
        if asked is None:
            raise Interrupted("the service ended while the run was under way", hint="start the run again")
        return asked

    def mark(self, run_id: UUID, model: type[M]) -> M | None:
        """None: it has done nothing yet that need not be done again."""
        return self._get(run_id, "watermarks", model)

    def put_mark(self, run_id: UUID, mark: BaseModel) -> None:
        self._rows.put("watermarks", _row(run_id, "watermarks"), mark, host=self._host)

    def is_kept(self, run_id: UUID) -> bool:
        """Whether it is known what was asked for. PersistFailed."""
        try:
            return bool(self._rows.get("request", _row(run_id, "request"), host=self._host))
        except BackupNotFound:
            return False
        except Unreadable:
            return True

    def forget(self, run_id: UUID) -> None:
        """All of it. Idempotent."""
        self._rows.put_all([], host=self._host, gone=self.keys(run_id))

    @staticmethod
    def keys(run_id: UUID) -> tuple[Key, ...]:
        """All that goes with the run's end."""
        return tuple((part, _row(run_id, part)) for part in _PARTS)

    def _get(self, run_id: UUID, part: Kind, model: type[M]) -> M | None:
        """Unreadable."""
        try:
            return parsed(model, self._rows.get(part, _row(run_id, part), host=self._host))
        except BackupNotFound:
            return None


def _row(run_id: UUID, part: Kind) -> UUID:
    """The run's own id is that of its own row."""
    return uuid5(run_id, part)
