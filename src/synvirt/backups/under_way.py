"""A run from its own thread: its status, its warnings, its progress in bytes.

move, note, warn ─▶ the store, and an event for who listens
figure           ─▶ the board, in memory; and the store, every few seconds, for questions after a kill
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from synvirt.backups.model import BackupRun, Status, Trouble
from synvirt.copying import Copied
from synvirt.errors import Cancelled
from synvirt.jobs.board import Figures
from synvirt.jobs.rate import Rate
from synvirt.model.job import Progress

# After a kill, a run loses at most this many seconds of its figures.
SAVE_EVERY_S = 5.0

_log = structlog.get_logger("synvirt.backups")


class Saves(Protocol):
    """Writes a run to the store; `announced`: with an event for listeners."""

    def __call__(self, run: BackupRun, *, announced: bool = True) -> None: ...


class Stores(Protocol):
    """What a session of a repository has stored."""

    @property
    def stored_bytes(self) -> int: ...


class UnderWay:
    """`closing`: the service ends, and the next one continues the run: what it made stays. `lock`: held while the run is read
    and then changed by what was read."""

    def __init__(
        self,
        run: BackupRun,
        stop: Callable[[], bool],
        save: Saves,
        board: Figures[Status],
        closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run, self.stop, self.closing = run, stop, closing
        self._save, self._board = save, board
        self.lock = threading.RLock()
        self._rate, self._saved_at = Rate(), time.monotonic()
        self._stored: list[Stores] = []
        self._stored_before = run.stored_bytes  # by a service that ended meanwhile

    def move(self, status: Status, **changes: Any) -> None:
        """Moves the run to a status. Cancelled, if that is requested."""
        if self.stop():
            raise Cancelled
        if status != self.run.status:
            _log.info("backup run moved", status=str(status))
        self._put(announced=True, status=status, **changes)

    def note(self, **changes: Any) -> None:
        """Writes fields, even if a cancel is requested meanwhile."""
        self._put(announced=True, **changes)

    def warn(self, code: str, message: str, vm_id: str | None = None) -> None:
        """Adds a warning to the run, and announces it."""
        trouble = Trouble(code=code, message=message, vm_id=vm_id)
        if trouble in self.run.warnings:
            return  # done under the earlier service
        _log.warning("backup run warns", code=code, detail=message, guest=vm_id)
        with self.lock:
            self._put(announced=True, warnings=(*self.run.warnings, trouble))

    def storing(self, session: Stores) -> None:
        """From now on, what the session stores counts for the run."""
        self._stored.append(session)

    def figure(self, total: int, done: int, zero: int = 0) -> None:
        """Bytes of the whole run: to be read, read, and the zeros among these that needed no reading."""
        progress = self._rate.progress(total=total, done=done, zero=zero)
        with self.lock:
            self.run = self.run.model_copy(update={"progress": progress})
            self._board.pin(self.run.id, self.run.status, progress)
            if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
                self._put(announced=False)

    def now(self) -> BackupRun:
        """The run, with what is stored by now."""
        return self.run.model_copy(
            update={"stored_bytes": self._stored_before + sum(session.stored_bytes for session in self._stored)}
        )

    def _put(self, *, announced: bool, **changes: Any) -> None:
        with self.lock:
            self.run = self.now().model_copy(update=changes)
            self._board.pin(self.run.id, self.run.status, self.run.progress)
            self._save(self.run, announced=announced)
            self._saved_at = time.monotonic()


class Sum:
    """The figures of several copies, one after the other, added to what was read `before`: by default, the run's own
    figures."""

    def __init__(self, under_way: UnderWay, before: Progress | None = None) -> None:
        self._under_way, self._before = under_way, before or under_way.run.progress
        self._each: list[Copied] = []

    def next_disk(self) -> Callable[[Copied], None]:
        """A function for the figures of the next disk, which adds them to the run's."""
        number = len(self._each)
        self._each.append(Copied(0, 0, 0, 0))

        def progressed(copied: Copied) -> None:
            self._each[number] = copied
            self._under_way.figure(
                self._before.bytes_done + sum(one.bytes_total for one in self._each),
                self._before.bytes_done + sum(one.bytes_done for one in self._each),
                self._before.bytes_zero + sum(one.bytes_zero for one in self._each),
            )

        return progressed
