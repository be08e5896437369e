"""Jobs that wait for a source, and what wakes them: somebody has changed its endpoint, its pin or its password."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from synvirt.jobs.stop import Stop


class Waiting:
    """Of this process. A job of another host finds out by its next try."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: dict[UUID, list[Stop]] = {}

    @contextmanager
    def held(self, source_id: UUID, stop: Stop) -> Iterator[None]:
        """While a job waits for this source."""
        with self._lock:
            self._stops.setdefault(source_id, []).append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops[source_id].remove(stop)
                if not self._stops[source_id]:
                    del self._stops[source_id]

    def wake(self, source_id: UUID) -> None:
        """The jobs that wait for it try again at once."""
        with self._lock:
            found = list(self._stops.get(source_id, ()))
        for stop in found:
            stop.wake()
