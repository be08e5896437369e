"""A run as its own thread sees it: where it stands, what it warns of, how far its bytes are.

move, note, warn ─▶ the store, and an event for who listens
figure           ─▶ Figures, in memory; and the store, every few seconds, for who asks after a kill
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from uuid import UUID

import structlog

from synvirt.backups.model import BackupRun, Status, Trouble
from synvirt.copying import Copied
from synvirt.errors import Cancelled
from synvirt.model.job import Progress

# As for migrations: long enough that the figure is steady, short enough that it is true.
RATE_WINDOW_S = 10.0
# What a kill makes a run forget of its figures.
SAVE_EVERY_S = 5.0

_log = structlog.get_logger("synvirt.backups")


class Figures:
    """The newest progress of each run that is under way, in memory, for whoever looks. `commits` grows with every run that is
    written: who sees the same number need not ask the store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[UUID, tuple[Status, Progress]] = {}
        self.commits = 0

    def pin(self, run_id: UUID, status: Status, progress: Progress) -> None:
        with self._lock:
            self._latest[run_id] = (status, progress)

    def unpin(self, run_id: UUID) -> None:
        with self._lock:
            self._latest.pop(run_id, None)

    def latest(self) -> dict[UUID, tuple[Status, Progress]]:
        with self._lock:
            return dict(self._latest)


class Saves(Protocol):
    def __call__(self, run: BackupRun, *, announced: bool = True) -> None: ...


class Stores(Protocol):
    """What a session of a repository has stored."""

    @property
    def stored_bytes(self) -> int: ...


class UnderWay:
    """`closing`: the service ends, and the next one goes on with the run: what it made stays."""

    def __init__(
        self,
        run: BackupRun,
        stop: Callable[[], bool],
        save: Saves,
        figures: Figures,
        closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run, self.stop, self.closing = run, stop, closing
        self._save, self._figures = save, figures
        self._rate, self._saved_at = Rate(), time.monotonic()
        self._stored: list[Stores] = []
        self._stored_before = run.stored_bytes  # by a service that ended meanwhile

    def move(self, status: Status, **changes: Any) -> None:
        """Cancelled, where that is asked."""
        if self.stop():
            raise Cancelled
        if status != self.run.status:
            _log.info("backup run moved", status=str(status))
        self._put(announced=True, status=status, **changes)

    def note(self, **changes: Any) -> None:
        """What is so whatever is asked meanwhile."""
        self._put(announced=True, **changes)

    def warn(self, code: str, message: str, vm_id: str | None = None) -> None:
        trouble = Trouble(code=code, message=message, vm_id=vm_id)
        _log.warning("backup run warns", code=code, detail=message, guest=vm_id)
        self._put(announced=True, warnings=(*self.run.warnings, trouble))

    def storing(self, session: Stores) -> None:
        """What the session stores counts as the run's, from now on."""
        self._stored.append(session)

    def figure(self, total: int, done: int, zero: int = 0) -> None:
        """Bytes of the whole run: what is to be read, what was, and how much of that is zeros that needed no reading."""
        rate = self._rate.at(done)
        total = max(total, done)
        eta = (total - done) / rate if rate > 0 else None
        progress = Progress(bytes_total=total, bytes_done=done, bytes_zero=zero, rate_bps=rate, eta_s=eta)
        self.run = self.run.model_copy(update={"progress": progress})
        self._figures.pin(self.run.id, self.run.status, progress)
        if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self._put(announced=False)

    def now(self) -> BackupRun:
        """The run, with what is stored by now."""
        return self.run.model_copy(
            update={"stored_bytes": self._stored_before + sum(session.stored_bytes for session in self._stored)}
        )

    def _put(self, *, announced: bool, **changes: Any) -> None:
        self.run = self.now().model_copy(update=changes)
        self._figures.pin(self.run.id, self.run.status, self.run.progress)
        self._save(self.run, announced=announced)
        self._saved_at = time.monotonic()


class Rate:
    """Bytes a second of the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, done: int) -> float:
        moment = self._clock()
        self._seen.append((moment, done))
        while len(self._seen) > 2 and moment - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()
        then, done_then = self._seen[0]
        return max(0.0, (done - done_then) / (moment - then)) if moment > then else 0.0


class Sum:
    """The figures of several copies, one after the other, behind what the run had read before."""

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way, self._before = under_way, under_way.run.progress
        self._each: list[Copied] = []

    def next_disk(self) -> Callable[[Copied], None]:
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
