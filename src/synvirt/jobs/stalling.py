"""Whether a worker makes progress. A reader that loops, or a source that answers but sends nothing, would hold a job, its slot
and its lock forever. So would a source that sends a byte now and then: each of them ends the wait of a reader, whose own limits
are for silence.

    a window of `after_s` ─▶ LEAST_BPS × after_s bytes within it, a result, or the end of a disk: the next window begins
                         └─▶ none of these: stalled
"""

import time
from collections.abc import Callable

from synvirt.errors import DiskReadFailed
from synvirt.http_answers import LEAST_BPS
from synvirt.jobs.orders import WANTED_RATE
from synvirt.jobs.wire import Flushed, Moved, Result, Watched


class Stalled(DiskReadFailed):
    """The worker was ended, as it made no progress."""

    def __init__(self, after_s: float) -> None:
        super().__init__(
            f"the worker transferred next to nothing for {after_s:g} s, and was ended",
            hint=f"check what it read from: it brought less than {LEAST_BPS} bytes a second; raise copy_stalled_s if it pauses",
        )


class Stall:
    """`on_message` takes the worker's messages, `answered` notes that the service sent it a line. `after_s` None: no limit."""

    def __init__(self, watched: Watched, after_s: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._watched, self.after_s, self._now = watched, after_s, now
        # Of each disk the highest figures: offset, bytes done, zeros among them.
        self._brought: dict[str, tuple[int, ...]] = {}
        # The present window: when it began, and the bytes since.
        self._since, self._gained = now(), 0
        # Since when the worker owes nothing. The window stands still meanwhile.
        self._rests_since: float | None = None
        self.is_over = False

    def on_message(self, message: Moved | Flushed | Result) -> None:
        """Takes a message. One that repeats the last figures is no progress: disks are flushed every few seconds anyway."""
        if self._is_enough(message):
            self._since, self._gained = self._now(), 0
            self._rests_since = None if self._rests_since is None else self._since
        self._owe(self._owes_after(message))

    def answered(self) -> None:
        self._owe(True)

    def look(self) -> bool:
        """Whether the worker has stalled. Once it has, this stays true."""
        if self.after_s is not None and self._watched is not Watched.NEVER and self._rests_since is None:
            self.is_over = self.is_over or self._now() - self._since > self.after_s
        return self.is_over

    def _is_enough(self, message: Moved | Flushed | Result) -> bool:
        """Whether the present window has brought enough with this message."""
        if isinstance(message, Result):
            return message.name != WANTED_RATE  # a copy of a shared rate asks for each piece
        before = self._brought.get(message.key)
        offset = message.offset_bytes if isinstance(message, Flushed) else 0
        figures = (offset, message.bytes_done, message.bytes_zero)
        self._brought[message.key] = brought = tuple(map(max, before or figures, figures))
        if before is None or (isinstance(message, Flushed) and message.finished):
            return True
        self._gained += max(now - then for now, then in zip(brought, before, strict=True))
        return self._gained >= LEAST_BPS * (self.after_s or 0)

    def _owe(self, owes: bool) -> None:
        if not owes:
            self._rests_since = self._now() if self._rests_since is None else self._rests_since
        elif self._rests_since is not None:
            self._since += self._now() - self._rests_since
            self._rests_since = None

    def _owes_after(self, message: Moved | Flushed | Result) -> bool:
        if isinstance(message, Result):
            return not message.waits
        if self._watched is Watched.WHILE_READING:
            # After the bytes of a disk come its digests, for example. They take their time, and report nothing.
            return message.bytes_done < message.bytes_total or (isinstance(message, Flushed) and message.finished)
        return True
