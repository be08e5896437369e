"""The board: the newest progress of each running job, in memory, for whoever looks.

Writers never wait for readers: a job pins its newest figure, and a reader looks as often as it likes. So a slow client can
never slow a job, and nothing is stored per chunk.
"""

import threading
from uuid import UUID

from synvirt.model import Progress, State


class Board:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[UUID, tuple[State, Progress]] = {}
        self._commits = 0

    @property
    def commits(self) -> int:
        """Grows with every commit of the store: a reader that sees the same number need not ask the store."""
        return self._commits

    def committed(self) -> None:
        self._commits += 1

    def pin(self, job_id: UUID, state: State, progress: Progress) -> None:
        with self._lock:
            self._latest[job_id] = (state, progress)

    def unpin(self, job_id: UUID) -> None:
        with self._lock:
            self._latest.pop(job_id, None)

    def latest(self) -> dict[UUID, tuple[State, Progress]]:
        with self._lock:
            return dict(self._latest)
