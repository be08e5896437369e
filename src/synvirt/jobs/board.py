"""The board: the newest progress of each running job, of any kind, and the course of each migration; in memory.

Writers never wait for readers: a job pins its newest figures, and a reader looks as often as it likes. So a slow client never
slows a job, and no chunk of data costs a write to the store.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar
from uuid import UUID

from synvirt.errors import SynvirtError
from synvirt.jobs.course import Course
from synvirt.jobs.rate import RATE_WINDOW_S
from synvirt.model.job import DiskProgress, Migration, Progress
from synvirt.model.kinds import State
from synvirt.model.problems import Problem
from synvirt.model.values import now

S = TypeVar("S")


class Figures(Generic[S]):
    """The figures of the jobs of one kind, whose states are `S`. A rate is of the last seconds: of a job that has reported
    nothing in that time, for example as the store is full, it is 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._latest: dict[UUID, tuple[S, Progress, float]] = {}
        self._commits = 0

    @property
    def commits(self) -> int:
        """Grows with every commit of the store: a reader that sees the same number need not ask the store."""
        return self._commits

    def committed(self) -> None:
        self._commits += 1

    def pin(self, job_id: UUID, state: S, progress: Progress) -> None:
        """Shows the newest state and progress of a job."""
        with self._lock:
            self._latest[job_id] = (state, progress, self._clock())

    def unpin(self, job_id: UUID) -> None:
        """Forgets a job that has ended."""
        with self._lock:
            self._latest.pop(job_id, None)

    def latest(self) -> dict[UUID, tuple[S, Progress]]:
        with self._lock:
            return {job_id: (pinned[0], self._progress_now(pinned)) for job_id, pinned in self._latest.items()}

    def progress(self, job_id: UUID) -> Progress | None:
        """None, where nothing of the job is pinned."""
        with self._lock:
            pinned = self._latest.get(job_id)
            return None if pinned is None else self._progress_now(pinned)

    def _progress_now(self, pinned: tuple[S, Progress, float]) -> Progress:
        _, progress, at = pinned
        if not progress.rate_bps or self._clock() - at <= RATE_WINDOW_S:
            return progress
        return progress.stopped()


class Board(Figures[State]):
    """The figures of migrations; also those of their disks, and how fast they copied."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._disks: dict[UUID, tuple[DiskProgress, ...]] = {}
        self._troubles: dict[UUID, Problem] = {}
        self._courses: dict[UUID, Course] = {}

    def pin(self, job_id: UUID, state: State, progress: Progress, disks: tuple[DiskProgress, ...] = ()) -> None:
        """`disks`: the job's disks as they are now; none, where those of its document are right."""
        with self._lock:
            super().pin(job_id, state, progress)
            self._disks[job_id] = disks
            self._troubles.pop(job_id, None)
            self._courses[job_id] = self._courses.get(job_id, Course()).with_sample(time.time(), progress.bytes_done)

    def unpin(self, job_id: UUID) -> None:
        """Forgets the figures of a job that has ended."""
        with self._lock:
            super().unpin(job_id)
            self._disks.pop(job_id, None)
            self._troubles.pop(job_id, None)
            self._courses.pop(job_id, None)

    def store_is_away(self, job_id: UUID, error: SynvirtError) -> None:
        """The job waits for the store, which therefore cannot keep why. Shown until the job's figures move again."""
        with self._lock:
            if job_id not in self._latest:
                return
            state, progress, _ = self._latest[job_id]
            message = f"{error.detail.rstrip('.')}. The job waits, and goes on once the store takes its changes"
            known = self._troubles.get(job_id)
            if known is None or known.message != message:
                self._troubles[job_id] = Problem(
                    code=error.code, message=message, hint=error.hint, fatal=False, at=now(), state=state
                )
            self._latest[job_id] = (state, progress.stopped(), self._clock())

    def disks(self, job_id: UUID, state: State) -> tuple[DiskProgress, ...]:
        """The job's disks as they were pinned last; none, where they were pinned in another state."""
        with self._lock:
            latest = self._latest.get(job_id)
            return self._disks.get(job_id, ()) if latest is not None and latest[0] == state else ()

    def current(self, job: Migration) -> Migration:
        """The stored job with its newest figures, if these are of the same state."""
        with self._lock:
            pinned = self._latest.get(job.id)
            if pinned is None or pinned[0] != job.state:
                return job
            shown = {
                "progress": self._progress_now(pinned),
                "disks": self._disks.get(job.id) or job.disks,
                "last_error": self._troubles.get(job.id, job.last_error),
            }
            return job.model_copy(update=shown)

    def take_up(self, job_id: UUID, course: Course) -> None:
        """Takes over the course that the job had before a restart. A course that the board has already stays."""
        with self._lock:
            self._courses.setdefault(job_id, course)

    def courses(self) -> dict[UUID, Course]:
        """The courses of the running jobs, by job."""
        with self._lock:
            return dict(self._courses)
