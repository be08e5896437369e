"""Whether a worker makes progress. A reader that loops, or a source that answers but sends nothing, would hold a job, its slot
and its lock forever."""

import time
from collections.abc import Callable

from synvirt.errors import DiskReadFailed
from synvirt.jobs.wire import Flushed, Moved, Result, Watched


class Stalled(DiskReadFailed):
    """The worker was ended, as it made no progress."""

    def __init__(self, after_s: float) -> None:
        super().__init__(
            f"the worker transferred nothing for {after_s:g} s, and was ended",
            hint="check what it read from; raise copy_stalled_s if that is so slow",
        )


class Stall:
    """`on_message` takes the worker's messages, `answered` notes that the service sent it a line. `after_s` None: no limit."""

    def __init__(self, watched: Watched, after_s: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._watched, self.after_s, self._now = watched, after_s, now
        self._brought: dict[str, tuple[int, ...]] = {}
        self._at, self._owes, self.is_over = now(), True, False

    def on_message(self, message: Moved | Flushed | Result) -> None:
        """Takes a message. One that repeats the last figures is no progress: disks are flushed every few seconds anyway."""
        if self._is_new(message):
            self._at = self._now()
        self._owes = self._owes_after(message)

    def answered(self) -> None:
        self._at, self._owes = self._now(), True

    def look(self) -> bool:
        """Whether the worker has stalled. Once it has, this stays true."""
        if self.after_s is not None and self._watched is not Watched.NEVER and self._owes:
            self.is_over = self.is_over or self._now() - self._at > self.after_s
        return self.is_over

    def _is_new(self, message: Moved | Flushed | Result) -> bool:
        if isinstance(message, Result):
            return True
        before = self._brought.get(message.key, (-1, -1, -1))
        offset = message.offset_bytes if isinstance(message, Flushed) else 0
        brought = tuple(map(max, before, (offset, message.bytes_done, message.bytes_zero)))
        self._brought[message.key] = brought
        return brought != before or (isinstance(message, Flushed) and message.finished)

    def _owes_after(self, message: Moved | Flushed | Result) -> bool:
        if isinstance(message, Result):
            return not message.waits
        if self._watched is Watched.WHILE_READING:
            # After the bytes of a disk come its digests, for example. They take their time, and report nothing.
            return message.finished if isinstance(message, Flushed) else message.bytes_done < message.bytes_total
        return True
