"""What is stored of a run besides its own row, until its end: its request, its progress, and whether it is to be cancelled.

request      written with the run, or not at all
watermarks   written as it goes; the document is that of its kind
cancel       written when somebody cancels the run: the service may end before the run has stopped
"""

from typing import TypeVar
from uuid import UUID, uuid5

from pydantic import BaseModel

from synvirt.errors import BackupNotFound, Interrupted
from synvirt.store.backups import BackupRows, Key, Kind, Row
from synvirt.store.documents import Unreadable, parsed

_PARTS: tuple[Kind, ...] = ("request", "watermarks")
_CANCEL: Kind = "cancel"

M = TypeVar("M", bound=BaseModel)


class _Cancel(BaseModel):
    """That the run is to be cancelled; there is no more to say."""


class Memory:
    """The memory of one host's runs: rows of the store, each by its run's id."""

    def __init__(self, rows: BackupRows, *, host: str) -> None:
        self._rows, self._host = rows, host

    @staticmethod
    def request(run_id: UUID, asked: BaseModel) -> Row:
        """The row of the request, written together with the run's own row."""
        return Row("request", _row(run_id, "request"), asked)

    def asked(self, run_id: UUID, model: type[M]) -> M:
        """The request. Interrupted, if it is not known: the run began under a version of the service that did not store it."""
        asked = self._get(run_id, "request", model)
        if asked is None:
            raise Interrupted("the service ended while the run was under way", hint="start the run again")
        return asked

    def mark(self, run_id: UUID, model: type[M]) -> M | None:
        """The progress. None, if nothing was done yet that need not be repeated."""
        return self._get(run_id, "watermarks", model)

    def put_mark(self, run_id: UUID, mark: BaseModel) -> None:
        self._rows.put("watermarks", _row(run_id, "watermarks"), mark, host=self._host)

    def is_kept(self, run_id: UUID) -> bool:
        """Whether the request is stored. PersistFailed."""
        return self._is_there(run_id, "request")

    def cancel(self, run_id: UUID) -> None:
        """Notes that the run is to be cancelled."""
        self._rows.put(_CANCEL, _row(run_id, _CANCEL), _Cancel(), host=self._host)

    def is_cancelled(self, run_id: UUID) -> bool:
        """Whether the run is to be cancelled. PersistFailed."""
        return self._is_there(run_id, _CANCEL)

    def forget(self, run_id: UUID) -> None:
        """Removes the request and the progress: the run is being undone. Idempotent."""
        self._rows.put_all([], host=self._host, gone=_keys(run_id, _PARTS))

    @staticmethod
    def keys(run_id: UUID) -> tuple[Key, ...]:
        """The keys of all rows that are removed at the run's end."""
        return _keys(run_id, (*_PARTS, _CANCEL))

    def _is_there(self, run_id: UUID, part: Kind) -> bool:
        try:
            return bool(self._rows.get(part, _row(run_id, part), host=self._host))
        except BackupNotFound:
            return False
        except Unreadable:
            return True

    def _get(self, run_id: UUID, part: Kind, model: type[M]) -> M | None:
        """Unreadable."""
        try:
            return parsed(model, self._rows.get(part, _row(run_id, part), host=self._host))
        except BackupNotFound:
            return None


def _keys(run_id: UUID, parts: tuple[Kind, ...]) -> tuple[Key, ...]:
    return tuple((part, _row(run_id, part)) for part in parts)


def _row(run_id: UUID, part: Kind) -> UUID:
    """An id of its own, as the run's id names the run's own row."""
    return uuid5(run_id, part)
