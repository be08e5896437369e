"""How fast a job copies, and when it will be done."""

import time
from collections import deque
from collections.abc import Callable

from synvirt.model.job import Progress

# Long enough for steady figures, short enough for fresh ones.
RATE_WINDOW_S = 10.0


class Rate:
    """Bytes a second of the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, done: int) -> float:
        """The rate in bytes per second over the last RATE_WINDOW_S, once `done` bytes are copied."""
        moment = self._clock()
        self._seen.append((moment, done))
        # One moment before the window stays: after a pause of this process its messages come all at once, and would be no time
        # apart.
        while len(self._seen) > 2 and moment - self._seen[1][0] >= RATE_WINDOW_S:
            self._seen.popleft()
        then, done_then = self._seen[0]
        return max(0.0, (done - done_then) / (moment - then)) if moment > then else 0.0

    def progress(self, *, total: int, done: int, zero: int, before: tuple[int, int] = (0, 0)) -> Progress:
        """The figures of a job. `before`: bytes that it copied earlier, and zeros among them; they do not count for the
        rate."""
        rate, total = self.at(done), max(total, done)
        before_bytes, before_zero = before
        return Progress(
            bytes_total=before_bytes + total,
            bytes_done=before_bytes + done,
            bytes_zero=before_zero + zero,
            rate_bps=rate,
            eta_s=(total - done) / rate if rate > 0 else None,
        )
