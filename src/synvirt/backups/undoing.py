"""What a run makes on this host, written down before it is made: so that a run that fails, or is killed, leaves nothing.

    record ─▶ make ─▶ … ─▶ settle      the run is completed: what it made is its user's
                       └─▶ sweep       it failed, was cancelled, or its service was killed: undone, the newest first

Undoing is idempotent, and what cannot be undone now stays written down for the next start.
"""

from collections.abc import Callable, Mapping
from uuid import UUID, uuid5

import structlog

from synvirt.errors import BackupNotFound, SynvirtError
from synvirt.model.values import Model
from synvirt.store.backups import BackupRows
from synvirt.store.documents import parsed, readable

_log = structlog.get_logger("synvirt.backups")


class Thing(Model):
    """`kind`: how it is undone; `name`: what is undone."""

    kind: str
    name: str


class Things(Model):
    run_id: UUID
    things: tuple[Thing, ...] = ()


# Undoes what that run made under that name.
Undo = Callable[[UUID, str], None]


class Undoing:
    def __init__(self, rows: BackupRows, *, host: str, undo: Mapping[str, Undo]) -> None:
        self._rows, self._host, self._undo = rows, host, undo

    def record(self, run_id: UUID, kind: str, name: str) -> None:
        """Before it is made. Once for each name."""
        assert kind in self._undo, kind
        known = self._of(run_id)
        thing = Thing(kind=kind, name=name)
        if thing not in known:
            self.replace(run_id, (*known, thing))

    def has(self, run_id: UUID, kind: str) -> bool:
        return any(thing.kind == kind for thing in self._of(run_id))

    def replace(self, run_id: UUID, things: tuple[Thing, ...]) -> None:
        """All of them in one step: what was to be undone one way is from here on undone in another."""
        written = Things(run_id=run_id, things=things)
        self._rows.put("unfinished", _row(run_id), written, host=self._host)

    def settle(self, run_id: UUID) -> None:
        self._rows.remove("unfinished", _row(run_id), host=self._host)

    def sweep(self, run_id: UUID) -> bool:
        """Whether nothing is left. Never raises: why the run failed is what its user has to know."""
        try:
            left = []
            for thing in reversed(self._of(run_id)):
                try:
                    self._undo[thing.kind](run_id, thing.name)
                except Exception as error:
                    _log.warning("what a run made cannot be undone", run=str(run_id), thing=thing.kind, exc_info=error)
                    left.append(thing)
            if left:
                self.replace(run_id, tuple(reversed(left)))
            else:
                self.settle(run_id)
        except SynvirtError as error:
            _log.warning("what a run made is not known", run=str(run_id), detail=error.detail)
            return False
        return not left

    def sweep_all(self, *, but: frozenset[UUID] = frozenset()) -> None:
        """What a service that was killed left behind; before any run begins. `but`: of those runs, which go on."""
        for written in readable(Things, self._rows.all("unfinished", host=self._host)):
            if written.run_id not in but:
                self.sweep(written.run_id)

    def _of(self, run_id: UUID) -> tuple[Thing, ...]:
        try:
            return parsed(Things, self._rows.get("unfinished", _row(run_id), host=self._host)).things
        except BackupNotFound:
            return ()


def _row(run_id: UUID) -> UUID:
    """Its own id would be that of the run's own row."""
    return uuid5(run_id, "unfinished")
