"""Checks many pieces of a disk with several threads, up to the first wrong one.

    pieces, ascending ─▶ threads ─▶ look(piece, buffer) ─▶ None, or a finding

Pieces are handed out in order, and each is checked to its end. So when something is found, everything before it has been
checked, and the answer is the same for any number of threads.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from synvirt.blocks import new_buffer
from synvirt.copying import PROGRESS_EVERY_S, REQUEST_BYTES
from synvirt.errors import Cancelled

Piece = TypeVar("Piece")
Found = TypeVar("Found")

# The largest piece: `look` may read one into a buffer of this size, of which each thread has two.
PIECE_BYTES = REQUEST_BYTES


class Tally:
    """A count of bytes for several threads."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        """Adds to the count, from any thread."""
        with self._lock:
            self.total += amount


# For an error while finding the next piece: what was found before it has priority.
_LAST = sys.maxsize


class _Round(Generic[Piece, Found]):
    def __init__(
        self,
        pieces: Iterator[Piece],
        look: Callable[[Piece, memoryview, memoryview], Found | None],
        stop: Callable[[], bool],
    ) -> None:
        self._pieces = enumerate(pieces)
        self._look, self._stop = look, stop
        self._lock = threading.Lock()
        self._ended = False
        # Only the first finding or error in the disk's order counts.
        self.first: tuple[int, Found | BaseException] | None = None

    def work(self) -> None:
        number, found = _LAST, None
        try:
            buffers = new_buffer(PIECE_BYTES), new_buffer(PIECE_BYTES)
            while found is None:
                number = _LAST
                taken = self._take()
                if taken is None:
                    return
                number, piece = taken
                found = self._look(piece, *buffers)
        except BaseException as error:
            self._end(number, error)
        else:
            self._end(number, found)

    def _take(self) -> tuple[int, Piece] | None:
        with self._lock:
            if self._stop():
                raise Cancelled
            return None if self._ended else next(self._pieces, None)

    def _end(self, number: int, found: Found | BaseException) -> None:
        with self._lock:
            self._ended = True
            if self.first is None or number < self.first[0]:
                self.first = number, found

    def end(self) -> None:
        with self._lock:
            self._ended = True


def first_found(
    pieces: Iterator[Piece],
    look: Callable[[Piece, memoryview, memoryview], Found | None],
    *,
    threads: int,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[], None] = lambda: None,
) -> Found | None:
    """The finding of `look` for the first piece that has one; None, where no piece has one.

    `threads` threads call `look` at once, each with two buffers of PIECE_BYTES of its own. Its errors are raised, unless
    something was found before them. `on_progress` is called in the caller's thread. Cancelled, once `stop()`.
    """
    one_round = _Round(pieces, look, stop)
    with ThreadPoolExecutor(threads, thread_name_prefix="look") as pool:
        try:
            working = {pool.submit(one_round.work) for _ in range(threads)}
            while wait(working, PROGRESS_EVERY_S).not_done:
                on_progress()
        finally:
            one_round.end()
    on_progress()
    if one_round.first is None:
        return None
    _, found = one_round.first
    if isinstance(found, BaseException):
        raise found
    return found
