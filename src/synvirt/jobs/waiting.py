"""Jobs that wait for a source. A change of its endpoint, its pin or its password wakes them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from synvirt.jobs.stop import Stop


class Waiting:
    """The waiting jobs of this process. A job of another host notices the change at its next try."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: dict[UUID, list[Stop]] = {}

    @contextmanager
    def held(self, source_id: UUID, stop: Stop) -> Iterator[None]:
        """A job waits for this source while the block runs."""
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
